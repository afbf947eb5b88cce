"""A client that was told that it may ask again on its connection: until the reply is whole, its connection cannot move."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.core.head import parse_head
from gateway.core.incomplete import Incomplete
from gateway.core.plain_head import read_request
from gateway.core.verdict import CloseReason
from gateway.ending import Ending
from gateway.net.plain import PlainRelay
from gateway.net.plain_exchange import Exchange

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"


@dataclass
class End:
    """One end of an exchange."""

    data: bytearray = field(default_factory=bytearray)
    written: bytearray = field(default_factory=bytearray)
    ended: bool = False
    failed: bool = False
    is_full: bool = False

    def write(self, data: bytes) -> None:
        self.written += data

    def taken(self) -> None:
        pass


def begun(*, version: bytes = b"1.1") -> tuple[Exchange, End, End]:
    """Return an exchange whose request was sent, its client and its host."""
    head = parse_head(b"GET http://site.example/ HTTP/%b\r\nHost: site.example\r\n\r\n" % version)
    assert not isinstance(head, Incomplete)
    ends: Any = End(), End()
    account: Any = SimpleNamespace(bytes_left=1000, bytes_up=0, bytes_down=0)
    exchange = Exchange(account, read_request(head, None), *ends)
    exchange.start()
    return exchange, *ends


def test_a_short_reply_is_passed_on_in_one_step() -> None:
    exchange, client, host = begun()
    host.data += HEAD + b"hello"
    exchange.step()
    assert client.written == HEAD + b"hello"
    assert exchange.ending is not None
    assert (exchange.ending.reason, exchange.ending.keep_client) == (CloseReason.DONE, True)


@pytest.mark.parametrize(
    ("version", "is_last", "promised"), [(b"1.1", False, True), (b"1.1", True, False), (b"1.0", False, False)]
)
def test_a_hand_over_waits_for_the_rest_of_a_reply_whose_client_may_ask_again(
    version: bytes, is_last: bool, promised: bool
) -> None:
    exchange, _, host = begun(version=version)
    exchange.is_last = is_last
    gateway = SimpleNamespace(config=SimpleNamespace(limits=SimpleNamespace(drain_ms=0)))
    services: Any = SimpleNamespace(gateway=gateway, is_leaving=True, relays=set())
    loop: Any = SimpleNamespace(time=lambda: 0.0)
    services.loop = loop
    session: Any = SimpleNamespace(open_count=0, slots=SimpleNamespace(capacity=1), add_closer=lambda _: None)
    gateway.config.limits.egress_waiters_per_session = 1
    relay = PlainRelay(services, None, session)
    relay._exchange, relay._is_serving = exchange, True
    services.relays.add(relay)
    nothing: Any = None
    ending = Ending(services, nothing, nothing, nothing)
    # No word of it yet: the reply will say that the connection ends.
    assert ending._is_paused()
    host.data += HEAD + b"he"
    exchange.step()
    assert ending._is_paused() is not promised
