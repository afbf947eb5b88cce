"""Sessions, their events, their usage, and idempotency keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.String(32)),
        sa.Column("image", sa.String(512), nullable=False),
        sa.Column("network", sa.String(16), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("cpus", sa.Float(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("life", sa.Text(), nullable=False),
        sa.Column("address", sa.String(45)),
        sa.Column("last_event", sa.Integer(), nullable=False),
        sa.Column("cleaned", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
        sa.UniqueConstraint("position", name="uq_sessions_position"),
    )
    op.create_index("ix_sessions_state_position", "sessions", ["state", "position"])
    op.create_index("ix_sessions_cleaned", "sessions", ["cleaned"])
    op.create_table(
        "events",
        sa.Column("session", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["session"], ["sessions.id"], name="fk_events_session_sessions", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("session", "number", name="pk_events"),
    )
    op.create_table(
        "usage",
        sa.Column("session", sa.String(64), nullable=False),
        sa.Column("epoch", sa.String(64), nullable=False),
        sa.Column("usage", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["session"], ["sessions.id"], name="fk_usage_session_sessions", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("session", "epoch", name="pk_usage"),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_sha256", sa.String(64), nullable=False),
        sa.Column("session", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["session"], ["sessions.id"], name="fk_idempotency_keys_session_sessions", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("key", name="pk_idempotency_keys"),
    )


def downgrade() -> None:
    for table in ("idempotency_keys", "usage", "events", "sessions"):
        op.drop_table(table)
