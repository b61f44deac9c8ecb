"""Adds sessions, models, samplers, checkpoints with the saves under way, keys and settings."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("user_metadata", sa.JSON, nullable=False),
        sa.Column("sdk_version", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text),
        sa.Column("display_name", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("last_heartbeat_at", sa.Double, nullable=False),
        sa.Column("finish_reason", sa.Text),
        sa.Column("finish_detail", sa.Text),
        sa.PrimaryKeyConstraint("session_id", name="pk_sessions"),
    )
    op.create_index("ix_sessions_owner_created_at", "sessions", ["owner", "created_at"])
    op.create_index("ix_sessions_status_last_heartbeat_at", "sessions", ["status", "last_heartbeat_at"])
    op.create_table(
        "models",
        sa.Column("model_id", sa.Text, nullable=False),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("lora", sa.JSON, nullable=False),
        sa.Column("user_metadata", sa.JSON),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("snapshot_seq", sa.BigInteger, nullable=False, server_default="-1"),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("last_request_at", sa.Double, nullable=False),
        sa.Column("corrupted", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("model_id", name="pk_models"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_models_session_id"),
    )
    op.create_index("ix_models_session_id", "models", ["session_id"])
    op.create_index("ix_models_owner", "models", ["owner"])
    op.create_index("ix_models_status", "models", ["status"])
    op.create_table(
        "samplers",
        sa.Column("sampler_id", sa.Text, nullable=False),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("model_path", sa.Text),
        sa.Column("model_id", sa.Text),
        sa.Column("seq_id", sa.BigInteger),
        sa.Column("folder", sa.Text),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("sampler_id", name="pk_samplers"),
    )
    op.create_index("ix_samplers_session_id", "samplers", ["session_id"])
    op.create_index("ix_samplers_folder", "samplers", ["folder"])
    op.create_index("ix_samplers_status", "samplers", ["status"])
    op.create_table(
        "checkpoints",
        sa.Column("model_id", sa.Text, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("folder", sa.Text, nullable=False),
        sa.Column("base_model", sa.Text, nullable=False),
        sa.Column("lora", sa.JSON, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("seq_id", sa.BigInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("public", sa.Boolean, nullable=False),
        sa.Column("user_metadata", sa.JSON),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("completed_at", sa.Double),
        sa.Column("expires_at", sa.Double),
        sa.PrimaryKeyConstraint("model_id", "kind", "name", name="pk_checkpoints"),
    )
    op.create_index("ix_checkpoints_owner", "checkpoints", ["owner"])
    op.create_index("ix_checkpoints_expires_at", "checkpoints", ["expires_at"])
    op.create_table(
        "saves",
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("model_id", sa.Text, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("seq_id", sa.BigInteger, nullable=False),
        sa.Column("folder", sa.Text, nullable=False),
        sa.Column("ttl_s", sa.Double),
        sa.Column("user_metadata", sa.JSON),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_saves"),
    )
    op.create_index("ix_saves_model_id_kind_name", "saves", ["model_id", "kind", "name"])
    op.create_table(
        "keys",
        sa.Column("key_hash", sa.String(64), nullable=False),
        sa.Column("key_id", sa.Integer, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("rights", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
        sa.PrimaryKeyConstraint("key_hash", name="pk_keys"),
        sa.UniqueConstraint("key_id", name="uq_keys_key_id"),
    )
    op.create_table(
        "settings",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_settings"),
    )
