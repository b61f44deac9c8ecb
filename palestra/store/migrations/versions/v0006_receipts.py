"""Adds answers that may not have reached their client, and how many tokens an attempt has sampled."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "unanswered_turns",
        sa.Column("trace_id", sa.Text, nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("trace_id", "number", name="pk_unanswered_turns"),
    )
    op.add_column("episodes", sa.Column("sampled", sa.BigInteger, nullable=False, server_default="0"))
