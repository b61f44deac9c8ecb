"""Adds a log of changes on their way into the tables of episodes, and whether a run is registering groups in parts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "episode_log",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("entry", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_episode_log"),
    )
    # In a run that was saved before this version, groups that are not counted do not exist.
    op.add_column("episode_runs", sa.Column("is_staging", sa.Boolean, nullable=False, server_default=sa.true()))
