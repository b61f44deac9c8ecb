"""Adds the quota of kept pictures."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.add_column("quotas", sa.Column("picture_bytes", sa.BigInteger))
