"""Reads and writes the store. One set of queries for SQLite and PostgreSQL.

It knows rows, not what they mean for a container. Calls are bounded as those of Database, and raise StoreUnavailableError.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from control.db.database import Database
from control.db.rows import (
    ALL,
    Selection,
    StoredEvent,
    StoredSession,
    encode,
    event_of,
    event_row,
    life_columns,
    session_of,
    session_row,
)
from control.db.tables import events, idempotency_keys, sessions, usage
from control.plan.retention import Kept
from control.plan.session import LaunchStarted, Session
from gateway.contract.policy import Usage

_usage_decoder: Final = msgspec.json.Decoder(Usage)
# Ended, and nothing of it is left but its record and its folder.
_OVER: Final = sessions.c.cleaned.is_(True) & sessions.c.ended_at.is_not(None)
# SELECT *, without the columns that no StoredSession has.
_SESSION: Final = sa.select(
    sessions.c.id,
    sessions.c.run_id,
    sessions.c.position,
    sessions.c.created_at,
    sessions.c.memory_bytes,
    sessions.c.cpus,
    sessions.c.spec,
    sessions.c.life,
    sessions.c.last_event,
    sessions.c.cleaned,
)


class SessionExistsError(Exception):
    """There is a session with this id."""


class KeyReusedError(Exception):
    """The idempotency key was used for another request."""


def request_digest(body: bytes) -> str:
    """Return what identifies a request under its idempotency key."""
    return hashlib.sha256(body).hexdigest()


class Store(Database):
    """The sessions of one control daemon."""

    async def insert(self, new: StoredSession, key: str = "", digest: str = "") -> StoredSession:
        """Store a new session, or return the one that the same key and request made before.

        Raises SessionExistsError, KeyReusedError.
        """

        async def work(connection: AsyncConnection) -> StoredSession:
            if key:
                query = sa.select(idempotency_keys).where(idempotency_keys.c.key == key)
                known = (await connection.execute(query)).one_or_none()
                if known is not None:
                    if known.request_sha256 != digest:
                        raise KeyReusedError
                    row = await connection.execute(_SESSION.where(sessions.c.id == known.session))
                    return session_of(row.one())
            try:
                await connection.execute(sa.insert(sessions).values(session_row(new)))
            except IntegrityError as error:
                raise SessionExistsError from error
            if key:
                values = {"key": key, "request_sha256": digest, "session": new.id}
                await connection.execute(sa.insert(idempotency_keys).values(values))
            return new

        return await self.write(work)

    async def append(self, session: str, new: Sequence[StoredEvent], life: Session) -> None:
        """Store events and what the session has come to by them, together or not at all.

        Repeating a call that may have succeeded is harmless: events that are stored already are left out.
        """
        given = list(new)

        async def advanced(connection: AsyncConnection, missing: Sequence[StoredEvent], last: int) -> bool:
            """Store events if `last` is the number of the last that is stored; False: it is not."""
            values = {**life_columns(life), "last_event": missing[-1].number}
            # Only with the event that assigns it: a later one must not take back an address that was released.
            if any(isinstance(each.event, LaunchStarted) for each in missing):
                values["address"] = life.address
            expected = (sessions.c.id == session) & (sessions.c.last_event == last)
            if (await connection.execute(sa.update(sessions).where(expected).values(values))).rowcount == 0:
                return False
            await connection.execute(sa.insert(events), [event_row(session, each) for each in missing])
            return True

        async def work(connection: AsyncConnection) -> None:
            # Nearly always they are the next ones, and nobody needs to ask.
            if not given or await advanced(connection, given, given[0].number - 1):
                return
            last = await connection.scalar(sa.select(sessions.c.last_event).where(sessions.c.id == session))
            if last is not None and (missing := [each for each in given if each.number > last]):
                await advanced(connection, missing, last)

        await self.write(work)

    async def release_address(self, session: str) -> None:
        """Note that the gateway grants the session's address to nobody any more."""
        await self._update(session, address=None)

    async def mark_cleaned(self, session: str) -> None:
        """Note that the session's container and volume are gone."""
        await self._update(session, cleaned=True)

    async def _update(self, session: str, **values: object) -> None:
        async def work(connection: AsyncConnection) -> None:
            await connection.execute(sa.update(sessions).where(sessions.c.id == session).values(values))

        await self.write(work)

    async def get(self, session: str) -> StoredSession | None:
        """Return one session."""
        rows = await self.read(_SESSION.where(sessions.c.id == session))
        return session_of(rows[0]) if rows else None

    async def page(
        self, selection: Selection = ALL, *, before: int | None = None, limit: int = 100
    ) -> list[StoredSession]:
        """Return sessions from the newest to the oldest; `before` is the position of the last one seen."""
        query = _SESSION.order_by(sessions.c.position.desc()).limit(limit)
        if selection.states:
            query = query.where(sessions.c.state.in_([state.value for state in selection.states]))
        if selection.reasons:
            query = query.where(sessions.c.reason.in_([reason.value for reason in selection.reasons]))
        if selection.image:
            query = query.where(sessions.c.image == selection.image)
        if before is not None:
            query = query.where(sessions.c.position < before)
        return [session_of(row) for row in await self.read(query)]

    async def unfinished(self) -> list[StoredSession]:
        """Return the sessions that are not cleaned up, oldest first."""
        query = _SESSION.where(sessions.c.cleaned.is_(False)).order_by(sessions.c.position)
        return [session_of(row) for row in await self.read(query)]

    async def held_addresses(self) -> dict[str, str]:
        """Return the addresses that may still be granted, by session."""
        query = sa.select(sessions.c.id, sessions.c.address).where(sessions.c.address.is_not(None))
        return {row.id: row.address for row in await self.read(query)}

    async def last_position(self) -> int:
        """Return the position of the newest session, 0 if there is none."""
        return (await self.read(sa.select(sa.func.max(sessions.c.position))))[0][0] or 0

    async def events(self, session: str, after: int = 0, limit: int = 1_000) -> list[StoredEvent]:
        """Return events of a session with numbers above `after`, in order."""
        mine = (events.c.session == session) & (events.c.number > after)
        rows = await self.read(sa.select(events).where(mine).order_by(events.c.number).limit(limit))
        return [event_of(row) for row in rows]

    # What is kept of sessions that are over.

    async def kept(self) -> tuple[int, int]:
        """Return how many ended sessions are kept, and the bytes of those that were measured."""
        query = sa.select(sa.func.count(), sa.func.sum(sessions.c.kept_bytes)).where(_OVER)
        count, size = (await self.read(query))[0]
        # PostgreSQL's sum of a bigint is a numeric.
        return count, int(size or 0)

    async def oldest_kept(self, limit: int) -> list[Kept]:
        """Return ended sessions that are kept, in the order of their ends."""
        query = sa.select(sessions.c.id, sessions.c.ended_at, sessions.c.kept_bytes).where(_OVER)
        rows = await self.read(query.order_by(sessions.c.ended_at, sessions.c.position).limit(limit))
        return [Kept(row.id, row.ended_at, row.kept_bytes) for row in rows]

    async def unmeasured(self, limit: int) -> list[str]:
        """Return ended sessions whose folders were not measured yet."""
        query = sa.select(sessions.c.id).where(_OVER, sessions.c.kept_bytes.is_(None)).limit(limit)
        return [row.id for row in await self.read(query)]

    async def put_sizes(self, sizes: Mapping[str, int]) -> None:
        """Note how many bytes the folders of ended sessions take."""
        change = sa.update(sessions).where(sessions.c.id == sa.bindparam("session"))
        rows = [{"session": session, "size": size} for session, size in sizes.items()]

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(change.values(kept_bytes=sa.bindparam("size")), rows)

        await self.write(work)

    async def forget(self, ids: Sequence[str]) -> None:
        """Delete sessions with their events, usage and idempotency keys."""

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(sa.delete(sessions).where(sessions.c.id.in_(ids)))

        await self.write(work)

    # Usage.

    async def put_usage(self, session: str, epoch: str, used: Usage) -> None:
        """Store what a session has used in one epoch of the gateway, in place of what was known."""
        text = encode(used).decode()

        async def work(connection: AsyncConnection) -> None:
            mine = (usage.c.session == session) & (usage.c.epoch == epoch)
            changed = await connection.execute(sa.update(usage).where(mine).values(usage=text))
            if changed.rowcount == 0:
                exists = await connection.scalar(sa.select(sessions.c.id).where(sessions.c.id == session))
                if exists is not None:
                    await connection.execute(sa.insert(usage).values(session=session, epoch=epoch, usage=text))

        await self.write(work)

    async def usage_of(self, ids: Sequence[str]) -> dict[str, dict[str, Usage]]:
        """Return what sessions have used, by session and epoch."""
        found: dict[str, dict[str, Usage]] = {}
        for row in await self.read(sa.select(usage).where(usage.c.session.in_(ids))):
            found.setdefault(row.session, {})[row.epoch] = _usage_decoder.decode(row.usage)
        return found
