"""The contract socket: grants in, acknowledgements and usage out, and what holds while control is away."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from gateway.contract.framing import FrameReader, encode
from gateway.contract.ids import token_sha256
from gateway.contract.messages import (
    Ack,
    EgressAnswer,
    EgressQuestion,
    FromGateway,
    PutGrant,
    RevokeGrant,
    Snapshot,
    UsageReport,
    Welcome,
)
from gateway.contract.policy import EgressBudget, Grant, NetworkLevel, Usage
from tests.support.dns_server import DnsServer, Records, Silence
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.identities import GATEWAY
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Client, drop_at_end, echo_server, proxy_v2


def grant(session: str = "s1", **changes: Any) -> Grant:
    return Grant(session=session, token_sha256=token_sha256(TOKEN), **{"network": NetworkLevel.OPEN, **changes})


class Control:
    """Control's end of the contract socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._frames = FrameReader[FromGateway](reader, FromGateway)
        self.serial = 0
        self.usage: dict[str, UsageReport] = {}

    @classmethod
    async def connect(cls, path: Path) -> Self:
        reader, writer = await asyncio.open_unix_connection(path)
        drop_at_end(writer)
        return cls(reader, writer)

    async def read(self) -> FromGateway | None:
        async with asyncio.timeout(PATIENCE_S):
            return await self._frames.read()

    async def welcome(self) -> Welcome:
        message = await self.read()
        assert isinstance(message, Welcome)
        return message

    async def acknowledged(self, message: Any) -> Ack:
        self.writer.write(encode(message))
        while True:
            answer = await self.read()
            if isinstance(answer, Ack):
                assert answer.serial == message.serial
                return answer
            assert isinstance(answer, UsageReport)
            self.usage[answer.session] = answer

    async def answer(self) -> EgressAnswer:
        while True:
            message = await self.read()
            if isinstance(message, EgressAnswer):
                return message
            assert isinstance(message, UsageReport)

    async def snapshot(self, *grants: Grant) -> Ack:
        self.serial += 1
        return await self.acknowledged(Snapshot(1, self.serial, grants))

    async def put(self, each: Grant) -> Ack:
        self.serial += 1
        return await self.acknowledged(PutGrant(self.serial, each))

    async def revoke(self, session: str) -> Ack:
        self.serial += 1
        return await self.acknowledged(RevokeGrant(self.serial, session))

    async def reported(self, session: str, condition: Any) -> UsageReport:
        while session not in self.usage or not condition(self.usage[session]):
            answer = await self.read()
            assert isinstance(answer, UsageReport)
            self.usage[answer.session] = answer
        return self.usage[session]

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@asynccontextmanager
async def contracted(
    tmp_path: Path, *, stored: int | None = None, **config: Any
) -> AsyncIterator[tuple[GatewayProcess, Path]]:
    tmp_path.chmod(0o755)
    folder = Path(f"/tmp/opificia-contract-{os.getpid()}-{tmp_path.name}"[:80])
    folder.mkdir()
    os.chown(folder, GATEWAY, GATEWAY)
    path = folder / "gateway.sock"
    merged = {"listen": {"contract": f"unix:{path}"}, "sessions": {"file": ""}, **config}
    merged["listen"] = {"contract": f"unix:{path}", **config.get("listen", {})}
    try:
        with gateway_process(merged, [], stored=stored) as gateway:
            yield gateway, path
    finally:
        path.unlink(missing_ok=True)
        folder.rmdir()


async def asks(gateway: GatewayProcess, target: str, *, proxy: bytes = b"") -> int:
    async with await gateway.client(proxy=proxy) as client:
        return (await client.tunnel(target, ("s1", TOKEN))).status


async def test_a_grant_opens_a_revocation_closes_and_usage_is_reported(tmp_path: Path) -> None:
    async with contracted(tmp_path) as (gateway, path), echo_server() as server:
        control = await Control.connect(path)
        welcome = await control.welcome()
        assert (await control.snapshot()).problems == ()
        target = f"127.0.0.1:{server.port}"
        assert await asks(gateway, target) == 407
        assert (await control.put(grant())).problems == ()
        client = await gateway.client()
        assert (await client.tunnel(target, ("s1", TOKEN))).status == 200
        await client.send(b"x" * 1000)
        assert await client.read_exactly(1000) == b"x" * 1000
        report = await control.reported("s1", lambda each: each.usage.egress_bytes_down == 1000)
        assert (report.epoch, report.usage.egress_bytes_up, report.usage.egress_allowed) == (welcome.epoch, 1000, 1)
        await control.revoke("s1")
        assert await client.read_to_end() == b""
        await client.close()
        assert control.usage["s1"].final
        assert await asks(gateway, target) == 407
        await control.close()


async def test_says_what_it_would_decide_and_a_slow_name_holds_up_no_grant(tmp_path: Path) -> None:
    async with DnsServer(otherwise=Silence()) as names:
        names.script("good.example.com", Records(("9.9.9.9",)))
        names.script("bad.example.com", Records(("9.9.9.9", "10.0.0.1")))
        egress = {"nameservers": [names.address], "allow_loopback": False}
        limits = {"dns_timeout_ms": 2_500}
        async with contracted(tmp_path, egress=egress, limits=limits) as (_, path):
            control = await Control.connect(path)
            await control.welcome()
            await control.snapshot()
            hosts = ("good.example.com", "bad.example.com", "silent.example.com", "evil.example", "10.0.0.1", "a b")
            question = EgressQuestion(99, NetworkLevel.REGISTRIES, ("*.example.com", "10.0.0.1"), (), hosts)
            control.writer.write(encode(question))
            # Acknowledged while the silent name is still waited for.
            assert (await control.put(grant())).problems == ()
            answer = await control.answer()
            assert answer.serial == 99
            assert [(each.asked, each.allowed, each.step, each.reason) for each in answer.opinions] == [
                ("good.example.com", True, "addresses", ""),
                ("bad.example.com", False, "addresses", "address_not_public"),
                ("silent.example.com", False, "resolve", "resolve_timeout"),
                ("evil.example", False, "rules", "host_not_listed"),
                ("10.0.0.1", False, "addresses", "address_not_public"),
                ("a b", False, "authority", "malformed_authority"),
            ]
            assert [each.address for each in answer.opinions[1].addresses if not each.allowed] == ["10.0.0.1"]
            bad = EgressQuestion(100, NetworkLevel.OPEN, ("a b",), ("*",), ("x",))
            control.writer.write(encode(bad))
            answer = await control.answer()
            assert [each.split(":")[0] for each in answer.problems] == ["allow", "deny"]
            await control.close()


async def test_a_gateway_without_a_snapshot_waits_for_it_and_then_says_503(tmp_path: Path) -> None:
    async with contracted(tmp_path, limits={"resync_wait_ms": 400}) as (gateway, _):
        async with await gateway.client() as client:
            reply = await client.tunnel("127.0.0.1:9", ("s1", TOKEN))
            assert (reply.status, reply.reason) == (503, "not_ready")
            assert "retry-after" in reply.headers


async def test_a_request_that_came_before_the_snapshot_goes_on_when_it_comes(tmp_path: Path) -> None:
    async with contracted(tmp_path, limits={"resync_wait_ms": 120_000}) as (gateway, path), echo_server() as server:
        client = await gateway.client()
        waiting = asyncio.create_task(client.tunnel(f"127.0.0.1:{server.port}", ("s1", TOKEN)))
        control = await Control.connect(path)
        await control.welcome()
        await control.snapshot(grant())
        assert (await waiting).status == 200
        await client.close()
        await control.close()


async def test_grants_and_tunnels_stay_while_control_is_away_and_a_snapshot_replaces_all(tmp_path: Path) -> None:
    async with contracted(tmp_path) as (gateway, path), echo_server() as server:
        control = await Control.connect(path)
        await control.welcome()
        await control.snapshot(grant(), grant("s2"))
        await control.close()
        client = await gateway.client()
        assert (await client.tunnel(f"127.0.0.1:{server.port}", ("s1", TOKEN))).status == 200
        again = await Control.connect(path)
        await again.welcome()
        await again.snapshot(grant())
        await client.send(b"x")
        assert await client.read_exactly(1) == b"x"
        await client.close()
        async with await gateway.client() as gone:
            assert (await gone.tunnel(f"127.0.0.1:{server.port}", ("s2", TOKEN))).status == 407
        await again.close()


async def test_a_bad_grant_is_refused_with_every_problem_and_leaves_nothing_open(tmp_path: Path) -> None:
    async with contracted(tmp_path) as (gateway, path):
        control = await Control.connect(path)
        await control.welcome()
        await control.snapshot(grant())
        bad = Grant(session="s1", token_sha256="zz", network=NetworkLevel.OPEN, allow=("*", "a b"), address="nowhere")
        problems = (await control.put(bad)).problems
        assert len(problems) == 4
        assert len((await control.snapshot(bad)).problems) == 4
        assert await asks(gateway, "127.0.0.1:9") == 407
        await control.close()


async def test_what_was_used_in_earlier_epochs_counts_against_the_budget(tmp_path: Path) -> None:
    async with contracted(tmp_path) as (gateway, path), echo_server() as server:
        control = await Control.connect(path)
        await control.welcome()
        budget = EgressBudget(bytes=1000)
        await control.snapshot(grant(egress_budget=budget, used=Usage(egress_bytes_up=600, egress_bytes_down=400)))
        assert await asks(gateway, f"127.0.0.1:{server.port}") == 403
        # Sent again, it still refills nothing.
        await control.put(grant(egress_budget=budget, used=Usage(egress_bytes_up=600, egress_bytes_down=398)))
        async with await gateway.client() as client:
            assert (await client.tunnel(f"127.0.0.1:{server.port}", ("s1", TOKEN))).status == 200
            await client.send(b"abc")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await client.read_exactly(1)
        report = await control.reported("s1", lambda each: each.usage.egress_bytes_up > 0)
        assert report.usage.egress_bytes_up == 2
        await control.close()


@pytest.mark.parametrize("rubbish", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", encode(RevokeGrant(1, "s1"))])
async def test_a_peer_that_breaks_the_contract_is_closed_and_the_grants_stay(tmp_path: Path, rubbish: bytes) -> None:
    async with contracted(tmp_path) as (gateway, path), echo_server() as server:
        control = await Control.connect(path)
        await control.welcome()
        await control.snapshot(grant())
        await control.close()
        broken = await Control.connect(path)
        await broken.welcome()
        broken.writer.write(rubbish)
        while (message := await broken.read()) is not None:
            assert isinstance(message, UsageReport)
        await broken.close()
        assert await asks(gateway, f"127.0.0.1:{server.port}") == 200


async def test_behind_the_forwarder_only_the_sessions_own_container_is_served(tmp_path: Path) -> None:
    config = {"listen": {"proxy_protocol": True}}
    async with contracted(tmp_path, **config) as (gateway, path), echo_server() as server:
        control = await Control.connect(path)
        await control.welcome()
        await control.snapshot(grant(address="10.231.0.16"))
        target = f"127.0.0.1:{server.port}"
        assert await asks(gateway, target, proxy=proxy_v2("10.231.0.16")) == 200
        assert await asks(gateway, target, proxy=proxy_v2("10.231.0.17")) == 407
        assert await asks(gateway, target, proxy=proxy_v2("::ffff:10.231.0.17")) == 407
        assert await asks(gateway, target, proxy=proxy_v2(None)) == 407
        # Without the header the caller did not come through the forwarder: closed without a word.
        async with await gateway.client() as client:
            await client.send(b"CONNECT 127.0.0.1:1 HTTP/1.1\r\n\r\n")
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await client.reply()
        # A grant without an address admits nobody here.
        await control.put(grant())
        assert await asks(gateway, target, proxy=proxy_v2("10.231.0.16")) == 407
        await control.close()


async def test_a_slow_proxy_header_is_read_and_bounded(tmp_path: Path) -> None:
    async with contracted(tmp_path, listen={"proxy_protocol": True}) as (gateway, path), echo_server() as server:
        control = await Control.connect(path)
        await control.welcome()
        await control.snapshot(grant(address="10.231.0.16"))
        async with await Client.connect(("127.0.0.1", gateway.port)) as client:
            await client.send_slowly(proxy_v2("10.231.0.16", tlvs=b"\x04\x00\x03abc"))
            assert (await client.tunnel(f"127.0.0.1:{server.port}", ("s1", TOKEN))).status == 200
        await control.close()
