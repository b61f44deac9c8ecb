"""The tables, as the newest migration leaves them. Their rows are the records of `records.py`, field by field."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    true,
)

# Constraints need names, otherwise a migration cannot refer to them.
NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}

metadata = MetaData(naming_convention=NAMES)


def _json() -> JSON:
    return JSON(none_as_null=True)


class JsonText(TypeDecorator[Any]):
    """A column of text that holds JSON."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: object, dialect: Dialect) -> str:
        return msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return msgspec.json.decode(value or "null")


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
    Column("usage_seq", BigInteger, nullable=False, server_default="-1"),
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
    Column("last_used_at", Double),
    Column("expires_at", Double),
    Column("old_hash", String(64), index=True),
    Column("old_until", Double),
    UniqueConstraint("key_id"),
)

quotas = Table(
    "quotas",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("models", BigInteger),
    Column("pending_samples", BigInteger),
    Column("pending_bytes", BigInteger),
    Column("tokens_per_day", BigInteger),
    Column("checkpoint_bytes", BigInteger),
    Column("picture_bytes", BigInteger),
)

usage = Table(
    "usage",
    metadata,
    Column("day", String(10), primary_key=True),
    Column("owner", Text, primary_key=True),
    Column("run", Text, primary_key=True),
    Column("prompts", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("sampled_tokens", BigInteger, nullable=False),
    Column("trained_tokens", BigInteger, nullable=False),
    Column("checkpoint_bytes", BigInteger, nullable=False),
    Column("engine_s", Double, nullable=False),
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
    Column("origin", Text, index=True),
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

answers = Table(
    "answers",
    metadata,
    Column("trace_id", Text, ForeignKey("traces.trace_id"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("sample", Integer, primary_key=True, autoincrement=False),
    Column("name", LargeBinary, nullable=False, index=True),
    Column("thoughts", LargeBinary, nullable=False),
)

# Turns of attempts at episodes whose answers are not known to have reached their client. There are few of them, and
# none where no call is running.
unanswered_turns = Table(
    "unanswered_turns",
    metadata,
    Column("trace_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
)

responses = Table(
    "responses",
    metadata,
    Column("response_id", Text, primary_key=True),
    Column("trace_id", Text, nullable=False, index=True),
    Column("number", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

aliases = Table(
    "aliases",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("model", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
)

episode_runs = Table(
    "episode_runs",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("run", Text, primary_key=True),
    Column("settings", JsonText, nullable=False),
    Column("model", Text),
    Column("version", Integer, nullable=False),
    Column("is_paused", Boolean, nullable=False),
    Column("committed", BigInteger, nullable=False),
    Column("delivered", BigInteger, nullable=False),
    Column("registered", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("is_staging", Boolean, nullable=False, server_default=true()),
)

episode_groups = Table(
    "episode_groups",
    metadata,
    Column("owner", Text, primary_key=True),
    Column("run", Text, primary_key=True),
    Column("group_id", Text, primary_key=True),
    Column("spec", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("number", BigInteger),
    Column("serial", BigInteger, nullable=False),
    Column("made", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
)

# This table is only ever read as a whole: the server looks things up in memory.
episodes = Table(
    "episodes",
    metadata,
    Column("episode_id", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("group_id", Text, nullable=False),
    Column("index", Integer, nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("strikes", Integer, nullable=False),
    Column("lost", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("not_before", Double, nullable=False),
    Column("client_id", Text, nullable=False),
    Column("claim_id", Text, nullable=False),
    Column("claimed_at", Double),
    Column("lease_s", Double, nullable=False),
    Column("ended_at", Double),
    Column("version", Integer, nullable=False),
    Column("oldest_version", Integer),
    Column("calls", Integer, nullable=False),
    Column("sampled", BigInteger, nullable=False, server_default="0"),
    Column("losses", JsonText, nullable=False),
    Column("result", Text),
)

episode_tombstones = Table(
    "episode_tombstones",
    metadata,
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("until", Double, nullable=False),
)

settings = Table(
    "settings",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

journal_records = Table(
    "journal_records",
    metadata,
    Column("journal", String(16), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("record", LargeBinary, nullable=False),
)

snapshot_copies = Table(
    "snapshot_copies",
    metadata,
    Column("item", Text, primary_key=True),
    Column("base_model", Text, nullable=False),
    Column("file", Text, nullable=False),
    Column("seq_id", BigInteger, nullable=False),
    Column("object", Text, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
)
