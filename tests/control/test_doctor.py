"""The doctor's own eyes: its probe sees what is open, and what it does not say is not well."""

import asyncio
import dataclasses
import hashlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control.api.types import Health, RunCompleted, RunLine, RunOutput, RunRequest
from control.cli import doctor
from control.cli.doctor import _settled as settled
from control.client import ControlClient
from control.doctor import probe, trial
from control.doctor.datagrams import DatagramPort
from control.doctor.host import (
    addresses,
    daemon_findings,
    datagram_ports,
    image_findings,
    listening_ports,
    model_key,
    registry,
)
from control.doctor.trial import CHECKS, Subject, _findings, try_sandbox
from control.runner.messages import Stream
from tests.control.conftest import Host
from tests.support.patience import until


def test_the_probe_sees_an_open_port_among_closed_ones() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port, closed = server.getsockname()[1], other.getsockname()[1]
        other.close()
        assert probe.unreached([("127.0.0.1", closed)]) == (True, "1 tried")
        found = probe.unreached([("127.0.0.1", closed), ("127.0.0.1", port)] * 700)
        assert found[0] is False
        assert f"127.0.0.1:{port}" in found[1]


def test_the_probe_hears_a_udp_port_that_answers_and_one_that_nobody_has() -> None:
    with DatagramPort() as port, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        assert port.port in datagram_ports()
        told = {"addresses": ["127.0.0.1"], "udp_ports": [silent.getsockname()[1]]}
        assert probe.host_datagrams(told) == (True, "1 sent, none answered")
        assert not port.heard
        told["udp_ports"].append(port.port)
        assert probe.host_datagrams(told) == (False, f"answered: 127.0.0.1:{port.port}")
        assert port.heard == 1
    # Where nobody listens, the host's kernel says so: the host was reached.
    assert probe.host_datagrams(told)[0] is False


async def test_a_datagram_that_came_to_the_host_is_a_hole_whatever_the_probe_says(
    host: Host, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: host.control.link.connected, "the gateway")
    monkeypatch.setattr(trial, "_source", lambda: 'print(\'{"check":"host_datagrams","ok":true,"detail":"none"}\')')
    subject = Subject("sandbox", (), (), 1, "registry.example")
    for heard in (False, True):
        found = await try_sandbox(client, dataclasses.replace(subject, heard_datagram=lambda heard=heard: heard))
        assert [each.ok for each in found if each.check == "no UDP port of the host is reached"] == [not heard], found
    await until(lambda: not host.manager.records(), "the clean-up")


async def test_a_probe_that_says_more_than_a_probe_can_say_fills_no_memory() -> None:
    piece, pieces = "x" * 64 * 1024, 64

    class Flooded(ControlClient):
        async def run(self, session: str, request: RunRequest) -> AsyncIterator[RunLine]:  # type: ignore[override]
            for _ in range(pieces):
                yield RunOutput(Stream.STDOUT, piece)
            yield RunCompleted(0)

    said, ended = await trial._output(Flooded("unix:/nonexistent"), "any", "python3")
    assert len(said) <= trial._MAX_SAID + len(piece) < pieces * len(piece)
    assert ended == "exit code 0"


def test_the_probe_finds_a_key_by_its_digest_alone() -> None:
    key = b"sk-ant-" + b"k" * 40
    digest = hashlib.sha256(key).hexdigest()
    assert probe._holds(b"x sk-a sk-ant-no " + key + b" y", b"sk-a", len(key), digest)
    assert not probe._holds(b"x sk-ant-" + b"k" * 39, b"sk-a", len(key), digest)
    assert probe.KEY_SHAPE.findall(b"key=" + key) == [key]


def test_every_check_of_the_probe_has_its_words_and_its_remedy() -> None:
    assert {check.__name__ for check in probe.CHECKS} == CHECKS.keys()
    assert all(title and remedy for title, remedy in CHECKS.values())


def test_what_the_probe_does_not_say_is_not_well() -> None:
    output = '{"check":"dns","ok":true,"detail":"fine"}\nnoise\n{"check":"surprise","ok":true,"detail":""}\n'
    found = {each.check: each for each in _findings(output, "exit code 137")}
    assert len(found) == len(CHECKS)
    assert found["no DNS that leaves"].ok
    silent = [each for each in found.values() if not each.ok]
    assert len(silent) == len(CHECKS) - 1
    assert all("exit code 137" in each.detail and each.remedy for each in silent)


async def test_a_gateway_that_is_just_coming_back_is_waited_for(host: Host, client: ControlClient) -> None:
    await host.gateway.stop()
    await until(lambda: not host.control.link.connected, "the loss of the gateway")
    assert any("gateway" in each for each in (await client.health()).problems)
    settling = asyncio.create_task(settled(client))
    await host.gateway.start()
    assert (await settling).problems == ()


async def test_a_gateway_that_stays_away_is_told(
    host: Host, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_SETTLE_S", 0.0)
    await host.gateway.stop()
    await until(lambda: not host.control.link.connected, "the loss of the gateway")
    assert any("gateway" in each for each in (await settled(client)).problems)


async def test_a_probe_sandbox_that_cannot_start_is_one_finding_and_leaves_nothing(
    host: Host, client: ControlClient
) -> None:
    await until(lambda: host.control.link.connected, "the gateway")
    found = await try_sandbox(
        client, Subject(image="missing", addresses=(), ports=(), out_bytes=1, registry="registry.example")
    )
    assert [(each.check, each.ok) for each in found] == [("a probe sandbox runs", False)]
    assert "image_missing" in found[0].detail
    await until(lambda: not host.manager.records(), "the clean-up")


def test_another_version_of_the_daemon_is_said() -> None:
    health = Health(status="ok", version="0.0.0", host_id="h")
    assert [each.check for each in daemon_findings(health) if not each.ok] == ["versions"]


def test_an_old_image_is_not_well() -> None:
    day = 86_400
    found = image_findings([("new", 90 * day), ("old", 10 * day)], 100 * day)
    assert [(each.check, each.ok) for each in found] == [("image new", True), ("image old", False)]
    assert found[1].remedy


def test_the_hosts_addresses_and_ports_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[1] in listening_ports()
    assert not any(address.startswith(("127.", "169.254.", "fe80")) or address == "::1" for address in addresses())


def test_a_registry_is_taken_from_the_operators_list_or_the_built_in_one(tmp_path: Path) -> None:
    built_in = registry(tmp_path / "missing")
    assert "." in built_in
    own = '[[registry]]\nname = "own"\nsource = "us"\nhosts = ["*.mirror.example", "mirror.example"]\nports = [443]\n'
    (tmp_path / "own.toml").write_text(own)
    (tmp_path / "gateway.toml").write_text(f'[egress]\nregistries_file = "{tmp_path}/own.toml"\n')
    assert registry(tmp_path / "gateway.toml") == "mirror.example"
    (tmp_path / "gateway.toml").write_text("[egress]\n")
    assert registry(tmp_path / "gateway.toml") == built_in


@pytest.mark.parametrize("text", ["", "[model]", "[model]\napi_key_file = 7", "no toml", "model = 1"])
def test_a_key_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "gateway.toml").write_text(text)
    assert model_key(tmp_path / "gateway.toml") == ""
    assert model_key(tmp_path / "missing") == ""
    (tmp_path / "key").write_text("secret\n")
    (tmp_path / "gateway.toml").write_text(f'[model]\napi_key_file = "{tmp_path}/key"')
    assert model_key(tmp_path / "gateway.toml") == "secret"
