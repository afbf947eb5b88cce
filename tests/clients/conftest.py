"""One host for the folder: engine, forwarder, the gateway as its own user, and a sandbox for each kind of session."""

import os
import shutil
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final

import pytest

from control.plan.container import ImageSettings
from control.plan.host import ForwarderSettings, HostPlan
from control.plan.network import NetworkSettings
from tests.clients.sandboxes import Host, Ran, Sandbox
from tests.clients.world import CORP, INSIDE, World
from tests.support import identities
from tests.support.engine import PrivateEngine
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.mirrors import registry_addresses, trusted_mirrors
from tests.support.provider import OUTPUT_TOKENS

Launch = Callable[[str], Sandbox]

# Where the SDKs for Python are installed.
PYTHON_PATH: Final = {"PYTHONPATH": "/in/python"}
# What a session may do, by its id; each has a sandbox of its own.
SESSIONS: Final[dict[str, dict[str, Any]]] = {
    "agent": {"network": "registries"},
    "opened": {"network": "registries", "allow": ["*.corp.example"]},
    "spent": {"network": "registries", "allow": ["*.corp.example"], "egress_budget": {"bytes": 100_000}},
    "model": {"network": "none"},
    "thrifty": {"network": "none", "model_budget": {"output_tokens": 2 * OUTPUT_TOKENS}},
    "hasty": {"network": "none", "model_budget": {"requests_per_minute": 1}},
}
# Imports what the tests use of the SDKs, so that its compiled form is there for all sandboxes; compiling all takes long.
_COMPILE: Final = "import anthropic, openai, requests; anthropic.Anthropic().messages; openai.OpenAI().responses"


def need_registries() -> None:
    """Skip on a machine that has neither the internet nor a mirror."""
    missing = [host for host in ("pypi.org", "registry.npmjs.org", "deb.debian.org") if not registry_addresses()[host]]
    if missing:
        pytest.skip(f"this machine does not resolve {', '.join(missing)}")


class Place:
    """The host's folders and files."""

    def __init__(self, root: Path) -> None:
        root.chmod(0o755)
        self.door = root / "door"
        self.door.mkdir()
        os.chown(self.door, identities.GATEWAY, identities.FORWARDER)
        # After chown, which takes the set-group-ID bit away.
        self.door.chmod(0o2750)
        self.inside = root / "in"
        shutil.copytree(Path(__file__).parent / "inside", self.inside)
        for host in (CORP, INSIDE):
            (self.inside / f"{host}.list").write_text(f"deb [trusted=yes] http://{host}/apt ./\n")
        self.ca_bundle = root / "ca.pem"
        self.key_file = root / "model-api-key"


@pytest.fixture(scope="package")
def engine() -> Iterator[PrivateEngine]:
    """A Docker engine in namespaces of its own; a new one for the folder, so that no folder meets another's host."""
    with PrivateEngine.acquire() as private:
        yield private


@pytest.fixture(scope="package")
def place() -> Iterator[Place]:
    root = Path(tempfile.mkdtemp(prefix="opificia-clients-"))
    yield Place(root)
    shutil.rmtree(root)


@pytest.fixture(scope="package")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture(scope="package")
def gateway(place: Place, world: World) -> Iterator[GatewayProcess]:
    """The real gateway, configured for this machine's mirrors and the stand-in provider."""
    place.key_file.touch(mode=0o600)
    place.key_file.write_text(world.provider.key)
    os.chown(place.key_file, identities.GATEWAY, identities.GATEWAY)
    model = {"upstream": f"http://127.0.0.1:{world.provider.port}", "api_key_file": str(place.key_file)}
    config = {
        "listen": {"sandbox": f"unix:{place.door}/sandbox.sock", "proxy_protocol": True},
        "egress": {"nameservers": [world.dns.address]},
        "egress.trusted": list(trusted_mirrors()),
        "model": model,
        "model.provider": [{"name": "openai", **model}],
    }
    first = NetworkSettings().network.network_address + 16
    sessions = [
        {"id": session, "address": str(first + number), **grant}
        for number, (session, grant) in enumerate(SESSIONS.items())
    ]
    with gateway_process(config, sessions) as process:
        yield process


@pytest.fixture(scope="package")
def sandbox(engine: PrivateEngine, place: Place, world: World, gateway: GatewayProcess) -> Iterator[Launch]:
    """Return the sandbox of a session, launched when it is first asked for."""
    system = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    place.ca_bundle.write_bytes(Path(system).read_bytes() + b"\n" + world.authority.pem())
    plan = HostPlan(
        network=NetworkSettings(),
        images=ImageSettings(),
        forwarder=ForwarderSettings(user=f"{identities.FORWARDER}:{identities.FORWARDER}"),
        door=str(place.door),
    )
    addresses = {session["id"]: IPv4Address(session["address"]) for session in gateway.sessions}
    host = Host(engine, plan, place.inside, place.ca_bundle)
    try:
        host.start()
        yield lambda session: host.sandbox(session, addresses[session])
    finally:
        host.stop()


@pytest.fixture(scope="package")
def sdks(sandbox: Launch, place: Place) -> None:
    """Install the model SDKs, and requests, through the gateway, and show them to all sandboxes."""
    need_registries()
    agent = sandbox("agent")
    commands = {
        "pip": ("pip", "install", "--no-compile", "--target=/work/sdks/python", "anthropic", "openai", "requests"),
        "npm": ("npm", "install", "--prefix", "/work/sdks", "@anthropic-ai/sdk"),
    }
    done: dict[str, Ran] = {}

    def install(name: str) -> None:
        done[name] = agent.run(*commands[name])

    installers = [threading.Thread(target=install, args=(name,)) for name in commands]
    for installer in installers:
        installer.start()
    for installer in installers:
        installer.join()
    compiled = agent.run("python3", "-c", _COMPILE, environment={"PYTHONPATH": "/work/sdks/python"})
    for ran in (*done.values(), compiled):
        assert ran.code == 0, ran.output
    agent.copy_out("/work/sdks", place.inside)
