"""Names: one query however many wait, bounded in time, number and share, failing closed on whatever a server answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import dns.rcode
import pytest

from gateway.core.verdict import DenyReason
from gateway.net.resolve import MAX_ADDRESSES, Resolved, ResolveError, Resolver
from tests.support.dns_server import Answer, DnsServer, Failure, Garbage, Records, Silence, Truncated
from tests.support.patience import PATIENCE_S, within

SERVFAIL = Failure(dns.rcode.SERVFAIL)
MANY = tuple(f"192.0.2.{number}" for number in range(1, 255)) + tuple(
    f"198.51.100.{number}" for number in range(1, 255)
)


@asynccontextmanager
async def resolving(**limits: Any) -> AsyncIterator[tuple[DnsServer, Resolver]]:
    """A scripted name server and a resolver that asks it."""
    async with DnsServer() as server:
        settings: dict[str, Any] = {
            "timeout_s": 5.0,
            "cache_names": 1000,
            "min_ttl_s": 1,
            "max_ttl_s": 300,
            "queries_per_session": 16,
            "nameservers": [("127.0.0.1", server.port)],
        }
        resolver = Resolver(asyncio.get_running_loop(), **{**settings, **limits})
        try:
            yield server, resolver
        finally:
            resolver.close()


async def asked(server: DnsServer, count: int) -> None:
    """Wait until `count` queries have come."""
    async with asyncio.timeout(PATIENCE_S):
        while len(server.queries) < count:
            await asyncio.sleep(0)


def addresses(answer: object) -> list[str]:
    assert isinstance(answer, Resolved)
    return [str(address) for address in answer.addresses]


def reason(answer: object) -> DenyReason:
    assert isinstance(answer, ResolveError)
    return answer.reason


async def test_finds_the_addresses_of_both_families() -> None:
    async with resolving() as (server, resolver):
        server.script("a.example", Records(("192.0.2.1", "192.0.2.2", "2001:db8::1")))
        assert sorted(addresses(await resolver.look_up("a.example", "s"))) == ["192.0.2.1", "192.0.2.2", "2001:db8::1"]


async def test_follows_a_chain_of_aliases() -> None:
    async with resolving() as (server, resolver):
        server.script("a.example", Records(("192.0.2.1",), cnames=("b.example", "c.example")))
        assert addresses(await resolver.look_up("a.example", "s")) == ["192.0.2.1"]


async def test_many_waiters_share_one_query() -> None:
    async with resolving() as (server, resolver):
        server.script("a.example", Records(("192.0.2.1",)))
        server.hold()
        waiting = [asyncio.ensure_future(resolver.look_up("a.example", f"s{number % 7}")) for number in range(500)]
        await asked(server, 2)
        server.release()
        assert {tuple(addresses(answer)) for answer in await asyncio.gather(*waiting)} == {("192.0.2.1",)}
        assert (server.count("a.example", "A"), server.count("a.example", "AAAA")) == (1, 1)


async def test_an_answer_is_kept_for_its_time_to_live_within_bounds() -> None:
    async with resolving(max_ttl_s=0.2, min_ttl_s=0.1) as (server, resolver):
        server.script("a.example", Records(("192.0.2.1",), ttl=100_000), Records(("192.0.2.2",)), kind="A")
        server.script("a.example", Records(), kind="AAAA")
        assert addresses(await resolver.look_up("a.example", "s")) == ["192.0.2.1"]
        assert resolver.cached("a.example") is not None
        assert addresses(await resolver.look_up("a.example", "s")) == ["192.0.2.1"]
        async with asyncio.timeout(PATIENCE_S):
            while resolver.cached("a.example") is not None:
                await asyncio.sleep(0.01)
        assert addresses(await resolver.look_up("a.example", "s")) == ["192.0.2.2"]


async def test_a_time_to_live_of_0_is_kept_for_the_least_time() -> None:
    async with resolving(min_ttl_s=30) as (server, resolver):
        server.script("a.example", Records(("192.0.2.1",), ttl=0))
        await resolver.look_up("a.example", "s")
        await resolver.look_up("a.example", "s")
        assert server.count("a.example", "A") == 1


async def test_a_reload_forgets_what_was_kept() -> None:
    async with resolving() as (server, resolver):
        server.script("a.example", Records(("192.0.2.1",)), Records(("192.0.2.2",)), kind="A")
        await resolver.look_up("a.example", "s")
        resolver.reload()
        assert addresses(await resolver.look_up("a.example", "s")) == ["192.0.2.2"]


async def test_the_cache_holds_a_bounded_number_of_names() -> None:
    async with resolving(cache_names=10) as (server, resolver):
        for number in range(30):
            server.script(f"n{number}.example", Records(("192.0.2.1",)))
            await resolver.look_up(f"n{number}.example", "s")
        assert sum(resolver.cached(f"n{number}.example") is not None for number in range(30)) == 10
        assert resolver.cached("n29.example") is not None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Failure(dns.rcode.NXDOMAIN), DenyReason.NAME_NOT_FOUND),
        (Records(), DenyReason.NAME_NOT_FOUND),
        (SERVFAIL, DenyReason.RESOLVE_FAILED),
        (Failure(dns.rcode.REFUSED), DenyReason.RESOLVE_FAILED),
        (Garbage(b""), DenyReason.RESOLVE_TIMEOUT),
        (Garbage(b"\xff" * 40), DenyReason.RESOLVE_TIMEOUT),
        (Silence(), DenyReason.RESOLVE_TIMEOUT),
        (Records(cnames=("a.example",)), None),
        (Records(cnames=("b.example", "bad.example")), None),
        (Records(("192.0.2.1",), cnames=tuple(f"n{number}.example" for number in range(40))), None),
        (Truncated(Records(MANY * 2)), DenyReason.RESOLVE_FAILED),
        (Records(MANY), DenyReason.RESOLVE_FAILED),
        (Records(MANY[: MAX_ADDRESSES + 1]), DenyReason.RESOLVE_FAILED),
    ],
)
async def test_whatever_a_server_answers_is_refused_in_bounded_time_and_remembered(
    answer: Answer, expected: DenyReason | None
) -> None:
    async with resolving(timeout_s=2.5) as (server, resolver):
        server.script("bad.example", answer)
        server.script("good.example", Records(("192.0.2.9",)))
        async with asyncio.timeout(PATIENCE_S):
            bad, good = await asyncio.gather(
                resolver.look_up("bad.example", "s"), resolver.look_up("good.example", "other")
            )
        assert addresses(good) == ["192.0.2.9"]
        assert isinstance(bad, ResolveError)
        assert expected in (None, bad.reason)
        assert "127.0.0.1" not in bad.message
        queries = len(server.queries)
        assert await resolver.look_up("bad.example", "s") == bad
        assert len(server.queries) == queries


async def test_a_truncated_answer_is_asked_for_again_over_tcp() -> None:
    async with resolving() as (server, resolver):
        wanted = MANY[:MAX_ADDRESSES]
        server.script("a.example", Truncated(Records(wanted)))
        assert sorted(addresses(await resolver.look_up("a.example", "s"))) == sorted(wanted)
        assert {query.transport for query in server.queries} == {"udp", "tcp"}


@pytest.mark.parametrize("failing", ["A", "AAAA"])
@pytest.mark.parametrize("failure", [SERVFAIL, Silence()])
async def test_one_family_that_fails_does_not_take_the_other_with_it(failing: str, failure: Answer) -> None:
    async with resolving() as (server, resolver):
        server.script("a.example", Records(("192.0.2.1", "2001:db8::1")))
        server.script("a.example", failure, kind=failing)
        async with within(2):
            found = addresses(await resolver.look_up("a.example", "s"))
        assert found == (["2001:db8::1"] if failing == "A" else ["192.0.2.1"])


async def test_one_session_asks_for_a_bounded_number_of_names_at_once() -> None:
    async with resolving(queries_per_session=2) as (server, resolver):
        names = [f"n{number}.example" for number in range(8)]
        for name in names:
            server.script(name, Records(("192.0.2.1",)))
        server.hold()
        waiting = [asyncio.ensure_future(resolver.look_up(name, "greedy")) for name in names]
        await asked(server, 4)
        server.script("other.example", Records(("192.0.2.2",)))
        other = asyncio.ensure_future(resolver.look_up("other.example", "modest"))
        await asked(server, 6)
        assert {query.name for query in server.queries} == {"n0.example", "n1.example", "other.example"}
        server.release()
        assert addresses(await other) == ["192.0.2.2"]
        assert {tuple(addresses(answer)) for answer in await asyncio.gather(*waiting)} == {("192.0.2.1",)}


async def test_a_name_in_another_sessions_queue_is_asked_for_at_once() -> None:
    async with resolving(queries_per_session=1) as (server, resolver):
        server.script("silent.example", Silence())
        server.script("wanted.example", Records(("192.0.2.1",)))
        greedy = [
            asyncio.ensure_future(resolver.look_up(name, "greedy")) for name in ("silent.example", "wanted.example")
        ]
        await asked(server, 2)
        async with within(2):
            assert addresses(await resolver.look_up("wanted.example", "modest")) == ["192.0.2.1"]
            assert addresses(await greedy[1]) == ["192.0.2.1"]
        greedy[0].cancel()


async def test_a_name_that_waited_all_its_time_in_the_queue_is_late_but_not_remembered() -> None:
    async with resolving(queries_per_session=1, timeout_s=0.5) as (server, resolver):
        for name in ("one.example", "two.example"):
            server.script(name, Silence())
        server.script("three.example", Records(("192.0.2.1",)))
        names = ("one.example", "two.example", "three.example")
        late = await asyncio.gather(*(resolver.look_up(name, "greedy") for name in names))
        assert [reason(answer) for answer in late] == [DenyReason.RESOLVE_TIMEOUT] * 3
        assert server.count("three.example") == 0
        assert addresses(await resolver.look_up("three.example", "modest")) == ["192.0.2.1"]


async def test_whoever_stops_waiting_is_not_called_and_the_others_are() -> None:
    async with resolving() as (server, resolver):
        server.script("a.example", Records(("192.0.2.1",)))
        server.hold()
        called: list[str] = []
        waiters = {name: lambda _answer, name=name: called.append(name) for name in ("one", "two", "three")}
        for waiter in waiters.values():
            resolver.resolve("a.example", "s", waiter)
        staying = asyncio.ensure_future(resolver.look_up("a.example", "s"))
        leaving = asyncio.ensure_future(resolver.look_up("a.example", "s"))
        await asked(server, 2)
        resolver.forget("a.example", waiters["two"])
        leaving.cancel()
        server.release()
        await staying
        assert called == ["one", "three"]


async def test_a_waiter_that_makes_another_leave_leaves_it_uncalled() -> None:
    async with resolving() as (server, resolver):
        server.script("a.example", Records(("192.0.2.1",)))
        called: list[str] = []

        def second(_answer: object) -> None:
            called.append("second")

        def first(_answer: object) -> None:
            called.append("first")
            resolver.forget("a.example", second)

        resolver.resolve("a.example", "s", first)
        resolver.resolve("a.example", "s", second)
        await resolver.look_up("a.example", "s")
        assert called == ["first"]


async def test_closing_ends_what_is_asked() -> None:
    async with resolving(queries_per_session=1) as (server, resolver):
        for name in ("a.example", "b.example"):
            server.script(name, Silence())
            resolver.resolve(name, "s", lambda _answer: None)
        await asked(server, 2)
        resolver.close()
        async with asyncio.timeout(PATIENCE_S):
            while len(asyncio.all_tasks()) > 1 + len(server.queries):
                await asyncio.sleep(0)
        assert server.count("b.example") == 0
