"""Sessions and events as values, and as rows of the tables. Pure."""

from typing import Any, Final

import msgspec

from control.plan.session import Event, Reason, Session, SessionState
from control.spec import SandboxSpec

encode: Final = msgspec.json.Encoder().encode
_life_decoder: Final = msgspec.json.Decoder(Session)
_spec_decoder: Final = msgspec.json.Decoder(SandboxSpec)
_event_decoder: Final[msgspec.json.Decoder[Event]] = msgspec.json.Decoder(Event)


class StoredEvent(msgspec.Struct, frozen=True):
    """One event of a session, as the journal and the database keep it."""

    number: int
    at: int
    event: Event


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    """One session's row."""

    id: str
    run_id: str
    position: int
    created_at: int
    memory_bytes: int
    cpus: float
    spec: SandboxSpec
    life: Session
    last_event: int = 0
    cleaned: bool = False


class Selection(msgspec.Struct, frozen=True):
    """Which sessions a list holds: of these states, these reasons, this image; empty: any."""

    states: tuple[SessionState, ...] = ()
    reasons: tuple[Reason, ...] = ()
    image: str = ""


ALL: Final = Selection()


def event_row(session: str, stored: StoredEvent) -> dict[str, object]:
    """Return an event as a row of `events`."""
    return {
        "session": session,
        "number": stored.number,
        "at": stored.at,
        "type": stored.event.__struct_config__.tag,
        "data": encode(stored.event).decode(),
    }


def event_of(row: Any) -> StoredEvent:
    """Return the event of a row."""
    return StoredEvent(row.number, row.at, _event_decoder.decode(row.data))


def life_columns(life: Session) -> dict[str, object]:
    """Return the columns of `sessions` that follow from what the session has come to."""
    return {
        "state": life.state.value,
        "reason": None if life.reason is None else life.reason.value,
        "ended_at": life.ended_at,
        "life": encode(life).decode(),
    }


def session_row(new: StoredSession) -> dict[str, object]:
    """Return a session as a row of `sessions`."""
    return {
        "id": new.id,
        "run_id": new.run_id,
        "position": new.position,
        "created_at": new.created_at,
        "image": new.spec.image,
        "network": new.spec.network.value,
        "memory_bytes": new.memory_bytes,
        "cpus": new.cpus,
        "spec": encode(new.spec).decode(),
        "address": None,
        "last_event": new.last_event,
        "cleaned": new.cleaned,
        **life_columns(new.life),
    }


def session_of(row: Any) -> StoredSession:
    """Return the session of a row."""
    return StoredSession(
        id=row.id,
        run_id=row.run_id,
        position=row.position,
        created_at=row.created_at,
        memory_bytes=row.memory_bytes,
        cpus=row.cpus,
        spec=_spec_decoder.decode(row.spec),
        life=_life_decoder.decode(row.life),
        last_event=row.last_event,
        cleaned=row.cleaned,
    )
