"""Every way around the door, first shown open with what closes it taken away, then closed by each layer alone."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

import pytest

from control.docker.service import DockerService
from control.plan import firewall
from control.plan.host import HostPlan
from tests.docker.sandboxes import Sandbox, Sandboxes
from tests.support.engine import PrivateEngine

HOST_PORT: Final = 7777
# A documentation address (RFC 5737) stands for the internet.
OUTSIDE: Final = "198.51.100.1"
METADATA: Final = "169.254.169.254"

_CONNECT: Final = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1.5) as s:
        s.settimeout(60)  # it is open, whenever who answers has its turn
        print("open", s.recv(100).decode().strip())
except OSError as error:
    print("closed", error)
"""
_SERVE: Final = """
import socket
s = socket.create_server(("0.0.0.0", %d))
print("serving", flush=True)
while True:
    c, _ = s.accept()
    c.sendall(b"hello from %s\\n")
    c.close()
"""

Chosen = Callable[..., contextlib.AbstractAsyncContextManager[None]]


async def host(engine: PrivateEngine, *argv: str) -> str:
    """Run a command in the engine's network namespace, "the host" of the sandboxes, and return its output."""
    process = await asyncio.create_subprocess_exec(*engine.in_network(argv), stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, argv
    return output.decode()


@contextlib.asynccontextmanager
async def serving(argv: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a server that says so on its first line."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"serving\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def connects(sandboxes: Sandboxes, address: str, port: int) -> str:
    """Return what a sandbox finds at `address`: "open …" or "closed …"."""
    ended = await sandboxes.run(f"exec python3 - {address} {port} <<'END'\n{_CONNECT}\nEND")
    return ended.stdout.strip()


async def within(engine: PrivateEngine, sandbox: Sandbox, *argv: str) -> str:
    """Run a command of the machine in a sandbox's network namespace, as root: what the sandbox itself may not."""
    client = engine.client()
    try:
        pid = client.api.inspect_container(sandbox.container)["State"]["Pid"]
    finally:
        client.close()
    process = await asyncio.create_subprocess_exec(
        *("nsenter", f"--target={pid}", "--net", "--", *argv), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, argv
    return output.decode()


@pytest.fixture
def only(service: DockerService, plan: HostPlan) -> Chosen:
    """Load, for a while, only those of our rules that `keep` chooses."""

    @contextlib.asynccontextmanager
    async def chosen(keep: Callable[[str, firewall.Rule], bool]) -> AsyncIterator[None]:
        rules = {name: rule for name, rule in firewall.rules(plan.network).items() if keep(name, rule)}
        loaded = await service._host._firewall.execute(firewall.load_command(plan.network, rules))
        assert loaded.status == 0, loaded.stderr
        try:
            yield
        finally:
            await service.prepare_host(plan)
            assert await service.verify_host(plan) == []

    return chosen


def _nothing(name: str, rule: firewall.Rule) -> bool:
    return False


def _family(family: str, chain: str) -> Callable[[str, firewall.Rule], bool]:
    return lambda name, rule: rule[:2] == (family, chain)


def _named(*names: str) -> Callable[[str, firewall.Rule], bool]:
    return lambda name, rule: name in names


# The host's ports


@pytest.fixture
async def host_server(engine: PrivateEngine) -> AsyncIterator[None]:
    """A service of the host that listens everywhere."""
    program = _SERVE % (HOST_PORT, "host")
    async with serving(engine.in_network([sys.executable, "-c", program])):
        yield


@pytest.fixture
async def bridge_address(engine: PrivateEngine, plan: HostPlan) -> AsyncIterator[str]:
    """Give the bridge the address that it would have without inhibit_ipv4."""
    address, bridge = plan.network.bridge_address, plan.network.bridge
    await host(engine, "ip", "address", "add", f"{address}/{plan.network.network.prefixlen}", "dev", bridge)
    yield str(address)
    await host(engine, "ip", "address", "flush", "dev", bridge)


async def test_host_is_open_without_our_rules_on_a_bridge_with_an_address(
    sandboxes: Sandboxes, host_server: None, bridge_address: str, only: Chosen
) -> None:
    async with only(_nothing):
        assert await connects(sandboxes, bridge_address, HOST_PORT) == "open hello from host"


async def test_host_is_closed_by_the_bridge_without_an_address_alone(
    sandboxes: Sandboxes, host_server: None, plan: HostPlan, only: Chosen
) -> None:
    async with only(_nothing):
        assert (await connects(sandboxes, str(plan.network.bridge_address), HOST_PORT)).startswith("closed")


@pytest.mark.parametrize("family", ["inet", "bridge"])
async def test_host_is_closed_by_either_input_chain_alone(
    sandboxes: Sandboxes, host_server: None, bridge_address: str, only: Chosen, family: str
) -> None:
    async with only(_family(family, "input")):
        assert (await connects(sandboxes, bridge_address, HOST_PORT)).startswith("closed")


# Other sandboxes


@pytest.fixture
async def neighbour(sandboxes: Sandboxes) -> Sandbox:
    """Another sandbox with a server."""
    program = _SERVE % (7000, "neighbour")
    sandbox = await sandboxes.launch(f"exec python3 - <<'END'\n{program}\nEND")
    await sandbox.said("serving")
    return sandbox


@pytest.fixture(params=["0", "1"], ids=["without br_netfilter", "with br_netfilter"])
async def br_netfilter(engine: PrivateEngine, request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Let bridged packets pass by iptables or through them, in this network namespace."""
    names = ("net.bridge.bridge-nf-call-iptables", "net.bridge.bridge-nf-call-arptables")
    before = [(await host(engine, "sysctl", "-n", name)).strip() for name in names]
    for name in names:
        await host(engine, "sysctl", "-q", f"{name}={request.param}")
    yield
    for name, value in zip(names, before, strict=True):
        await host(engine, "sysctl", "-q", f"{name}={value}")


async def test_neighbour_is_open_without_our_rules(
    sandboxes: Sandboxes, neighbour: Sandbox, br_netfilter: None, only: Chosen
) -> None:
    async with only(_nothing):
        assert await connects(sandboxes, str(neighbour.address), 7000) == "open hello from neighbour"


async def test_neighbour_is_closed(sandboxes: Sandboxes, neighbour: Sandbox, br_netfilter: None) -> None:
    assert (await connects(sandboxes, str(neighbour.address), 7000)).startswith("closed")


@pytest.mark.parametrize("kept", [("packets from",), ("packets to",), ("ARP from",), ("frames from",), ("frames to",)])
async def test_neighbour_is_closed_by_each_kind_of_rule_alone(
    sandboxes: Sandboxes, neighbour: Sandbox, only: Chosen, kept: tuple[str, ...]
) -> None:
    async with only(_named(*kept)):
        assert (await connects(sandboxes, str(neighbour.address), 7000)).startswith("closed")


async def test_forwarder_is_reached_with_br_netfilter_on_and_off(
    sandboxes: Sandboxes, plan: HostPlan, br_netfilter: None
) -> None:
    sandbox = await sandboxes.launch("exec 3<>/dev/tcp/opificia-gateway/8900; echo hello >&3; head -n 1 <&3")
    assert (await sandbox.ended()).stdout == f"door:{sandbox.address}\n"


async def test_other_ports_of_the_forwarder_are_closed(
    sandboxes: Sandboxes, engine: PrivateEngine, plan: HostPlan, only: Chosen
) -> None:
    client = engine.client()
    pid = client.api.inspect_container(plan.network.gateway_name)["State"]["Pid"]
    client.close()
    program = _SERVE % (7001, "forwarder")
    async with serving(["nsenter", f"--target={pid}", "--net", "--", sys.executable, "-c", program]):
        async with only(_nothing):
            assert await connects(sandboxes, str(plan.network.forwarder), 7001) == "open hello from forwarder"
        assert (await connects(sandboxes, str(plan.network.forwarder), 7001)).startswith("closed")


async def test_forwarder_opens_no_connection_to_a_sandbox(
    sandboxes: Sandboxes, neighbour: Sandbox, engine: PrivateEngine, plan: HostPlan, only: Chosen
) -> None:
    client = engine.client()
    pid = client.api.inspect_container(plan.network.gateway_name)["State"]["Pid"]
    client.close()

    async def connect() -> str:
        process = await asyncio.create_subprocess_exec(
            *("nsenter", f"--target={pid}", "--net", "--", sys.executable, "-c", _CONNECT),
            *(str(neighbour.address), "7000"),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        return output.decode()

    async with only(_nothing):
        assert await connect() == "open hello from neighbour\n"
    assert (await connect()).startswith("closed")


# Frames of other kinds, from a container that may send any (a sandbox may not)

_SEND: Final = """
import socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
s.bind(("eth0", 0))
own = s.getsockname()[4]
frame = bytes.fromhex(sys.argv[1].replace("SOURCE", own.hex()))
for _ in range(20):
    s.send(frame)
"""
_RECEIVE: Final = """
import socket, sys
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
s.bind(("eth0", 3))
wanted = bytes.fromhex(sys.argv[1])
print("serving", flush=True)
sys.stdin.readline()  # until all has been sent
s.settimeout(1)
try:
    while wanted not in s.recv(2000): pass
    print("received")
except TimeoutError:
    print("nothing")
"""
# Ethertype 0x88B5 is for experiments (IEEE 802), 0x86DD is IPv6.
_ODD: Final = ("ffffffffffff" + "SOURCE" + "88b5" + "6f706966696369612d6f6464", "6f706966696369612d6f6464")
_IPV6: Final = (
    "333300000001" + "SOURCE" + "86dd" + "60000000000c3b01" + "fe80" + "00" * 13 + "01" + "ff02" + "00" * 13 + "01"
    "6f706966696369612d763600",
    "6f706966696369612d7636",
)


async def _passes(sandboxes: Sandboxes, engine: PrivateEngine, neighbour: Sandbox, frame: str, sign: str) -> bool:
    sender = await sandboxes.launch("echo up; sleep 30")
    await sender.said("up")
    client = engine.client()
    pid = client.api.inspect_container(neighbour.container)["State"]["Pid"]
    client.close()
    async with serving(["nsenter", f"--target={pid}", "--net", "--", sys.executable, "-c", _RECEIVE, sign]) as receiver:
        await within(engine, sender, sys.executable, "-c", _SEND, frame)
        said, _ = await receiver.communicate(b"\n")
        return said == b"received\n"


@pytest.mark.parametrize(("frame", "sign"), [_ODD, _IPV6], ids=["odd", "IPv6"])
async def test_frames_that_are_not_ipv4_pass_only_without_the_rules_for_hardware_addresses(
    sandboxes: Sandboxes, engine: PrivateEngine, neighbour: Sandbox, only: Chosen, frame: str, sign: str
) -> None:
    async with only(lambda name, rule: not name.startswith("frames")):
        assert await _passes(sandboxes, engine, neighbour, frame, sign)
    assert not await _passes(sandboxes, engine, neighbour, frame, sign)


async def test_nobody_speaks_for_the_forwarder(
    sandboxes: Sandboxes, engine: PrivateEngine, neighbour: Sandbox, plan: HostPlan, only: Chosen
) -> None:
    """An ARP answer that gives the forwarder's address to another sandbox reaches nobody."""
    forwarder, victim = plan.network.forwarder.packed.hex(), neighbour.address.packed.hex()
    answer = "ffffffffffff" + "SOURCE" + "0806" + "0001080006040002" + "SOURCE" + forwarder + "ffffffffffff" + victim
    sign = forwarder + "ffffffffffff" + victim
    async with only(lambda name, rule: not name.startswith("forged")):
        assert await _passes(sandboxes, engine, neighbour, answer, sign)
    assert not await _passes(sandboxes, engine, neighbour, answer, sign)


# The internet


@pytest.fixture
async def outside(engine: PrivateEngine) -> AsyncIterator[None]:
    """Servers beyond the host, a host that forwards to them, and the engine's own forward rules switched off."""
    async with serving(["unshare", "--net", "--", "sh", "-c", "echo serving; exec sleep 600"]) as holder:
        await host(engine, "ip", "link", "add", "uplink0", "type", "veth", "peer", "name", "uplink1")
        await host(engine, "ip", "link", "set", "uplink1", "netns", str(holder.pid))
        await host(engine, "ip", "address", "add", "198.51.100.2/24", "dev", "uplink0")
        await host(engine, "ip", "link", "set", "uplink0", "up")
        await host(engine, "ip", "route", "add", METADATA, "dev", "uplink0")
        await host(engine, "sysctl", "-q", "net.ipv4.ip_forward=1")
        saved = await host(engine, "iptables-save")
        await host(engine, "iptables", "-P", "FORWARD", "ACCEPT")
        await host(engine, "iptables", "-F", "FORWARD")
        inside = ("nsenter", f"--target={holder.pid}", "--net", "--")
        setup = f"""
ip link set lo up
ip address add {OUTSIDE}/24 dev uplink1
ip address add {METADATA}/32 dev uplink1
ip link set uplink1 up
ip route add default via 198.51.100.2
"""
        process = await asyncio.create_subprocess_exec(*inside, "sh", "-ec", setup)
        assert await process.wait() == 0
        async with serving([*inside, sys.executable, "-c", _SERVE % (80, "outside")]):
            yield
        restore = await asyncio.create_subprocess_exec(
            *engine.in_network(["iptables-restore"]), stdin=asyncio.subprocess.PIPE
        )
        await restore.communicate(saved.encode())
        await host(engine, "ip", "link", "del", "uplink0")


async def _outside(sandboxes: Sandboxes, engine: PrivateEngine, plan: HostPlan, address: str) -> str:
    """Return what a sandbox finds outside, with the default route that some engines give it and others do not."""
    sandbox = await sandboxes.launch(
        f"mkfifo /work/go; echo up; read -r < /work/go; exec python3 - {address} 80 <<'END'\n{_CONNECT}\nEND"
    )
    await sandbox.said("up")
    await within(engine, sandbox, "ip", "route", "replace", "default", "via", str(plan.network.bridge_address))
    client = engine.client()
    try:
        execution = client.api.exec_create(sandbox.container, ["sh", "-c", "echo > /work/go"])
        await asyncio.to_thread(client.api.exec_start, execution)
    finally:
        client.close()
    return (await sandbox.ended()).stdout.removeprefix("up\n").strip()


@pytest.mark.parametrize("address", [OUTSIDE, METADATA])
async def test_outside_is_open_without_our_rules_on_a_bridge_with_an_address(
    sandboxes: Sandboxes,
    engine: PrivateEngine,
    plan: HostPlan,
    outside: None,
    bridge_address: str,
    only: Chosen,
    address: str,
) -> None:
    async with only(_nothing):
        assert await _outside(sandboxes, engine, plan, address) == "open hello from outside"


@pytest.mark.parametrize("rule", ["out", "in"])
async def test_outside_is_closed_by_each_forward_rule_alone(
    sandboxes: Sandboxes,
    engine: PrivateEngine,
    plan: HostPlan,
    outside: None,
    bridge_address: str,
    only: Chosen,
    rule: str,
) -> None:
    async with only(_named(rule)):
        assert (await _outside(sandboxes, engine, plan, OUTSIDE)).startswith("closed")


@pytest.mark.parametrize("address", [OUTSIDE, METADATA])
async def test_outside_is_closed_by_the_bridge_without_an_address_alone(
    sandboxes: Sandboxes, engine: PrivateEngine, plan: HostPlan, outside: None, only: Chosen, address: str
) -> None:
    async with only(_nothing):
        assert (await _outside(sandboxes, engine, plan, address)).startswith("closed")


# Names

_RESOLVER: Final = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("127.0.0.1", 53))
print("serving", flush=True)
while True:
    question, client = s.recvfrom(2000)
    end = question.index(0, 12) + 5
    kind = question[end - 4:end - 2]
    answer = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\1\\0\\4\\xc6\\x33\\x64\\x07" if kind == b"\\0\\1" else b""
    s.sendto(question[:2] + b"\\x81\\x80\\0\\1" + bytes([0, bool(answer)]) + b"\\0\\0\\0\\0" + question[12:end] + answer, client)
    print("asked", question[12:end], flush=True)
"""
_NO_DNS_SETTINGS: Final = {"Dns": [], "DnsOptions": [], "DnsSearch": []}
_LOOK_UP: Final = "python3 -c 'import socket; print(socket.gethostbyname(\"secret.example.com\"))' 2>&1 | tail -n 1"


async def test_a_made_up_name_leaves_through_the_engine_unless_its_resolver_is_none(
    sandboxes: Sandboxes, engine: PrivateEngine
) -> None:
    """CVE-2024-29018: the engine asks from the host's side, past every rule on the bridge."""
    async with serving(engine.in_network([sys.executable, "-c", _RESOLVER])) as resolver:
        leaking = await sandboxes.run(_LOOK_UP, change=_NO_DNS_SETTINGS)
        assert leaking.stdout == "198.51.100.7\n"
        ours = await sandboxes.run(_LOOK_UP)
        assert "198.51.100.7" not in ours.stdout
        # A second question by the first way: nothing came in between.
        assert (await sandboxes.run(_LOOK_UP, change=_NO_DNS_SETTINGS)).stdout == "198.51.100.7\n"
        assert resolver.stdout is not None
        resolver.kill()
        asked = (await resolver.stdout.read()).decode().splitlines()
        questions = [line for line in asked if "secret" in line]
        assert len(questions) == 2, questions
