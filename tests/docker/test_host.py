"""Preparing a host: made once, verified, mended, refused with the remedy; nothing of others is touched."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import docker
import pytest

from control.docker.service import DockerService
from control.docker.types import EngineError
from control.plan.host import HostPlan
from control.plan.network import NetworkSettings
from tests.docker.sandboxes import Sandboxes
from tests.support.engine import PrivateEngine
from tests.support.patience import PATIENCE_S


@pytest.fixture
async def client(engine: PrivateEngine) -> AsyncIterator[docker.DockerClient]:
    """The engine, behind control's back."""
    client = engine.client()
    yield client
    client.close()


async def _mended(service: DockerService, plan: HostPlan, *signs: str) -> list[str]:
    """Check that `verify` tells each of `signs`, that `prepare` mends it all, and return what it changed."""
    problems = await service.verify_host(plan)
    for sign in signs:
        assert any(sign in problem for problem in problems), problems
    assert all(problem.endswith("Run `opificia host prepare`.") for problem in problems)
    changes = await service.prepare_host(plan)
    assert await service.verify_host(plan) == []
    assert await service.prepare_host(plan) == []
    return changes


def test_a_fresh_host_is_prepared_rules_first(prepared: list[str]) -> None:
    assert prepared == [
        "started the container opificia-sandbox-firewall",
        "loaded the firewall rules for opificia0",
        "made the internal network opificia-sandbox (10.231.0.0/16 on opificia0)",
        "started the container opificia-sandbox-volumes",
        "started the container opificia-gateway",
    ]


async def test_a_prepared_host_has_no_problem_and_needs_no_change(
    service: DockerService, plan: HostPlan, client: docker.DockerClient
) -> None:
    assert await service.verify_host(plan) == []
    before = time.time()
    assert await service.prepare_host(plan) == []
    # A timer does this all day: nothing is made only to look.
    made = client.events(since=before, until=time.time() + 1, filters={"event": "create"}, decode=True)
    assert list(made) == []


async def test_the_bridge_has_no_address(engine: PrivateEngine, service: DockerService) -> None:
    process = await asyncio.create_subprocess_exec(
        *engine.in_network(["ip", "-json", "address", "show", "dev", "opificia0"]),
        stdout=asyncio.subprocess.PIPE,
    )
    listing, _ = await process.communicate()
    (bridge,) = json.loads(listing)
    assert [entry for entry in bridge["addr_info"] if entry["family"] == "inet"] == []


async def test_a_flushed_firewall_is_told_and_mended(
    service: DockerService, plan: HostPlan, engine: PrivateEngine
) -> None:
    await service._host._firewall.execute(["nft", "flush", "ruleset"])
    assert await _mended(service, plan, "chain input of table inet opificia0 is missing", "chain forward") == [
        "loaded the firewall rules for opificia0"
    ]


async def test_a_single_missing_rule_is_told_and_mended(service: DockerService, plan: HostPlan) -> None:
    await service._host._firewall.execute(["nft", "flush", "chain", "inet", "opificia0", "input"])
    assert await _mended(service, plan, "chain input of table inet opificia0 holds other rules") == [
        "loaded the firewall rules for opificia0"
    ]


async def test_rules_are_loaded_by_the_engine_itself_as_after_a_reboot(
    service: DockerService, plan: HostPlan, client: docker.DockerClient
) -> None:
    await service._host._firewall.execute(["nft", "flush", "ruleset"])
    await asyncio.to_thread(client.api.restart, "opificia-sandbox-firewall", 5)
    async with asyncio.timeout(PATIENCE_S):
        while await service.verify_host(plan):
            await asyncio.sleep(0.05)


async def test_rules_survive_an_engines_restart(service: DockerService, plan: HostPlan, engine: PrivateEngine) -> None:
    await asyncio.to_thread(engine.restart)
    async with asyncio.timeout(PATIENCE_S):
        while await service.verify_host(plan):
            await asyncio.sleep(0.1)
    assert await service.prepare_host(plan) == []


async def test_a_stopped_forwarder_is_told_and_mended(
    service: DockerService, plan: HostPlan, client: docker.DockerClient
) -> None:
    await asyncio.to_thread(client.api.stop, "opificia-gateway", 5)
    assert await _mended(service, plan, "opificia-gateway does not run") == ["replaced the container opificia-gateway"]


async def test_forwarder_stops_within_its_grace(service: DockerService, client: docker.DockerClient) -> None:
    await asyncio.to_thread(client.api.stop, "opificia-gateway", 50)
    state = await asyncio.to_thread(client.api.inspect_container, "opificia-gateway")
    await asyncio.to_thread(client.api.start, "opificia-gateway")
    # 128 + SIGKILL: it did not end by itself.
    assert state["State"]["ExitCode"] != 137


async def test_a_forwarder_on_another_network_is_told_and_mended(
    service: DockerService, plan: HostPlan, client: docker.DockerClient
) -> None:
    uplink = client.networks.create("uplink")
    uplink.connect("opificia-gateway")
    try:
        await _mended(service, plan, "opificia-gateway is not a member of the network opificia-sandbox alone")
    finally:
        uplink.remove()


async def test_changed_settings_are_told_and_mended(service: DockerService, plan: HostPlan) -> None:
    changed = replace(plan, forwarder=type(plan.forwarder)(user=plan.forwarder.user, connections=100))
    assert await _mended(service, changed, "opificia-gateway was made from other settings") == [
        "replaced the container opificia-gateway"
    ]
    await service.prepare_host(plan)


async def test_a_network_with_other_options_is_made_anew(
    service: DockerService, plan: HostPlan, client: docker.DockerClient
) -> None:
    client.api.remove_container("opificia-gateway", force=True)
    labels = client.api.inspect_network("opificia-sandbox")["Labels"]
    client.api.remove_network("opificia-sandbox")
    client.api.create_network(
        "opificia-sandbox",
        driver="bridge",
        ipam={"Config": [{"Subnet": "10.231.0.0/16"}]},
        labels=labels,
        options={"com.docker.network.bridge.name": "opificia0"},
    )
    changes = await _mended(service, plan, "is not internal", "inhibit_ipv4")
    assert changes == [
        "replaced the internal network opificia-sandbox (10.231.0.0/16 on opificia0)",
        "started the container opificia-gateway",
    ]


async def test_a_network_that_sandboxes_are_on_is_not_made_anew(
    service: DockerService, plan: HostPlan, sandboxes: Sandboxes
) -> None:
    sandbox = await sandboxes.launch("echo up; sleep 60")
    await sandbox.said("up")
    changed = replace(plan, network=NetworkSettings(subnet="10.232.0.0/16"))
    with pytest.raises(EngineError, match="Stop them first"):
        await service.prepare_host(changed)
    # The rules came first and are those of the new subnet; they are put back with the rest.
    assert await service.prepare_host(plan) != []


async def test_another_installations_container_is_left_alone(
    service: DockerService, plan: HostPlan, client: docker.DockerClient
) -> None:
    client.api.remove_container("opificia-gateway", force=True)
    other = client.api.create_container(
        "opificia-helper:latest", name="opificia-gateway", labels={"opificia.host": "another"}
    )["Id"]
    try:
        assert any("belongs to another installation" in problem for problem in await service.verify_host(plan))
        with pytest.raises(EngineError, match="does not belong to this installation"):
            await service.prepare_host(plan)
        assert client.api.inspect_container(other)["State"]["Status"] == "created"
    finally:
        client.api.remove_container(other)
        await service.prepare_host(plan)


async def test_a_subnet_with_a_route_of_the_host_is_refused_before_anything_is_made(
    service: DockerService, plan: HostPlan, engine: PrivateEngine, client: docker.DockerClient
) -> None:
    async def host(*argv: str) -> None:
        process = await asyncio.create_subprocess_exec(*engine.in_network(argv))
        assert await process.wait() == 0

    other = replace(plan, network=NetworkSettings(name="other", bridge="other0", subnet="10.99.0.0/16"))
    await host("ip", "link", "add", "taken0", "type", "bridge")
    try:
        await host("ip", "link", "set", "taken0", "up")
        await host("ip", "route", "add", "10.99.7.0/24", "dev", "taken0")
        with pytest.raises(EngineError, match=r"overlaps the host's route to 10\.99\.7\.0/24.*choose another"):
            await service.prepare_host(other)
        assert client.networks.list(names=["other"]) == []
        listing = await service._host._firewall.execute(["nft", "list", "tables"])
        assert "other0" not in listing.stdout
        assert [container.name for container in client.containers.list(all=True, filters={"name": "other"})] == []
    finally:
        await host("ip", "link", "del", "taken0")


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"door": "/no/such/door"}, "Make the folder"),
        ({"images": {"forwarder": "no-such-image:latest"}}, "opificia images build"),
        ({"forwarder": {"user": "no-such-account"}}, "systemd-sysusers"),
    ],
)
async def test_what_is_missing_is_told_with_the_remedy(
    service: DockerService, plan: HostPlan, change: dict[str, Any], remedy: str
) -> None:
    fields = {
        name: value if isinstance(value, str) else type(getattr(plan, name))(**value) for name, value in change.items()
    }
    try:
        with pytest.raises(EngineError, match=remedy):
            await service.prepare_host(replace(plan, **fields))
    finally:
        await service.prepare_host(plan)


async def test_forwarder_holds_back_a_sandbox_with_too_many_connections(
    service: DockerService, plan: HostPlan, sandboxes: Sandboxes
) -> None:
    few = replace(plan, forwarder=type(plan.forwarder)(user=plan.forwarder.user, connections_per_source=4))
    await service.prepare_host(few)
    try:
        script = """
import socket
held = [socket.create_connection(("opificia-gateway", 8900)) for _ in range(12)]
answers = []
for connection in held:
    connection.settimeout(5)
    try:
        connection.sendall(b"x")
        answers.append(len(connection.recv(64)) > 0)
    except OSError: answers.append(False)
print(sum(answers))
"""
        ended = await sandboxes.run(f"python3 -c '{script}'", environment={"X": "1"})
        assert 4 <= int(ended.stdout) < 12, ended.stderr
    finally:
        await service.prepare_host(plan)


async def test_everything_is_taken_down_again(service: DockerService, plan: HostPlan, engine: PrivateEngine) -> None:
    removed = await service.remove_host(plan)
    assert removed == [
        "removed the container opificia-gateway",
        "removed the container opificia-sandbox-volumes",
        "removed the network opificia-sandbox",
        "removed the firewall rules",
        "removed the container opificia-sandbox-firewall",
    ]
    assert await service.remove_host(plan) == []
    assert len(await service.prepare_host(plan)) == 5
