"""Alembic runs this file for every command; connection and transaction belong to the caller."""

from __future__ import annotations

from alembic import context

from palestra.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite cannot alter a column in place
    transactional_ddl=True,
)
context.run_migrations()
