"""When sessions ended and what their folders take, so that the oldest can be forgotten by number and size."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_BATCH = 1_000


def upgrade() -> None:
    op.add_column("sessions", sa.Column("ended_at", sa.BigInteger()))
    op.add_column("sessions", sa.Column("kept_bytes", sa.BigInteger()))
    op.drop_index("ix_sessions_cleaned", "sessions")
    op.create_index("ix_sessions_cleaned_ended_at", "sessions", ["cleaned", "ended_at"])
    _fill()


def _fill() -> None:
    """The time of the end lay in the document only."""
    connection = op.get_bind()
    sessions = sa.table("sessions", sa.column("id"), sa.column("life"), sa.column("ended_at"))
    change = sa.update(sessions).where(sessions.c.id == sa.bindparam("session"))
    query = sa.select(sessions.c.id, sessions.c.life).order_by(sessions.c.id).limit(_BATCH)
    last = ""
    while rows := connection.execute(query.where(sessions.c.id > last)).all():
        last = rows[-1].id
        ends = [{"session": row.id, "at": json.loads(row.life).get("ended_at")} for row in rows]
        connection.execute(change.values(ended_at=sa.bindparam("at")), ends)


def downgrade() -> None:
    op.drop_index("ix_sessions_cleaned_ended_at", "sessions")
    op.create_index("ix_sessions_cleaned", "sessions", ["cleaned"])
    op.drop_column("sessions", "kept_bytes")
    op.drop_column("sessions", "ended_at")
