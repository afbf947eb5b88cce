"""Every way of a packet out of a sandbox and out of the forwarder of a deployed host, and the rules that close it.

Around the rules all is opened that closes anything besides: the bridge gets an address, its members a route and IPv6,
and the engine's own rules let everything through. What is closed then is closed by our rules alone.
"""

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from control.plan.container import LABEL_SESSION
from control.plan.network import NetworkSettings
from tests.host.deploy_machine import Machine
from tests.host.deploy_site import IMAGE, PORT, Site
from tests.support.hostside import HOST_RULES, NEIGHBOUR_RULES, listening, rules_without
from tests.support.processes import wait_until

_SETTINGS: Final = NetworkSettings()
_SSH: Final = 22
# Of the host and of what lies behind it, told apart by where the packet ends.
_FORWARD_RULES: Final = ("host frames", "host packets", "host ARP", "out", "in")
_UDP_PORT: Final = 8081
_DOOR: Final = f"sandbox: tcp {_SETTINGS.gateway_name} {_SETTINGS.gateway_port}"
_BRIDGE_NETFILTER: Final = "net.bridge.bridge-nf-call-iptables"

# Prints which of its arguments, `tcp HOST PORT` or `udp HOST PORT`, answer.
_LOOK: Final = """
import concurrent.futures, socket, sys
def answers(what):
    kind, host, port = what.split()
    type_ = socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM
    try:
        family, type_, _, _, address = socket.getaddrinfo(host, int(port), type=type_)[0]
        with socket.socket(family, type_) as s:
            s.settimeout(5)
            s.connect(address)
            if kind == "udp":
                s.send(b"?")
                s.recv(100)
    except OSError:
        return False
    return True
with concurrent.futures.ThreadPoolExecutor(32) as pool:
    for what, open_ in zip(sys.argv[1:], pool.map(answers, sys.argv[1:])):
        if open_:
            print(what)
"""

# Answers on PORT of every address it has.
SERVE: Final = f"""
import socket
with socket.create_server(("::", {PORT}), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    print("listening", flush=True)
    while True:
        server.accept()[0].close()
"""

_OPEN: Final = f"""
set -eu
ip address add {_SETTINGS.bridge_address}/{_SETTINGS.network.prefixlen} dev {_SETTINGS.bridge}
sysctl --quiet --write net.ipv6.conf.{_SETTINGS.bridge}.disable_ipv6=0
iptables --insert FORWARD --jump ACCEPT
iptables --table nat --insert POSTROUTING --source {_SETTINGS.network} ! --out-interface {_SETTINGS.bridge} --jump MASQUERADE
for pid; do
    nsenter --net --target "$pid" sysctl --quiet --write net.ipv6.conf.eth0.disable_ipv6=0
    nsenter --net --target "$pid" ip route replace default via {_SETTINGS.bridge_address}
done
"""
_CLOSE: Final = f"""
docker rm --force elsewhere
ip address del {_SETTINGS.bridge_address}/{_SETTINGS.network.prefixlen} dev {_SETTINGS.bridge}
iptables --delete FORWARD --jump ACCEPT
iptables --table nat --delete POSTROUTING --source {_SETTINGS.network} ! --out-interface {_SETTINGS.bridge} --jump MASQUERADE
for pid; do
    nsenter --net --target "$pid" ip route del default
    nsenter --net --target "$pid" sysctl --quiet --write net.ipv6.conf.eth0.disable_ipv6=1
done
:
"""


class Ways:
    """The ways from a sandbox and from the forwarder, by where they lead."""

    def __init__(self, site: Site, looker: str, forwarder_pid: str) -> None:
        self._site = site
        self._looker = looker
        self._forwarder_pid = forwarder_pid
        self.host: set[str] = set()
        self.beyond: set[str] = set()
        self.neighbours: set[str] = set()

    def open(self) -> set[str]:
        """Try all at once; return those that are open."""
        targets = sorted(self.host | self.beyond | self.neighbours)
        with ThreadPoolExecutor(2) as pool:
            door = _DOOR.removeprefix("sandbox: ")
            seen = pool.submit(self._site.in_sandbox, self._looker, "python3", "-c", _LOOK, door, *targets)
            inside = ("nsenter", "--net", "--target", self._forwarder_pid)
            too = pool.submit(self._site.machine.run, *inside, "python3", "-c", _LOOK, *targets)
            return {f"sandbox: {way}" for way in seen.result().splitlines()} | {
                f"forwarder: {way}" for way in too.result().splitlines()
            }

    def assert_only_the_door_is_open(self) -> None:
        """All rules in place: a sandbox has its one way, the forwarder none."""
        assert self.open() == {_DOOR}

    def assert_each_is_open_without_its_rules(self) -> None:
        """Take rules away, group by group: what they close opens, and nothing else."""
        for rules, opened in (
            (HOST_RULES, self.host),
            (_FORWARD_RULES, self.beyond),
            (NEIGHBOUR_RULES, self.neighbours),
        ):
            expected = {_DOOR} | {f"{who}: {way}" for who in ("sandbox", "forwarder") for way in opened}
            with rules_without(lambda command: self._site.machine.run(*command), _SETTINGS, rules):
                # A way that is open may be slow at first; one that is to stay closed must never be found open.
                found = self.open()
                for _ in range(10):
                    if not found < expected:
                        break
                    found = self.open()
                assert found == expected, f"without {', '.join(rules)}: {sorted(found ^ expected)}"

    @contextlib.contextmanager
    def without_bridge_netfilter(self) -> Iterator[None]:
        """Let the kernel hand no bridged packet to iptables, as a host that does not load br_netfilter."""
        before = self._site.machine.run("sysctl", "--values", _BRIDGE_NETFILTER)
        self._site.machine.run("sysctl", "--quiet", "--write", f"{_BRIDGE_NETFILTER}=0")
        try:
            yield
        finally:
            self._site.machine.run("sysctl", "--quiet", "--write", f"{_BRIDGE_NETFILTER}={before}")


@contextlib.contextmanager
def ways_of_packets(site: Site, looker: str, sibling: str) -> Iterator[Ways]:
    """Open all that is not ours to close around two sessions; `sibling` runs SERVE."""
    target = site.machine
    looking, serving = (_pid(target, f"label={LABEL_SESSION}={session}") for session in (looker, sibling))
    forwarder = _pid(target, f"name=^{_SETTINGS.gateway_name}$")
    made = Ways(site, looker, forwarder)
    # What is put back would otherwise be put back by the host itself in the middle of the test.
    target.run("systemctl", "stop", "opificia-firewall.timer", "opificia-firewall.service")
    try:
        target.run("docker", "run", "--detach", "--name=elsewhere", IMAGE, "python3", "-c", SERVE)
        elsewhere = json.loads(target.run("docker", "inspect", "elsewhere"))[0]["NetworkSettings"]["IPAddress"]
        target.run("sh", "-c", _OPEN, "sh", looking, serving, forwarder)
        found = json.loads(target.run("ip", "-json", "-4", "address"))
        own = {each["local"] for link in found if link["ifname"] != "lo" for each in link["addr_info"]}
        assert {str(_SETTINGS.bridge_address), Machine.address} < own
        # sshd listens on every address of the host.
        made.host = {f"tcp {address} {_SSH}" for address in own}
        made.host.add(f"tcp {_link_local(target, _SETTINGS.bridge)}%eth0 {_SSH}")
        made.beyond = {
            f"tcp {elsewhere} {PORT}",
            f"tcp {Machine.outside} {PORT}",
            f"udp {Machine.outside} {_UDP_PORT}",
        }
        address = target.run("nsenter", "--net", "--target", serving, "hostname", "--all-ip-addresses").split()[0]
        made.neighbours = {
            f"tcp {address} {PORT}",
            f"tcp {_link_local(target, 'eth0', serving)}%eth0 {PORT}",
        }
        with listening(target.engine, "udp", _UDP_PORT):
            yield made
    finally:
        target.run("sh", "-c", _CLOSE, "sh", looking, serving, forwarder)
        target.run("systemctl", "start", "opificia-firewall.timer")


def _pid(target: Machine, condition: str) -> str:
    container = target.run("docker", "ps", "--quiet", "--filter", condition)
    return target.run("docker", "inspect", "--format={{.State.Pid}}", container)


def _link_local(target: Machine, interface: str, pid: str = "1") -> str:
    """Return an interface's IPv6 address, which the kernel makes and looks for duplicates of first."""
    show = ("nsenter", "--net", "--target", pid, "ip", "-json", "-6", "address", "show", "dev", interface)

    def addresses() -> list[str]:
        found = json.loads(target.run(*show, "scope", "link", "-tentative"))
        return [each["local"] for link in found for each in link.get("addr_info", ())]

    wait_until(lambda: bool(addresses()), f"IPv6 on {interface}")
    return addresses()[0]
