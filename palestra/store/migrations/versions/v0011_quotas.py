"""Adds quotas and usage of owners, and when keys end or were rotated."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.add_column("keys", sa.Column("expires_at", sa.Double))
    op.add_column("keys", sa.Column("old_hash", sa.String(64)))
    op.add_column("keys", sa.Column("old_until", sa.Double))
    op.create_index("ix_keys_old_hash", "keys", ["old_hash"])
    op.add_column("models", sa.Column("usage_seq", sa.BigInteger, nullable=False, server_default="-1"))
    op.create_table(
        "quotas",
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("models", sa.BigInteger),
        sa.Column("pending_samples", sa.BigInteger),
        sa.Column("pending_bytes", sa.BigInteger),
        sa.Column("tokens_per_day", sa.BigInteger),
        sa.Column("checkpoint_bytes", sa.BigInteger),
        sa.PrimaryKeyConstraint("owner", name="pk_quotas"),
    )
    op.create_table(
        "usage",
        sa.Column("day", sa.String(10), nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("prompts", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("sampled_tokens", sa.BigInteger, nullable=False),
        sa.Column("trained_tokens", sa.BigInteger, nullable=False),
        sa.Column("checkpoint_bytes", sa.BigInteger, nullable=False),
        sa.Column("engine_s", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("day", "owner", "run", name="pk_usage"),
    )
