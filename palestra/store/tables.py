"""The tables, as the newest migration leaves them. Their rows are the records of `records.py`, field by field."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

# Constraints need names, or a migration cannot speak of them.
NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}

metadata = MetaData(naming_convention=NAMES)


def _json() -> JSON:
    return JSON(none_as_null=True)


sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("status", String(16), nullable=False),
    Column("tags", _json(), nullable=False),
    Column("user_metadata", _json(), nullable=False),
    Column("sdk_version", Text, nullable=False),
    Column("project_id", Text),
    Column("display_name", Text),
    Column("created_at", Double, nullable=False),
    Column("last_heartbeat_at", Double, nullable=False),
    Column("finish_reason", Text),
    Column("finish_detail", Text),
    Index(None, "owner", "created_at"),
    Index(None, "status", "last_heartbeat_at"),
)

models = Table(
    "models",
    metadata,
    Column("model_id", Text, primary_key=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("owner", Text, nullable=False, index=True),
    Column("base_model", Text, nullable=False),
    Column("lora", _json(), nullable=False),
    Column("user_metadata", _json()),
    Column("status", String(16), nullable=False, index=True),
    Column("error", Text),
    Column("snapshot_seq", BigInteger, nullable=False, server_default="-1"),
    Column("created_at", Double, nullable=False),
    Column("last_request_at", Double, nullable=False),
    Column("corrupted", Boolean, nullable=False),
)

samplers = Table(
    "samplers",
    metadata,
    Column("sampler_id", Text, primary_key=True),
    Column("session_id", Text, nullable=False, index=True),
    Column("owner", Text, nullable=False),
    Column("base_model", Text, nullable=False),
    Column("model_path", Text),
    Column("model_id", Text),
    Column("seq_id", BigInteger),
    Column("folder", Text, index=True),
    Column("status", String(16), nullable=False, index=True),
    Column("created_at", Double, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("model_id", Text, primary_key=True),
    Column("kind", String(32), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False, index=True),
    Column("status", String(16), nullable=False),
    Column("folder", Text, nullable=False),
    Column("base_model", Text, nullable=False),
    Column("lora", _json(), nullable=False),
    Column("request_id", Text, nullable=False),
    Column("seq_id", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("error", Text),
    Column("public", Boolean, nullable=False),
    Column("user_metadata", _json()),
    Column("created_at", Double, nullable=False),
    Column("completed_at", Double),
    Column("expires_at", Double, index=True),
)

saves = Table(
    "saves",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("model_id", Text, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("name", Text, nullable=False),
    Column("seq_id", BigInteger, nullable=False),
    Column("folder", Text, nullable=False),
    Column("ttl_s", Double),
    Column("user_metadata", _json()),
    Column("created_at", Double, nullable=False),
    Index(None, "model_id", "kind", "name"),
)

keys = Table(
    "keys",
    metadata,
    Column("key_hash", String(64), primary_key=True),
    Column("key_id", Integer, nullable=False),
    Column("name", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("rights", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
    UniqueConstraint("key_id"),
)

traces = Table(
    "traces",
    metadata,
    Column("trace_id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False, index=True),
    Column("turns", Integer, nullable=False),
    Index(None, "owner", "updated_at"),
)

turns = Table(
    "turns",
    metadata,
    Column("trace_id", Text, ForeignKey("traces.trace_id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("parent", Integer),
    Column("parent_sample", Integer),
    Column("read", LargeBinary, nullable=False),
    Column("samples", LargeBinary, nullable=False),
    Column("facts", LargeBinary, nullable=False),
)

settings = Table(
    "settings",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)
