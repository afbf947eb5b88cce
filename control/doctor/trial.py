"""The probe sandbox: two sessions, one that tries everything and one that it must not reach, and what became of it."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import msgspec

from control.api.types import RunCompleted, RunOutput, RunRequest, SessionView
from control.client import ControlClient, ControlError, ControlUnavailableError
from control.doctor.findings import Finding
from control.plan.session import SessionState
from control.runner.messages import Stream
from control.spec import Resources, SandboxSpec
from gateway.contract.policy import NetworkLevel

# Enough for the probe, few enough to reach at once.
PIDS: Final = 128
SIBLING_PORT: Final = 8000
# Half a minute where nothing else runs; a host that is busy may take a few, and is no worse for it.
TIME_LIMIT_MS: Final = 480_000
_START_S: Final = 30.0
_SHORT_GRACE_MS: Final = 500
# The probe says some kilobytes; another image's Python may say whatever it likes.
_MAX_SAID: Final = 1024 * 1024

# Answers at SIBLING_PORT for as long as the session lives, and shows that somebody does.
_SERVE: Final = f"""
import socket
with socket.create_server(("0.0.0.0", {SIBLING_PORT})) as server:
    socket.create_connection(("127.0.0.1", {SIBLING_PORT})).close()
    print("listening", flush=True)
    while True:
        server.accept()[0].close()
"""

# The probe's checks: what each one tries, in the words of the table, and what to do when it is not well.
_RULES: Final = "opificia host prepare; then see the firewall in its `host verify`"
_CONTAINER: Final = "the engine did not enforce it: see `docker info` for warnings, and update the engine"
CHECKS: Final = {
    "metadata": ("the cloud's metadata address is refused", _RULES),
    "host_ports": ("no port of the host is reached", _RULES),
    "host_datagrams": ("no UDP port of the host is reached", _RULES),
    "sibling": ("no other sandbox is reached", _RULES),
    "outside": ("no way out past the gateway", _RULES),
    "dns": ("no DNS that leaves", "update the engine; the sandbox's resolver must be 127.0.0.1"),
    "ipv6": ("no IPv6", _CONTAINER),
    "raw_sockets": ("no raw sockets, no vsock", "see [sandbox] seccomp_profile; it must not allow them"),
    "namespaces": ("no namespaces of its own", "see [sandbox] seccomp_profile; it must not allow unshare"),
    "mount": ("no mounts", _CONTAINER),
    "kernel_settings": ("no kernel settings are written", _CONTAINER),
    "system_calls": ("no keyring, no io_uring", "see [sandbox] seccomp_profile; it must not allow them"),
    "root_file_system": ("the root file system is read-only", _CONTAINER),
    "privileges": ("no privileges", _CONTAINER),
    "operators_key": ("the operator's model key is nowhere", "remove it from the image, --env or --in; then rotate it"),
    "other_token": (
        "another session's token is worth nothing",
        "set [listen] proxy_protocol = true in gateway.toml and restart the gateway",
    ),
    "unlisted": ("a host that is not listed is refused", "see [egress] registries_file in gateway.toml"),
    "registry": ("a package registry is reached", "opificia egress check --session …; check DNS and the way out"),
    "model": ("the model API is reached", "check [model] upstream and api_key_file in gateway.toml"),
    "disk": ("no more disk than allowed", "opificia host prepare; /out must be a volume of limited size"),
    "processes": ("no more processes than allowed", "the engine needs the pids cgroup; see `docker info`"),
    "memory": ("no more memory than allowed", "the engine needs the memory cgroup; see `docker info`"),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What the probe is told of this host: its addresses, the TCP and UDP ports there, /out's size, the operator's key.

    `registry` is a host of the list that level `registries` allows. `heard_datagram` tells whether one came to a UDP port of
    the host that is there for the trial.
    """

    image: str
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    out_bytes: int
    registry: str
    key: str = ""
    udp_ports: tuple[int, ...] = ()
    heard_datagram: Callable[[], bool] = lambda: False


class _Line(msgspec.Struct):
    check: str
    ok: bool
    detail: str


async def try_sandbox(client: ControlClient, subject: Subject) -> list[Finding]:
    """Run the probe and return its findings; they come in the order of CHECKS, and none is left out."""
    try:
        async with (
            _session(client, subject, NetworkLevel.NONE) as sibling,
            _session(client, subject, NetworkLevel.REGISTRIES) as probe,
            _serving(client, sibling.id),
        ):
            config = await _config(client, subject, probe, sibling)
            output, ended = await _output(client, probe.id, "python3", "-I", "-", config, stdin=_source())
    except (ControlError, ControlUnavailableError) as error:
        return [Finding("sandbox", "a probe sandbox runs", False, str(error), "opificia host verify")]
    except _NotStartedError as error:
        remedy = "opificia control status; opificia images build"
        return [Finding("sandbox", "a probe sandbox runs", False, str(error), remedy)]
    findings = _findings(output, ended)
    if subject.heard_datagram():
        # The host's own word: the answer need not have come back.
        title, remedy = CHECKS["host_datagrams"]
        heard = Finding("sandbox", title, False, "a datagram of the sandbox came to the host", remedy)
        findings = [heard if each.check == title else each for each in findings]
    return [Finding("sandbox", "a probe sandbox runs", True, probe.id), *findings]


class _NotStartedError(Exception):
    """A sandbox of the trial did not come to the point where it can be used."""


def _source() -> str:
    return (resources.files("control.doctor") / "probe.py").read_text()


def _findings(output: str, ended: str) -> list[Finding]:
    said: dict[str, _Line] = {}
    for text in output.splitlines():
        # What comes from a sandbox is a claim; here it is our own program's, and still only text.
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
            line = msgspec.json.decode(text, type=_Line)
            said[line.check] = line
    findings = []
    for name, (title, remedy) in CHECKS.items():
        found = said.get(name, _Line(name, False, f"the probe did not say: {ended}"))
        findings.append(Finding("sandbox", title, found.ok, found.detail[:500], "" if found.ok else remedy))
    return findings


@contextlib.asynccontextmanager
async def _session(client: ControlClient, subject: Subject, network: NetworkLevel) -> AsyncIterator[SessionView]:
    spec = SandboxSpec(
        image=subject.image, network=network, resources=Resources(pids=PIDS), time_limit_ms=TIME_LIMIT_MS
    )
    made = await client.create(spec)
    try:
        await client.launch(made.id)
        yield await _connected(client, made.id)
    finally:
        # Whatever else failed: two sandboxes that nobody needs must not stay.
        with contextlib.suppress(ControlError, ControlUnavailableError):
            await client.stop(made.id, _SHORT_GRACE_MS)


async def _connected(client: ControlClient, session: str) -> SessionView:
    try:
        async with asyncio.timeout(_START_S):
            async for _ in client.events(session):
                view = await client.get(session)
                if view.runner_connected:
                    return view
                if view.state.final:
                    break
    except TimeoutError:
        pass
    view = await client.get(session)
    if view.state is SessionState.CREATED:
        raise _NotStartedError(f"it waits for room, number {view.queue_position} in the queue; stop other sessions")
    raise _NotStartedError(f"it is {view.state}, {view.reason or 'its runner is not connected'}: {view.message}")


@contextlib.asynccontextmanager
async def _serving(client: ControlClient, session: str) -> AsyncIterator[None]:
    """Have a server listen in a session while the context is open."""
    lines = client.run(session, RunRequest(argv=("python3", "-c", _SERVE)))
    try:
        async with asyncio.timeout(_START_S):
            async for line in lines:
                if isinstance(line, RunOutput) and "listening" in line.data:
                    break
            else:
                raise _NotStartedError("nothing can listen in the second sandbox, so it proves nothing")
        yield
    except TimeoutError as error:
        raise _NotStartedError("the second sandbox does not answer") from error
    finally:
        # Leaving the iteration cancels the command.
        await lines.aclose()  # type: ignore[attr-defined]  # an asynchronous generator's


async def _config(client: ControlClient, subject: Subject, probe: SessionView, sibling: SessionView) -> str:
    """Return the probe's argument, as JSON."""
    token, _ = await _output(client, sibling.id, "printenv", "OPIFICIA_RUNNER_TOKEN")
    served = {each.id: each.address for each in (await client.gateway()).sessions}
    key = subject.key
    config: dict[str, Any] = {
        "addresses": subject.addresses,
        "ports": subject.ports,
        "udp_ports": subject.udp_ports,
        "sibling": served.get(sibling.id, ""),
        "sibling_port": SIBLING_PORT,
        "sibling_session": sibling.id,
        "sibling_token": token.strip(),
        "registry": subject.registry,
        "pids": PIDS,
        "memory_bytes": probe.memory_bytes,
        "out_bytes": subject.out_bytes,
        # Not the key: the place that is searched for it must not be given it.
        "key_prefix": key[:4],
        "key_length": len(key),
        "key_sha256": hashlib.sha256(key.encode()).hexdigest() if key else "",
    }
    return msgspec.json.encode(config).decode()


async def _output(client: ControlClient, session: str, *argv: str, stdin: str = "") -> tuple[str, str]:
    """Run a command; return what it wrote to stdout, and in a few words how it ended."""
    said = {Stream.STDOUT: "", Stream.STDERR: ""}
    ended = "its end is not known"
    request = RunRequest(argv=argv, stdin=stdin, timeout_ms=TIME_LIMIT_MS // 2)
    async for line in client.run(session, request):
        if isinstance(line, RunOutput):
            # A piece is bounded by the protocol; no more of them than that are kept.
            if len(said[line.stream]) < _MAX_SAID:
                said[line.stream] += line.data
        elif isinstance(line, RunCompleted):
            ended = "it took too long" if line.timed_out else f"exit code {line.exit_code} {line.error}".strip()
    return said[Stream.STDOUT], f"{ended} {said[Stream.STDERR][-200:]}".strip()
