"""Alembic's entry: runs the migrations on the connection that the store hands over (control.db.store)."""

from alembic import context

from control.db.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite cannot alter most of a table in place; Alembic then copies it.
    render_as_batch=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
