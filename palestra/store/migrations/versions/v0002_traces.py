"""Adds traces: what was read and sampled in each call of a model."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "traces",
        sa.Column("trace_id", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.Column("turns", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("trace_id", name="pk_traces"),
    )
    op.create_index("ix_traces_updated_at", "traces", ["updated_at"])
    op.create_index("ix_traces_owner_updated_at", "traces", ["owner", "updated_at"])
    op.create_table(
        "turns",
        sa.Column("trace_id", sa.Text, nullable=False),
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("parent", sa.Integer),
        sa.Column("parent_sample", sa.Integer),
        sa.Column("read", sa.LargeBinary, nullable=False),
        sa.Column("samples", sa.LargeBinary, nullable=False),
        sa.Column("facts", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("trace_id", "number", name="pk_turns"),
        sa.ForeignKeyConstraint(["trace_id"], ["traces.trace_id"], name="fk_turns_trace_id"),
    )
