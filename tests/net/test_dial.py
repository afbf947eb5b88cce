"""Dialling: addresses in turn and fast, the real error in words, and no socket left behind by whoever gives up."""

import asyncio
import gc
import socket
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest

from gateway.core.verdict import DenyReason
from gateway.net.dial import MAX_ATTEMPTS, Connected, Dialer, DialError, IPAddress, interleave
from tests.support.patience import PATIENCE_S, within

ALIVE = IPv4Address("127.0.0.1")


@asynccontextmanager
async def dialing(timeout_s: float = 5.0) -> AsyncIterator[Dialer]:
    dialer = Dialer(asyncio.get_running_loop(), timeout_s)
    try:
        yield dialer
    finally:
        dialer.close()


@contextmanager
def listening(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A listener that takes connections into its queue; yields its port."""
    with socket.create_server((host, port), backlog=128) as server:
        yield server.getsockname()[1]


@contextmanager
def silent(host: str, port: int = 0) -> Iterator[int]:
    """A listener with a full queue drops every SYN, as a dead host does; yields its port."""
    with socket.socket() as server, ExitStack() as fillers:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(0)
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield server.getsockname()[1]


async def reached(dialer: Dialer, addresses: list[IPAddress], port: int) -> IPAddress:
    """Dial, close, and return which address was reached."""
    result = await dialer.connect(addresses, port)
    assert isinstance(result, Connected), result
    result.sock.close()
    return result.address


def addresses(*texts: str) -> list[IPAddress]:
    return [ip_address(text) for text in texts]


def test_families_take_turns_and_ipv6_begins() -> None:
    mixed = addresses("192.0.2.1", "192.0.2.2", "192.0.2.3", "2001:db8::1", "2001:db8::2")
    assert [str(each) for each in interleave(mixed)] == [
        *("2001:db8::1", "192.0.2.1", "2001:db8::2", "192.0.2.2", "192.0.2.3"),
    ]


def test_a_bounded_number_of_addresses_is_tried_of_both_families() -> None:
    many: list[IPAddress] = [IPv6Address(number) for number in range(50)]
    many += [IPv4Address(number) for number in range(50)]
    tried = interleave(many)
    assert len(tried) == MAX_ATTEMPTS
    assert {each.version for each in tried} == {4, 6}


async def test_connects_to_the_address_with_the_options_a_tunnel_needs() -> None:
    with listening() as port:
        async with dialing() as dialer:
            result = await dialer.connect([ALIVE], port)
            assert isinstance(result, Connected)
            with result.sock as sock:
                assert sock.getpeername() == ("127.0.0.1", port)
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert not sock.getblocking()


async def test_a_refused_address_is_followed_by_the_next_at_once() -> None:
    with listening() as port:
        async with dialing() as dialer, within(0.2):
            assert await reached(dialer, addresses("127.0.0.3", "127.0.0.4", "127.0.0.1"), port) == ALIVE


async def test_a_silent_address_is_followed_by_the_next_soon() -> None:
    with listening() as port, silent("127.0.0.3", port):
        async with dialing() as dialer, within(2):
            assert await reached(dialer, addresses("127.0.0.3", "127.0.0.1"), port) == ALIVE


async def test_an_unreachable_family_is_followed_by_the_other_at_once() -> None:
    with listening() as port:
        async with dialing() as dialer, within(2):
            assert await reached(dialer, addresses("127.0.0.1", "::ffff:255.255.255.255"), port) == ALIVE


@pytest.mark.parametrize(
    ("address", "reason", "words"),
    [
        ("127.0.0.3", DenyReason.CONNECT_REFUSED, "connection refused"),
        ("255.255.255.255", DenyReason.CONNECT_UNREACHABLE, "network is unreachable"),
    ],
)
async def test_the_real_error_is_told_in_words_without_an_address(address: str, reason: DenyReason, words: str) -> None:
    with listening() as port:
        async with dialing() as dialer:
            result = await dialer.connect(addresses(address), port)
            assert isinstance(result, DialError)
            assert result.reason is reason
            assert words in result.message
            assert address not in result.message


async def test_all_addresses_together_have_one_time_limit() -> None:
    with silent("127.0.0.3") as port, silent("127.0.0.4", port), silent("127.0.0.5", port):
        async with dialing(timeout_s=0.4) as dialer, within(2):
            result = await dialer.connect(addresses("127.0.0.3", "127.0.0.4", "127.0.0.5"), port)
            assert isinstance(result, DialError)
            assert result.reason is DenyReason.CONNECT_TIMEOUT


async def test_the_slower_of_two_connections_is_closed() -> None:
    with listening() as port, listening("127.0.0.3", port):
        async with dialing() as dialer:
            for _ in range(50):
                await reached(dialer, addresses("127.0.0.3", "127.0.0.1"), port)
            assert not dialer.deadlines


async def test_a_cancelled_dial_is_not_answered_and_leaves_nothing() -> None:
    answers: list[object] = []
    with silent("127.0.0.3") as port, silent("127.0.0.4", port):
        async with dialing(timeout_s=0.3) as dialer:
            dial = dialer.dial(addresses("127.0.0.3", "127.0.0.4"), port, answers.append)
            dial.cancel()
            later = dialer.dial(addresses("127.0.0.3"), port, answers.append)
            async with asyncio.timeout(PATIENCE_S):
                while not later.finished:
                    await asyncio.sleep(0.01)
            assert len(answers) == 1
            assert not dialer.deadlines


async def test_a_coroutine_cancelled_at_any_moment_leaves_no_socket() -> None:
    with listening() as port, warnings.catch_warnings():
        # A socket that nobody closed warns when it is collected.
        warnings.simplefilter("error", ResourceWarning)
        async with dialing() as dialer:
            for turns in range(6):
                for _ in range(20):
                    task = asyncio.ensure_future(dialer.connect([ALIVE], port))
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    task.cancel()
                    try:
                        result = await task
                    except asyncio.CancelledError:
                        continue
                    assert isinstance(result, Connected)
                    result.sock.close()
            gc.collect()
            assert not dialer.deadlines
