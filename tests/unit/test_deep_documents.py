"""A document that is nested deeper than its reader can call itself is refused like any other that cannot be read.

Readers of JSON and msgpack raise RecursionError for it, which is none of their own errors: a peer's few kilobytes would end
the task that listens to it, and with the task whatever only it does.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from control.api.types import EventView
from control.client import ControlUnavailableError, _decoded
from control.docker.events import _parsed
from control.docker.images import _last_word
from control.doctor.trial import _findings
from control.plan import firewall, routes
from control.plan.network import NetworkSettings
from control.runner import channel
from control.runner.messages import ToolCall, nesting
from control.sessions import journal
from gateway import channel as gateway_channel
from gateway import unfinished
from gateway.config import GatewayConfig
from gateway.contract.framing import FrameReader, FramingError
from gateway.contract.messages import FromControl, FromGateway
from gateway.core.rules import RuleErrors, load_registries
from gateway.runtime.settings import SettingsError, parse

DEEP = 5_000
JSON = b"[" * DEEP
MSGPACK = b"\x91" * DEEP + b"\xc0"
KEY = msgspec.msgpack.encode


async def read_frame(messages: object) -> None:
    stream = asyncio.StreamReader()
    # The tag comes last, so that all before it is skipped.
    body = b"\x82" + KEY("x") + MSGPACK + KEY("type") + KEY("ack")
    stream.feed_data(len(body).to_bytes(4, "big") + body)
    await FrameReader[object](stream, messages).read()


@pytest.mark.parametrize("messages", [FromControl, FromGateway])
async def test_on_the_contract_socket_the_connection_ends(messages: object) -> None:
    with pytest.raises(FramingError):
        await read_frame(messages)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (
            lambda: gateway_channel.decode(b"\x82" + KEY("x") + MSGPACK + KEY("type") + KEY("go")),
            gateway_channel.SuccessionError,
        ),
        (lambda: unfinished.decode(b'[{"x":' + JSON), ValueError),
        (lambda: load_registries(f"x = {'[' * DEEP}"), RuleErrors),
        (lambda: parse(f"x = {'[' * DEEP}", GatewayConfig), SettingsError),
        (lambda: _decoded(b'{"x":' + JSON, EventView), ControlUnavailableError),
    ],
    ids=["channel", "unfinished", "registries", "settings", "client"],
)
def test_it_is_the_readers_own_error(read: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error):
        read()


def test_of_the_engine_and_the_probe_it_says_nothing() -> None:
    assert _parsed(JSON) == ("", "", "")
    assert _last_word(JSON + b'\n{"status":"Loaded"}') == "Loaded"
    assert not any(finding.ok for finding in _findings('{"check":"dns","ok":true,"x":' + "[" * DEEP, "it ended"))


@pytest.mark.parametrize("listing", ["[" * 100_000, '{"nftables":' + "[" * 100_000])
def test_a_listing_of_the_host_is_no_leave_to_launch(listing: str) -> None:
    assert firewall.problems(listing, NetworkSettings())
    assert routes.problems(listing, NetworkSettings())


def test_a_journal_ends_before_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"number":1,"at":1,"event":{"type":"launch_requested"}}\n{"x":' + JSON + b"\n")
    assert [event.number for event in journal.read(path)] == [1]


@pytest.mark.parametrize(
    ("document", "depth"),
    [
        (b"1", 0),
        (b"[]", 1),
        (b'[{"a":[]},[]]', 3),
        (rb'{"[[[":"\"[[\\","b":"]"}', 1),
        (b"[" * 900 + b"]" * 900, 900),
    ],
)
def test_the_nesting_of_a_document_is_counted_outside_of_its_texts(document: bytes, depth: int) -> None:
    assert nesting(document) == depth


def test_what_a_runner_nests_is_kept_only_as_deep_as_everyone_can_read_it() -> None:
    shallow = b"[" * channel.MAX_NESTING + b"]" * channel.MAX_NESTING
    assert bytes(channel._bounded(msgspec.Raw(shallow))) == shallow
    for depth in (channel.MAX_NESTING + 1, 900):
        deep = b"[" * depth + b"]" * depth
        kept = channel._kept(ToolCall(1, "c", "n", msgspec.Raw(deep)))
        assert isinstance(kept, ToolCall)
        assert msgspec.json.decode(bytes(kept.arguments)) == {"truncated": True, "bytes": 2 * depth}
