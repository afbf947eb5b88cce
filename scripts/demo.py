"""The demo: a private host, two sandboxes, and each promise shown once. Run it by `scripts/demo`.

What is closed is shown open first, with the one rule removed that closes it; else "refused" might only mean that nobody
was listening.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from control.plan.network import NetworkSettings
from control.spec import SandboxSpec
from gateway.contract.policy import NetworkLevel
from tests.support.engine import EngineUnavailableError, PrivateEngine
from tests.support.host import Model, PrivateHost, stand_in_model
from tests.support.hostside import (
    HOST_RULES,
    NEIGHBOUR_RULES,
    ask_engine_dns,
    bridge_address,
    listening,
    without_rules,
)
from tests.support.paths import CACHE
from tests.support.processes import all_pids, command_line
from tests.support.programs import ASK_MODEL, PORT, SERVE
from tests.support.sandbox import IMAGE, Ran, Sandbox

RESULTS: Final = CACHE / "demo"
NETWORK: Final = NetworkSettings()
METADATA: Final = "169.254.169.254"
# A host that is on no list of registries.
UNLISTED: Final = "example.com"
# What the real provider is asked, when ANTHROPIC_API_KEY is set; the stand-in takes any name.
MODEL: Final = os.environ.get("OPIFICIA_DEMO_MODEL", "claude-haiku-4-5")


class StepError(Exception):
    """A step is not as it should be."""


def require(condition: bool, problem: str) -> None:
    """Fail the step unless `condition` holds."""
    if not condition:
        raise StepError(problem)


@dataclass(slots=True)
class Report:
    """What is printed: a line a step, as it ends."""

    console: Console
    failed: int = 0
    begun: float = field(default_factory=time.monotonic)

    def step(self, name: str, act: Callable[[], str]) -> None:
        """Run one step; it returns its evidence, or fails."""
        begun = time.monotonic()
        with self.console.status(name):
            try:
                mark, evidence = Text("✓", "bold green"), act()
            except Exception as error:
                # Whatever went wrong is this step's result; the others are still worth a look.
                mark, evidence = Text("✗", "bold red"), f"{error}" or type(error).__name__
                self.failed += 1
        seconds = f"{time.monotonic() - begun:5.1f} s"
        first, *others = evidence.strip().splitlines() or [""]
        self.console.print(mark, f"{name:<45}", Text(seconds, "dim"), Text(f" {first}", "dim"), soft_wrap=True)
        if mark.plain == "✗":
            for line in others[-30:]:
                self.console.print(Text(f"       {line}", "dim"))


@dataclass(slots=True)
class Demo:
    """The steps, on a host with two sandboxes: `agent` at level registries, `other` at level open."""

    host: PrivateHost
    key: str
    agent: Sandbox
    other: Sandbox
    sdk: Future[Ran] = field(default_factory=Future)

    def pip(self) -> str:
        """A real package, through policy, pinned addresses and splice."""
        done = self.agent.run("pip", "download", "--no-cache-dir", "--no-deps", "--dest", "/work/wheels", "six")
        require(done.code == 0, f"pip: {done.output}")
        files = self.agent.run("ls", "/work/wheels").stdout.split()
        require(any(name.endswith(".whl") for name in files), f"no wheel was downloaded: {files}")
        closed = [line for line in self.agent.egress() if line["event"] == "close"]
        return f"{files[0]}, {sum(line['bytes_down'] for line in closed):,} bytes through {len(closed)} tunnels"

    def npm(self) -> str:
        """The other registry's client."""
        done = self.agent.run("npm", "view", "is-number", "version")
        require(done.code == 0 and bool(done.stdout.strip()), f"npm: {done.output}")
        return f"is-number {done.stdout.strip()}"

    def unlisted(self) -> str:
        """A host that is on no list: let through at level open, refused at level registries."""
        url = f"https://{UNLISTED}/"
        self.other.run("curl", "-sS", "-o", "/dev/null", "--max-time", "30", url)
        line = self.other.decision(UNLISTED)
        open_reasons = ("", "name_not_found", "resolve_failed", "resolve_timeout")
        require(
            line.get("reason", "").startswith("connect_") or line.get("reason", "") in open_reasons,
            f"level open should let {UNLISTED} through to the network: {line}",
        )
        curl = self.agent.run("curl", "-sS", "--max-time", "30", url)
        require(curl.code != 0 and "403" in curl.stderr, f"curl was not refused: {curl.output}")
        git = self.agent.run("git", "ls-remote", f"https://{UNLISTED}/repository.git")
        require(git.code != 0 and "403" in git.stderr, f"git was not refused: {git.output}")
        reason = self.agent.decision(UNLISTED)["reason"]
        require(reason == "host_not_listed", f"refused for {reason}")
        return f"curl and git: 403 {reason}; at level open the policy lets it through"

    def metadata(self) -> str:
        """The cloud's metadata address: refused by policy, refused by class even where a rule names it, no way past the proxy."""
        url = f"http://{METADATA}/latest/meta-data/"
        listed = self.agent.run("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", url)
        require(listed.stdout == "403", f"level registries: {listed.output}")
        named = self.other.run("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", url)
        require(named.stdout == "403", f"level open, allowed by a rule: {named.output}")
        reason = self.other.decision(METADATA)["reason"]
        require(reason == "address_not_public", f"level open, allowed by a rule: refused for {reason}")
        direct = self.agent.run("curl", "-sS", "--noproxy", "*", "--max-time", "1", url)
        require(direct.code != 0, f"reached without the proxy: {direct.output}")
        return f"403 {reason}, even at level open with a rule that names it; no way past the proxy"

    def host_port(self) -> str:
        """A port that listens on the host."""
        engine = self.host.engine
        with listening(engine, "tcp", PORT):
            with bridge_address(engine, NETWORK) as address:
                with without_rules(engine, NETWORK, HOST_RULES):
                    patience_s = self.patience(address)
                require(not self.agent.reaches(address, patience_s), "reached in spite of the rules")
            with without_rules(engine, NETWORK, HOST_RULES):
                require(not self.agent.reaches(address, patience_s), "reached although the bridge has no address")
        return "open without rules; closed by the rules alone, and by the bridge without address alone"

    def patience(self, address: str) -> float:
        """Show that an address is open, and return how long to wait before it counts as closed: longer than that took."""
        seconds = self.agent.reaches(address, 20.0)
        if seconds is None:
            raise StepError("not reached with its rules removed: nothing is shown")
        return max(0.5, min(10 * seconds, 2.0))

    def neighbour(self) -> str:
        """A port that listens in the other sandbox."""
        engine, address = self.host.engine, str(self.other.address)
        with self.other.background("python3", "-c", SERVE, ready="listening"):
            with without_rules(engine, NETWORK, NEIGHBOUR_RULES):
                patience_s = self.patience(address)
            require(not self.agent.reaches(address, patience_s), "reached in spite of the rules")
        return "open without the bridge's rules; closed with them"

    def names(self) -> str:
        """A made-up name, as a way to carry secrets out: Docker's own DNS forwards it, a sandbox's does not."""
        name = f"secret-{secrets.token_hex(4)}.example"
        engine = self.host.engine
        with listening(engine, "dns", 53) as queries:
            ask_engine_dns(engine, NETWORK, IMAGE, name)
            before = queries.read_text()
            require(name in before, "the engine's DNS did not forward it: nothing is shown")
            require(not self.agent.resolves(f"agent-{name}"), "resolved")
            require(queries.read_text() == before, f"a query left: {queries.read_text()}")
        return "a plain container's query leaves by the engine's DNS; a sandbox's does not leave"

    def install(self) -> Ran:
        """Install the model's SDK, through the gateway."""
        pip = ("pip", "install", "--quiet", "--no-cache-dir", "--target", "/work/sdk", "anthropic")
        return self.agent.run(*pip, timeout_s=300)

    def model(self) -> str:
        """The official SDK, installed through the gateway, with nothing but the environment."""
        install = self.sdk.result()
        require(install.code == 0, f"pip: {install.output}")
        done = self.agent.run("env", "PYTHONPATH=/work/sdk", "python3", "-c", ASK_MODEL, MODEL, timeout_s=120)
        require(done.code == 0, f"the SDK: {done.output}")
        pieces, tokens, text = done.stdout.strip().split(" ", 2)
        require(int(pieces) > 1, f"it did not stream: {done.stdout}")
        return f"{pieces} pieces, {tokens} tokens: {text[:60]!r}"

    def no_key(self) -> str:
        """The operator's key is nowhere in the sandbox; a planted one is found."""
        planted = self.key[:4] + secrets.token_urlsafe(len(self.key))[: len(self.key) - 4]
        self.agent.run("sh", "-c", "cat > /work/planted", stdin=f"x={planted}\n")
        files, (planted_in, key_in) = self.agent.search(planted, self.key)
        require(planted_in == ["/work/planted"], f"the search does not find what was planted: {planted_in}")
        require(not key_in, f"it is in {key_in}")
        return f"not in any of {files:,} files, environments and command lines (a planted one is found)"

    def out(self) -> str:
        """What is left in /out is the operator's after the end."""
        done = self.agent.run("sh", "-c", "echo 42 > /out/answer.txt")
        require(done.code == 0, f"cannot write: {done.output}")
        ended = self.agent.stop()
        require(ended.state == "stopped", f"the session {ended.state}: {ended.message}")
        files = self.agent.out()
        require(files.get("answer.txt") == b"42\n", f"/out holds {sorted(files)}")
        usage = ended.usage
        require(usage is not None and usage.output_tokens > 0, f"the model's tokens were not counted: {usage}")
        return "answer.txt is in the results; the session is stopped, its container gone"

    def command_line(self) -> str:
        """The same by one command of the operator's."""
        done = self.host.cli(
            "run", IMAGE, "--network", "none", "--out", str(RESULTS / "out"), "--", "sh", "-c", "id > /out/id"
        )
        text = (RESULTS / "out/id").read_text()
        require("uid=60610(node)" in text, f"it ran as {text!r}\n{done.stdout}{done.stderr}")
        return f"opificia run … ran as {text.split()[0]}"

    def save(self) -> list[dict[str, Any]]:
        """Keep what is worth a look; return the agent's egress log."""
        for session in (self.agent.session, self.other.session):
            target = RESULTS / session
            shutil.copytree(self.host.sessions / session, target, ignore=shutil.ignore_patterns("in"))
            shutil.copy(self.host.egress_logs / f"{session}.log", target / "egress.log")
        (RESULTS / "gateway.log").write_text(self.host.gateway.log())
        (RESULTS / "control.log").write_text(self.host.control.log())
        lines = (RESULTS / self.agent.session / "egress.log").read_text().splitlines()
        return [json.loads(line) for line in lines]


def main() -> int:
    """Run the demo; 0 when every step is as it should be."""
    # Everything is taken down in order, also when a terminal or a service manager ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # What is piped into a file has no width of its own.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    report = Report(console)
    CACHE.mkdir(parents=True, exist_ok=True)
    # Held to the end of the process, however it ends.
    lock = (CACHE / "demo.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        console.print(
            Text(f"✗ another demo is running and writes to {RESULTS}: wait for it, or set OPIFICIA_CACHE", "bold red")
        )
        return 1
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    try:
        engine = PrivateEngine.acquire()
        with contextlib.ExitStack() as stack:
            host, lines = run(report, engine, stack)
    except EngineUnavailableError as error:
        console.print(Text(f"✗ {error}", "bold red"))
        return 1
    report.step("nothing is left running", lambda: nothing_left(engine, host))
    show_egress(console, lines)
    console.print(
        f"\nResults: {RESULTS} (egress.log, stdout.log, events.jsonl and out.tar of each session, daemons' logs)"
    )
    verdict = Text("all as it should be", "bold green")
    if report.failed:
        verdict = Text(f"{report.failed} not as it should be", "bold red")
    console.print(verdict, f"after {time.monotonic() - report.begun:.0f} s")
    return 1 if report.failed else 0


def run(report: Report, engine: PrivateEngine, stack: contextlib.ExitStack) -> tuple[PrivateHost, list[dict[str, Any]]]:
    """Start everything on `stack`, take the steps, and return the host and the agent's egress log."""
    report.step("a private engine, in namespaces of its own", lambda: start_engine(engine, stack))
    model = operator_model(stack)
    host = PrivateHost(engine, model)
    stack.callback(host.stop)
    report.step("images, network, forwarder, firewall, daemons", lambda: start_host(host))
    demo: list[Demo] = []
    beside = stack.enter_context(ThreadPoolExecutor(1))
    report.step("two sandboxes, connected through the door", lambda: launch(host, model, demo))
    if not demo:
        report.console.print(Text(host.logs(), "dim"))
        return host, []
    report.step("pip download, level registries", demo[0].pip)
    report.step("npm view", demo[0].npm)
    # Takes its time beside the steps that follow.
    demo[0].sdk = beside.submit(demo[0].install)
    for name, act in (
        ("a host that is not listed: refused", demo[0].unlisted),
        ("the metadata address: refused", demo[0].metadata),
        ("a port of the host: unreachable", demo[0].host_port),
        ("the other sandbox: unreachable", demo[0].neighbour),
        ("a made-up DNS name: does not resolve", demo[0].names),
        ("a streaming model call by the official SDK", demo[0].model),
        ("the operator's key: nowhere in the sandbox", demo[0].no_key),
        ("a file written to /out", demo[0].out),
        ("the same by one command", demo[0].command_line),
    ):
        report.step(name, act)
    return host, demo[0].save()


def start_engine(engine: PrivateEngine, stack: contextlib.ExitStack) -> str:
    """Start the engine."""
    stack.enter_context(engine)
    with contextlib.closing(engine.client()) as client:
        return f"Docker {client.version()['Version']}"


def operator_model(stack: contextlib.ExitStack) -> Model:
    """The real provider when the operator's key is there, else a stand-in."""
    if key := os.environ.get("ANTHROPIC_API_KEY"):
        return Model("https://api.anthropic.com", key)
    return stack.enter_context(stand_in_model())


def start_host(host: PrivateHost) -> str:
    """Start the host; its changes are what `opificia host prepare` said."""
    host.start()
    return "gateway and control run as unprivileged users"


def launch(host: PrivateHost, model: Model, into: list[Demo]) -> str:
    """Launch both sandboxes."""
    agent = host.sandbox(SandboxSpec(image=IMAGE, session_id="agent", network=NetworkLevel.REGISTRIES))
    spec = SandboxSpec(image=IMAGE, session_id="other", network=NetworkLevel.OPEN, allow=(METADATA,))
    other = host.sandbox(spec)
    into.append(Demo(host, model.key, agent, other))
    return f"{agent.address} and {other.address}; each runner said hello over its WebSocket"


def nothing_left(engine: PrivateEngine, host: PrivateHost) -> str:
    """Look for processes, folders and cgroups of this run after its end."""
    left = [command_line(pid) for pid in engine.processes()]
    left += [line for pid in all_pids() if str(host.root) in (line := command_line(pid))]
    require(not left, "\n".join(["these processes:", *left]))
    require(not engine.scratch.exists(), f"the folder {engine.scratch}")
    return "no process, container, network namespace or temporary folder"


def show_egress(console: Console, lines: list[dict[str, Any]]) -> None:
    """Print the agent's egress log as a table, repeated decisions counted."""
    table = Table(title="egress.log of the agent", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("event", "kind", "host", "reason"):
        table.add_column(column)
    for column in ("times", "bytes up", "bytes down"):
        table.add_column(column, justify="right")
    # A registry's hosts are shown by the registry's name, as the rule that allowed them calls it.
    registry = {
        line["host"]: line["reason"].removeprefix("registries:") + "'s"
        for line in lines
        if line["event"] == "allow" and line.get("reason", "").startswith("registries:")
    }
    rows: dict[tuple[str, ...], list[int]] = {}
    for line in lines:
        host = line.get("host", "")
        where = f"{registry.get(host, host)}:{line.get('port', '')}"
        row = rows.setdefault((line["event"], line["kind"], where, line.get("reason", "")), [0, 0, 0])
        row[0] += 1
        row[1] += line.get("bytes_up", 0)
        row[2] += line.get("bytes_down", 0)
    for (event, kind, where, reason), (times, up, down) in rows.items():
        style = "red" if event == "refuse" else ""
        table.add_row(event, kind, where, reason, str(times), f"{up:,}", f"{down:,}", style=style)
    console.print()
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
