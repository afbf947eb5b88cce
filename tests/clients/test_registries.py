"""What level `registries` is for: package managers, and anybody who asks a registry, with nothing but the environment."""

import pytest

from tests.clients.commands import CURL, FETCH, QUICKLY, REQUESTS, URLLIB
from tests.clients.conftest import Launch
from tests.support.gateway_process import GatewayProcess

# requests is one of them.
pytestmark = pytest.mark.usefixtures("sdks")


def test_pip_downloads_a_package(sandbox: Launch) -> None:
    done = sandbox("agent").run("pip", "download", "--no-cache-dir", "--no-deps", "--dest", "/work/wheels", "six")
    assert done.code == 0, done.output
    assert "Successfully downloaded six" in done.stdout


def test_npm_views_a_package(sandbox: Launch) -> None:
    done = sandbox("agent").run("npm", "view", "is-number", "name")
    assert done.code == 0, done.output
    assert done.stdout.strip() == "is-number"


def test_npm_installs_a_package_that_then_runs(sandbox: Launch) -> None:
    agent = sandbox("agent")
    done = agent.run("npm", "install", "--prefix", "/work/project", "is-number")
    assert done.code == 0, done.output
    script = 'console.log(require("/work/project/node_modules/is-number")("5"))'
    assert agent.run("node", "-e", script).stdout == "true\n"


def test_apt_updates_and_downloads_a_package_whose_signature_holds(sandbox: Launch, gateway: GatewayProcess) -> None:
    agent = sandbox("agent")
    updated = agent.run("/in/apt.sh", "update")
    assert updated.code == 0, updated.output
    assert "Err:" not in updated.stdout
    done = agent.run("/in/apt.sh", "download", "hello")
    assert done.code == 0, done.output
    # Without root nothing can be installed, but unpacked it can be.
    unpacked = agent.run("sh", "-c", "dpkg-deb --extract /work/apt/hello_*.deb /work/root && /work/root/usr/bin/hello")
    assert unpacked.stdout == "Hello, world!\n", unpacked.output
    # apt speaks plain HTTP, each request judged.
    lines = [line for line in gateway.audit("agent") if line["port"] == 80 and line["event"] == "allow"]
    assert len(lines) > 5
    assert {(line["kind"], line["reason"]) for line in lines} == {("http", "registries:debian")}


@pytest.mark.parametrize("program", [CURL, FETCH, REQUESTS, URLLIB], ids=["curl", "fetch", "requests", "urllib"])
def test_a_registry_answers_who_asks_for_a_document(sandbox: Launch, program: tuple[str, ...]) -> None:
    url = "https://registry.npmjs.org/is-number/7.0.0"
    done = sandbox("agent").run(*program, url)
    assert done.code == 0, done.output
    assert '"is-number"' in done.stdout
    closed = sandbox("model").run(*program, url, environment=QUICKLY)
    assert closed.code != 0
    assert "403" in closed.output
