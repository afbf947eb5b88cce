"""Tables, in types that SQLite and PostgreSQL share. Times are milliseconds since the epoch, documents are JSON text.

The migrations are the truth of a deployed database; a test holds this module equal to them.
"""

from sqlalchemy import BigInteger, Boolean, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    }
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("run_id", String(64), nullable=False),
    # Order of creation, and the cursor of lists: a number that no two sessions share.
    Column("position", BigInteger, nullable=False, unique=True),
    Column("created_at", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", String(32)),
    Column("image", String(512), nullable=False),
    Column("network", String(16), nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("cpus", Float, nullable=False),
    # The caller's request, and all that the session has come to (control.plan.session.Session).
    Column("spec", Text, nullable=False),
    Column("life", Text, nullable=False),
    # Held until the gateway has acknowledged that it grants it to nobody.
    Column("address", String(45)),
    Column("last_event", Integer, nullable=False),
    # The container and its volume are gone: nothing is left to clean up.
    Column("cleaned", Boolean, nullable=False),
    Column("ended_at", BigInteger),
    # What its folder takes of the disk; unknown until it was measured, after the end.
    Column("kept_bytes", BigInteger),
    Index(None, "state", "position"),
    Index(None, "cleaned", "ended_at"),
)

events = Table(
    "events",
    metadata,
    Column("session", String(64), ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True),
    # From 1, without gaps; the same numbers as in the session's journal.
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("at", BigInteger, nullable=False),
    Column("type", String(32), nullable=False),
    Column("data", Text, nullable=False),
)

usage = Table(
    "usage",
    metadata,
    Column("session", String(64), ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True),
    Column("epoch", String(64), primary_key=True),
    Column("usage", Text, nullable=False),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("key", String(255), primary_key=True),
    # SHA-256 of the request: the same key with another request is the caller's mistake.
    Column("request_sha256", String(64), nullable=False),
    Column("session", String(64), ForeignKey("sessions.id", ondelete="CASCADE"), nullable=False),
)
