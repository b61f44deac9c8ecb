"""Moves the entries of the log of episodes into their tables and removes the log."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

# Entries are lists of changes in MessagePack. Each change is a list that begins with its kind, followed by the values
# of a row in this order; a deleted row is the name of its kind and its key.
KINDS = ["RunRow", "GroupRow", "EpisodeRow", "Tombstone"]
GONE = 4
TABLES = ["episode_runs", "episode_groups", "episodes", "episode_tombstones"]
KEYS = [["owner", "run"], ["owner", "run", "group_id"], ["episode_id"], ["name"]]
COLUMNS = [
    [
        "owner",
        "run",
        "settings",
        "model",
        "version",
        "is_paused",
        "committed",
        "delivered",
        "registered",
        "created_at",
        "is_staging",
    ],
    ["owner", "run", "group_id", "spec", "state", "reason", "number", "serial", "made", "created_at"],
    [
        "episode_id",
        "owner",
        "run",
        "group_id",
        "index",
        "seed",
        "state",
        "attempt",
        "strikes",
        "lost",
        "created_at",
        "not_before",
        "client_id",
        "claim_id",
        "claimed_at",
        "lease_s",
        "ended_at",
        "version",
        "oldest_version",
        "calls",
        "sampled",
        "losses",
        "result",
    ],
    ["name", "owner", "attempt", "digest", "until"],
]


def upgrade() -> None:
    conn = op.get_bind()
    log = sa.table("episode_log", sa.column("number"), sa.column("entry"))
    for entry in conn.execute(sa.select(log.c.entry).order_by(log.c.number)).scalars().all():
        for kind, *values in msgspec.msgpack.decode(entry):
            if kind == GONE:
                name, key = values
                _remove(conn, KINDS.index(name), [key] if isinstance(key, str) else key)
            else:
                row = dict(zip(COLUMNS[kind], map(_stored, values), strict=False))
                _remove(conn, kind, [row[name] for name in KEYS[kind]])
                conn.execute(_table(kind).insert().values(row))
    op.drop_table("episode_log")


def _table(kind: int) -> sa.TableClause:
    return sa.table(TABLES[kind], *map(sa.column, COLUMNS[kind]))


def _remove(conn: sa.Connection, kind: int, key: list[Any]) -> None:
    table = _table(kind)
    conn.execute(table.delete().where(*(table.c[name] == part for name, part in zip(KEYS[kind], key, strict=True))))


def _stored(value: object) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value
