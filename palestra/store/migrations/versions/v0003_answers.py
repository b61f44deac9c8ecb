"""Adds answers: how each sample of a trace is found again when its conversation continues."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "answers",
        sa.Column("trace_id", sa.Text, nullable=False),
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("sample", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("name", sa.LargeBinary, nullable=False),
        sa.Column("thoughts", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("trace_id", "number", "sample", name="pk_answers"),
        sa.ForeignKeyConstraint(["trace_id"], ["traces.trace_id"], name="fk_answers_trace_id"),
    )
    op.create_index("ix_answers_name", "answers", ["name"])
