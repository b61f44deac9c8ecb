"""Quotas: what each owner may have at most, and what holds for all other owners."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from sqlalchemy import Connection, delete, func, insert, select

from palestra.store.errors import QuotaExceeded
from palestra.store.queries.models import get_model, insert_model
from palestra.store.records import ALL_OWNERS, LIMITS, LOADED, CheckpointKey, CheckpointStatus, ModelRow, Quota
from palestra.store.rows import fetch_all, fetch_one
from palestra.store.tables import checkpoints, models, saves
from palestra.store.tables import quotas as t

PASSING = ("pending_samples", "pending_bytes")
"""Limits that pass by waiting; of 0 they never would."""


def set_quota(conn: Connection, owner: str, limits: Mapping[str, int | None]) -> Quota:
    """Changes the limits that are named; None removes one. Raises ValueError if one is too small."""
    for name, limit in limits.items():
        least = 1 if name in PASSING else 0
        if limit is not None and limit < least:
            raise ValueError(f"{name}: the least is {least}")
    stored = fetch_one(conn, Quota, select(t).where(t.c.owner == owner)) or Quota(owner=owner)
    quota = msgspec.structs.replace(stored, **limits)
    remove_quota(conn, owner)
    if any(getattr(quota, name) is not None for name in LIMITS):
        conn.execute(insert(t).values(**msgspec.to_builtins(quota)))
    return quota


def remove_quota(conn: Connection, owner: str) -> bool:
    return conn.execute(delete(t).where(t.c.owner == owner)).rowcount > 0


def list_quotas(conn: Connection) -> list[Quota]:
    return fetch_all(conn, Quota, select(t).order_by(t.c.owner))


def effective_quota(quotas: Mapping[str, Quota], owner: str) -> Quota:
    """Returns the limits that hold for an owner: its own, and where it has none those for all owners."""
    own, common = quotas.get(owner, Quota(owner=owner)), quotas.get(ALL_OWNERS, Quota(owner=ALL_OWNERS))
    merged = {name: _first(getattr(own, name), getattr(common, name)) for name in LIMITS}
    return Quota(owner=owner, **merged)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


# What holds for rows, in the transaction that adds them


def insert_model_within(conn: Connection, model: ModelRow, limit: int | None) -> ModelRow:
    """Like `insert_model`, but raises QuotaExceeded if its owner has as many models in training as the limit."""
    if limit is not None and get_model(conn, model.model_id) is None:
        loaded = models.c.owner == model.owner, models.c.status.in_(LOADED)
        count = conn.execute(select(func.count()).select_from(models).where(*loaded)).scalar_one()
        if count >= limit:
            raise QuotaExceeded(
                f"{model.owner!r} has {count} models in training, and its quota allows {limit}; unload one or finish "
                f"its session, or raise the quota: palestra quota set {model.owner} models={limit + 1}"
            )
    return insert_model(conn, model)


def stored_bytes(conn: Connection) -> dict[str, int]:
    """Returns the bytes of checkpoints that each owner keeps."""
    kept = checkpoints.c.status == CheckpointStatus.COMPLETED
    query = select(checkpoints.c.owner, func.sum(checkpoints.c.size_bytes)).where(kept).group_by(checkpoints.c.owner)
    return {owner: int(size) for owner, size in conn.execute(query)}


def check_checkpoint_bytes(
    conn: Connection, key: CheckpointKey, owner: str, limit: int | None, *, size_bytes: int | None = None
) -> None:
    """Raises QuotaExceeded if another checkpoint would pass the limit. If its size is not known yet, it is taken to be
    that of the largest one of its model and kind; saves under way count with the same size."""
    if limit is None:
        return
    c = checkpoints.c
    theirs = (c.owner == owner) & (c.status == CheckpointStatus.COMPLETED)
    same = (c.model_id == key.model_id) & (c.kind == key.kind)
    kept = select(func.coalesce(func.sum(c.size_bytes), 0)).where(theirs, ~(same & (c.name == key.name)))
    used = int(conn.execute(kept).scalar_one())
    if size_bytes is None:
        like = select(func.coalesce(func.max(c.size_bytes), 0)).where(theirs, same)
        each = int(conn.execute(like).scalar_one())
        under_way = select(func.count()).select_from(saves).join(models, models.c.model_id == saves.c.model_id)
        size_bytes = each * (1 + conn.execute(under_way.where(models.c.owner == owner)).scalar_one())
    if used >= limit or used + size_bytes > limit:
        raise QuotaExceeded(
            f"the checkpoints of {owner!r} have {used:,} bytes, and its quota allows {limit:,}; delete some of them, "
            f"or raise the quota: palestra quota set {owner} checkpoint_bytes=BYTES"
        )
