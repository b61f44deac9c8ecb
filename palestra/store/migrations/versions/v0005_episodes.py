"""Adds episodes: runs, groups, episodes, tombstones of committed ones, and the attempt that a trace belongs to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "episode_runs",
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("settings", sa.Text, nullable=False),
        sa.Column("model", sa.Text),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("is_paused", sa.Boolean, nullable=False),
        sa.Column("committed", sa.BigInteger, nullable=False),
        sa.Column("delivered", sa.BigInteger, nullable=False),
        sa.Column("registered", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("owner", "run", name="pk_episode_runs"),
    )
    op.create_table(
        "episode_groups",
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger),
        sa.Column("serial", sa.BigInteger, nullable=False),
        sa.Column("made", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("owner", "run", "group_id", name="pk_episode_groups"),
    )
    op.create_table(
        "episodes",
        sa.Column("episode_id", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("index", sa.Integer, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("strikes", sa.Integer, nullable=False),
        sa.Column("lost", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("not_before", sa.Double, nullable=False),
        sa.Column("client_id", sa.Text, nullable=False),
        sa.Column("claim_id", sa.Text, nullable=False),
        sa.Column("claimed_at", sa.Double),
        sa.Column("lease_s", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("oldest_version", sa.Integer),
        sa.Column("calls", sa.Integer, nullable=False),
        sa.Column("losses", sa.Text, nullable=False),
        sa.Column("result", sa.Text),
        sa.PrimaryKeyConstraint("episode_id", name="pk_episodes"),
    )
    op.create_table(
        "episode_tombstones",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_episode_tombstones"),
    )
    op.add_column("traces", sa.Column("origin", sa.Text))
    op.create_index("ix_traces_origin", "traces", ["origin"])
