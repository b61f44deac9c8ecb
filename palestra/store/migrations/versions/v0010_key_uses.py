"""Adds when each key was used last."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("keys", sa.Column("last_used_at", sa.Double))
