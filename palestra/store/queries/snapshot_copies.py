"""Copies of snapshots in object storage: what another server fetches when it takes over."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import Connection, delete, insert, select

from palestra.store.records import LOADED, SamplerStatus, SnapshotCopy
from palestra.store.rows import fetch_all, fetch_one
from palestra.store.tables import models, samplers
from palestra.store.tables import snapshot_copies as t


def put_copy(conn: Connection, copy: SnapshotCopy) -> SnapshotCopy | None:
    """Stores where the copy of a model or sampler is, in place of an earlier one, which is returned."""
    earlier = fetch_one(conn, SnapshotCopy, select(t).where(t.c.item == copy.item))
    conn.execute(delete(t).where(t.c.item == copy.item))
    conn.execute(insert(t).values(**msgspec.to_builtins(copy)))
    return earlier


def list_copies(conn: Connection) -> list[SnapshotCopy]:
    return fetch_all(conn, SnapshotCopy, select(t).order_by(t.c.item))


def take_stale_copies(conn: Connection) -> list[SnapshotCopy]:
    """Removes and returns the copies of models that were unloaded and samplers that were dropped."""
    living = select(models.c.model_id).where(models.c.status.in_(LOADED))
    living = living.union_all(select(samplers.c.sampler_id).where(samplers.c.status == SamplerStatus.LIVE))
    stale = fetch_all(conn, SnapshotCopy, select(t).where(t.c.item.not_in(living)))
    _delete(conn, [copy.item for copy in stale])
    return stale


def _delete(conn: Connection, items: Collection[str]) -> None:
    conn.execute(delete(t).where(t.c.item.in_(items)))
