"""Targets between the daemons: frames either way, grants at the gateway, usage at control; settings and stored rows."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from control.config import ControlConfig
from control.db.rows import event_of, event_row, session_of, session_row
from control.link import UsageBook
from control.plan.grants import policy_digest
from gateway.config import GatewayConfig, SessionsFile
from gateway.contract.framing import FrameReader, FramingError, encode
from gateway.contract.ids import is_session_id, is_sha256
from gateway.contract.messages import FromControl, FromGateway, PutGrant, RevokeGrant, Snapshot, UsageReport
from gateway.contract.policy import MAX_NUMBER, Usage
from gateway.core.rules import RegistryList
from gateway.core.verdict import Deny
from gateway.registry import Registry
from gateway.runtime.settings import SettingsError, parse
from tests.fuzz.properties import check_bounded, pieces


def _frames(parts: list[bytes], kind: object) -> tuple[list[Any], str]:
    """Return the messages of a stream, and why it ended if it did not end well."""
    found: list[Any] = []

    async def read() -> str:
        stream = asyncio.StreamReader()
        for part in parts:
            stream.feed_data(part)
        stream.feed_eof()
        reader = FrameReader[object](stream, kind)
        try:
            while (message := await reader.read()) is not None:
                found.append(message)
        except FramingError as error:
            return str(error)
        return ""

    loop = asyncio.new_event_loop()
    try:
        return found, loop.run_until_complete(read())
    finally:
        loop.close()


def contract(data: bytes) -> None:
    """`FrameReader`: whole messages of either side, which are written again as they were read, or the end of the connection."""
    for kind in (FromControl, FromGateway):
        found, problem = _frames([data], kind)
        assert _frames(pieces(data, 40), kind) == (found, problem)
        if problem:
            check_bounded(problem, data)
        else:
            # To the last byte.
            size = 0
            while size < len(data):
                size += 4 + int.from_bytes(data[size : size + 4], "big")
            assert size == len(data)
        assert _frames([encode(message) for message in found], kind) == (found, "")


def grants(data: bytes) -> None:
    """`Registry`: a grant is in force as it is or not at all, and one address has one session."""
    registry = Registry(RegistryList(), require_address=True, ready=False)
    for message in _frames([data], FromControl)[0]:
        match message:
            case Snapshot():
                problems = registry.replace_all(message.grants)
                # Of a session that is named twice the last grant holds, as if it had come later.
                named = {grant.session: grant for grant in message.grants}
                assert problems or {session.id: session.grant for session in registry} == named
            case PutGrant(grant=grant):
                before = registry.get(grant.session)
                was = None if before is None else before.grant
                problems = registry.put(grant)
                now = registry.get(grant.session)
                assert (None if now is None else now.grant) == (was if problems else grant)
            case RevokeGrant(session=session):
                problems = ()
                registry.revoke(session)
                assert registry.get(session) is None
            case _:
                problems = ()
        for problem in problems:
            check_bounded(problem, data)
    addresses = [session.address for session in registry if session.address is not None]
    assert len(set(addresses)) == len(addresses)
    for session in registry:
        assert is_session_id(session.id)
        assert is_sha256(session.grant.token_sha256)
        assert 0 < session.grant.egress_budget.connections <= MAX_NUMBER
        assert isinstance(registry.authenticate(session.id, "another token", session.address), Deny)
        assert min(msgspec.structs.astuple(session.grant.used)) >= 0
        budget = session.grant.egress_budget.bytes
        assert not budget or session.bytes_left <= budget
        assert isinstance(registry.authenticate_hash(session.id, bytes.fromhex(session.grant.token_sha256), None), Deny)


def usage_reports(data: bytes) -> None:
    """`UsageBook`: what a session has used never becomes less, whatever is reported and in whatever order."""
    book, totals = UsageBook(), dict[str, Usage]()
    for message in _frames([data], FromGateway)[0]:
        if isinstance(message, UsageReport):
            book.report(message.session, message.epoch, message.usage)
            known, now = totals.get(message.session, Usage()), book.total(message.session)
            assert all(getattr(now, name) >= getattr(known, name) for name in Usage.__struct_fields__)
            totals[message.session] = now
    for session, epoch, used in book.take_unstored():
        # As the store keeps it.
        assert msgspec.json.decode(msgspec.json.encode(used), type=Usage) == used
        assert min(msgspec.structs.astuple(used)) >= 0
        assert book.before(session, epoch) == book.total(session).minus(used)
    assert book.take_unstored() == []


def settings(data: bytes) -> None:
    """`parse`: settings within their limits, or every problem in a bounded sentence, never a traceback."""
    text = data.decode("utf-8", "replace")
    for kind in (GatewayConfig, ControlConfig, SessionsFile):
        try:
            found = parse(text, kind)
        except SettingsError as error:
            check_bounded("; ".join(map(str, error.problems)), data * 20)
        else:
            assert parse(text, kind) == found


def stored_rows(data: bytes) -> None:
    """`event_of`, `session_of`: what was stored is what comes back, or an error of the decoder's.

    Two lines: an event's data, or a session's spec and life.
    """
    # Databases hold texts that are texts.
    first, _, second = data.decode("utf-8", "replace").partition("\n")
    row: Any = SimpleNamespace(
        number=1,
        at=2,
        data=first,
        id="s1",
        run_id="r",
        position=1,
        created_at=2,
        memory_bytes=3,
        cpus=1.0,
        spec=first,
        life=second,
        last_event=1,
        cleaned=False,
    )
    reads: tuple[tuple[Callable[[Any], Any], Callable[[Any], dict[str, object]]], ...] = (
        (event_of, lambda stored: event_row("s1", stored)),
        (session_of, session_row),
    )
    for read, write in reads:
        try:
            stored = read(row)
        except (msgspec.MsgspecError, RecursionError):
            continue
        assert read(SimpleNamespace(**write(stored))) == stored
        if read is session_of:
            assert len(policy_digest(stored.spec)) == 16


CONTRACT_TARGETS = {
    "contract": contract,
    "grants": grants,
    "usage_reports": usage_reports,
    "settings": settings,
    "stored_rows": stored_rows,
}
