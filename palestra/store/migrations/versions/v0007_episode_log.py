"""Changes of episodes on their way into their tables; whether a run counts its groups by what it says itself."""

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
    # Of a run that was saved before, groups that it does not count are none.
    op.add_column("episode_runs", sa.Column("is_staging", sa.Boolean, nullable=False, server_default=sa.true()))
