"""A request in the same words as one that passed is judged again by everything that may have changed since."""

import asyncio
import signal
from collections.abc import Callable

from gateway.core.authority import Authority
from gateway.core.decide import HostFacts
from gateway.net.decisions import MAX_DECISIONS, Decision, Decisions, key_of_connect
from gateway.registry import Registry
from tests.support.dns_server import DnsServer, Records
from tests.support.gateway_process import TOKEN, GatewayProcess, gateway_process
from tests.support.patience import PATIENCE_S
from tests.support.sockets import Reply, echo_server, proxy_v2

GOOD = ("s1", TOKEN)


async def ask(gateway: GatewayProcess, target: str, *, proxy: bytes = b"") -> Reply:
    async with await gateway.client(proxy=proxy) as client:
        return await client.tunnel(target, GOOD)


async def reload_until(gateway: GatewayProcess, target: str, condition: Callable[[Reply], bool]) -> Reply:
    """Write the files, have them read, and ask in the same words until the change is in force."""
    gateway.write_files()
    gateway.signal(signal.SIGHUP)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                reply = await ask(gateway, target)
            except (ConnectionError, asyncio.IncompleteReadError):
                # The change came while it was being judged: revoked connections are closed without a word.
                continue
            if condition(reply):
                return reply


async def test_the_same_words_open_the_same_tunnel_and_each_is_logged() -> None:
    async with DnsServer() as names, echo_server() as server:
        names.script("echo.example.com", Records(("127.0.0.1",)))
        with gateway_process({"egress": {"nameservers": [names.address]}}) as gateway:
            for _ in range(3):
                async with await gateway.client() as client:
                    reply = await client.tunnel(f"echo.example.com:{server.port}", GOOD, early=b"early")
                    assert reply.status == 200
                    assert await client.read_exactly(5) == b"early"
                    client.end()
                    assert await client.read_to_end() == b""
            async with asyncio.timeout(PATIENCE_S):
                while len(gateway.audit("s1")) < 6:
                    await asyncio.sleep(0.01)
            lines = gateway.audit("s1")
            assert sorted(line["event"] for line in lines) == ["allow"] * 3 + ["close"] * 3
            assert {(line["host"], line["address"]) for line in lines} == {("echo.example.com", "127.0.0.1")}
            assert [line["bytes_up"] for line in lines if line["event"] == "close"] == [5] * 3


async def test_a_rule_that_came_in_between_refuses_them() -> None:
    async with echo_server() as server:
        target = f"127.0.0.1:{server.port}"
        with gateway_process() as gateway:
            assert (await ask(gateway, target)).status == 200
            gateway.sessions[0]["deny"] = ["127.0.0.1"]
            reply = await reload_until(gateway, target, lambda reply: reply.status != 200)
            assert (reply.status, reply.reason) == (403, "host_denied")


async def test_a_token_that_was_replaced_no_longer_opens_anything() -> None:
    async with echo_server() as server:
        target = f"127.0.0.1:{server.port}"
        with gateway_process() as gateway:
            assert (await ask(gateway, target)).status == 200
            gateway.sessions[0]["token"] = "another-token"
            reply = await reload_until(gateway, target, lambda reply: reply.status != 200)
            assert (reply.status, reply.reason) == (407, "credentials_wrong")


async def test_a_session_that_ended_opens_nothing_and_nor_does_its_successor_by_the_old_token() -> None:
    async with echo_server() as server:
        target = f"127.0.0.1:{server.port}"
        with gateway_process(sessions=[{"id": "s1"}, {"id": "s2"}]) as gateway:
            assert (await ask(gateway, target)).status == 200
            first = gateway.sessions.pop(0)
            assert (await reload_until(gateway, target, lambda reply: reply.status != 200)).status == 407
            gateway.sessions.append({**first, "token": "a-new-session-of-that-name"})
            await reload_until(gateway, target, lambda reply: reply.status != 200)


async def test_another_sandbox_does_not_get_through_by_the_same_words() -> None:
    session = {"id": "s1", "address": "10.231.0.16"}
    async with echo_server() as server:
        target = f"127.0.0.1:{server.port}"
        with gateway_process({"listen": {"proxy_protocol": True}}, [session]) as gateway:
            for _ in range(2):
                assert (await ask(gateway, target, proxy=proxy_v2("10.231.0.16"))).status == 200
                assert (await ask(gateway, target, proxy=proxy_v2("10.231.0.17"))).status == 407
                assert (await ask(gateway, target, proxy=proxy_v2(None))).status == 407


async def test_a_name_that_moved_inside_is_refused_when_its_answer_has_expired() -> None:
    async with DnsServer() as names, echo_server() as server:
        names.script("moving.example.com", Records(("127.0.0.1",), ttl=1), Records(("10.0.0.1",)), kind="A")
        names.script("moving.example.com", Records(ttl=1), kind="AAAA")
        target = f"moving.example.com:{server.port}"
        with gateway_process({"egress": {"nameservers": [names.address]}}) as gateway:
            assert (await ask(gateway, target)).status == 200
            async with asyncio.timeout(PATIENCE_S):
                while (reply := await ask(gateway, target)).status == 200:
                    pass
            assert (reply.status, reply.reason) == (403, "address_not_public")


async def test_a_budget_that_is_used_up_refuses_them() -> None:
    session = {"id": "s1", "egress_budget": {"bytes": 10, "connections": 4}}
    async with echo_server() as server:
        target = f"127.0.0.1:{server.port}"
        with gateway_process(sessions=[session]) as gateway:
            async with await gateway.client() as client:
                assert (await client.tunnel(target, GOOD)).status == 200
                await client.send(b"0123456789")
                await client.read_to_end()
            assert (await ask(gateway, target)).reason == "budget_exhausted"


def test_only_a_whole_connect_head_has_a_key() -> None:
    head = b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n"
    assert key_of_connect(head + b"early", 16384) == key_of_connect(head, 16384)
    assert [key_of_connect(head[:size], 16384) for size in range(len(head))] == [None] * len(head)
    assert key_of_connect(head, len(head) - 1) is None
    assert key_of_connect(head.replace(b"CONNECT", b"GET", 1), 16384) is None
    found = key_of_connect(head, 16384)
    assert found is not None
    assert found[1] == len(head)
    assert b"a.example" not in found[0]


def test_the_memory_is_bounded() -> None:
    from gateway.contract.policy import Grant, NetworkLevel
    from gateway.core.rules import RegistryList

    registry = Registry(RegistryList(), require_address=False, ready=True)
    registry.put(Grant(session="s1", token_sha256="0" * 64, network=NetworkLevel.OPEN))
    session = registry.get("s1")
    assert session is not None
    decisions = Decisions(registry)
    decision = Decision(Authority("a.example", 443), session, session.grant, "open", (), HostFacts())
    for number in range(3 * MAX_DECISIONS):
        decisions.remember(str(number).encode(), decision)
        assert len(decisions) <= MAX_DECISIONS
    assert decisions.find(str(3 * MAX_DECISIONS - 1).encode()) is decision
    registry.put(Grant(session="s1", token_sha256="0" * 64, network=NetworkLevel.OPEN))
    assert decisions.find(str(3 * MAX_DECISIONS - 1).encode()) is None
