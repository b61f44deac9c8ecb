"""Adds the journal in the database, and the list of snapshots that were copied to where other servers find them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_table(
        "journal_records",
        sa.Column("journal", sa.String(16), nullable=False),
        sa.Column("number", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("journal", "number", name="pk_journal_records"),
    )
    op.create_table(
        "snapshot_copies",
        sa.Column("item", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("file", sa.Text, nullable=False),
        sa.Column("seq_id", sa.BigInteger, nullable=False),
        sa.Column("object", sa.Text, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("item", name="pk_snapshot_copies"),
    )
