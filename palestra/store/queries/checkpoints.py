"""Checkpoints: what a tinker:// path refers to, and the saves under way.

Owns: names, overwriting, expiry. Never touches: files; it only says which folder is no longer referred to.

A save is a row of its own from `begin_checkpoint` until it completes or fails. Until then, the checkpoint that it will
replace still refers to its old folder; the switch is one write.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, union_all, update

from palestra.store.errors import CheckpointExists
from palestra.store.records import (
    CheckpointKey,
    CheckpointKind,
    CheckpointRow,
    CheckpointStatus,
    Page,
    PendingSave,
    SaveCompletion,
)
from palestra.store.rows import fetch_all, fetch_one, fetch_page
from palestra.store.tables import checkpoints as t
from palestra.store.tables import saves
from palestra.types import LoraConfig

# Saving


def is_begun(conn: Connection, save: PendingSave) -> bool:
    """Whether the request of a save is known already."""
    known = (select(one.c.request_id).where(one.c.request_id == save.request_id) for one in (saves, t))
    return conn.execute(union_all(*known)).first() is not None


def begin_checkpoint(
    conn: Connection, save: PendingSave, *, owner: str, base_model: str, lora: LoraConfig, overwrite: bool = False
) -> PendingSave:
    """Returns the save as it is stored: this one, or an earlier one of the same request. Raises `CheckpointExists` if
    the name is taken."""
    earlier = fetch_one(conn, PendingSave, select(saves).where(saves.c.request_id == save.request_id))
    if earlier is not None:
        return earlier
    there = get_checkpoint(conn, save.key)
    if there is not None and there.request_id == save.request_id and there.status == CheckpointStatus.COMPLETED:
        return msgspec.structs.replace(save, folder=there.folder)
    has_expired = there is not None and there.expires_at is not None and there.expires_at <= save.created_at
    if there is not None and there.status != CheckpointStatus.FAILED and not overwrite and not has_expired:
        raise CheckpointExists(f"{save.key.path} already exists; save with overwrite, or under another name")

    conn.execute(insert(saves).values(**msgspec.to_builtins(save)))
    if there is None:
        pending = CheckpointRow(
            model_id=save.model_id,
            kind=save.kind,
            name=save.name,
            owner=owner,
            status=CheckpointStatus.PENDING,
            folder=save.folder,
            base_model=base_model,
            lora=lora,
            request_id=save.request_id,
            seq_id=save.seq_id,
            created_at=save.created_at,
            user_metadata=save.user_metadata,
        )
        conn.execute(insert(t).values(**msgspec.to_builtins(pending)))
    elif there.status == CheckpointStatus.FAILED:
        _change(conn, save.key, status=CheckpointStatus.PENDING, request_id=save.request_id, error=None)
    return save


def complete_checkpoint(conn: Connection, request_id: str, *, size_bytes: int, now: float) -> SaveCompletion | None:
    """Makes the path refer to the new folder from now on. Returns None if no such save is under way, which means that
    it has been completed before."""
    save = _take_save(conn, request_id)
    if save is None:
        return None
    there = _must_get(conn, save.key)
    was_completed = there.status == CheckpointStatus.COMPLETED
    if was_completed and there.seq_id > save.seq_id:  # a later request was faster
        return SaveCompletion(checkpoint=there, obsolete_folder=save.folder)
    _change(
        conn,
        save.key,
        status=CheckpointStatus.COMPLETED,
        folder=save.folder,
        request_id=request_id,
        seq_id=save.seq_id,
        size_bytes=size_bytes,
        error=None,
        user_metadata=save.user_metadata,
        created_at=save.created_at,
        completed_at=now,
        expires_at=None if save.ttl_s is None else now + save.ttl_s,
    )
    obsolete = there.folder if was_completed and there.folder != save.folder else None
    return SaveCompletion(checkpoint=_must_get(conn, save.key), obsolete_folder=obsolete)


def fail_checkpoint(conn: Connection, request_id: str, *, error: str) -> PendingSave | None:
    """Removes a save that has failed; a checkpoint that it would have replaced stays as it is. Returns None if no such
    save is under way."""
    save = _take_save(conn, request_id)
    if save is None:
        return None
    there = _must_get(conn, save.key)
    if there.status == CheckpointStatus.PENDING and not _is_being_saved(conn, save.key):
        _change(conn, save.key, status=CheckpointStatus.FAILED, error=error)
    return save


def get_save(conn: Connection, request_id: str) -> PendingSave | None:
    """Returns the save of a request, while it is under way."""
    return fetch_one(conn, PendingSave, select(saves).where(saves.c.request_id == request_id))


def saves_under_way(conn: Connection) -> list[PendingSave]:
    """Returns the saves under way, oldest first. After a crash, those whose request is not in the journal will never
    end."""
    return fetch_all(conn, PendingSave, select(saves).order_by(saves.c.created_at, saves.c.seq_id))


def copy_checkpoint(
    conn: Connection,
    source: CheckpointKey,
    target: CheckpointKey,
    *,
    owner: str,
    folder: str,
    request_id: str,
    ttl_s: float | None,
    now: float,
) -> CheckpointRow | None:
    """Stores a completed checkpoint under another path; `folder` holds the copied files. Returns None if the source
    does not exist."""
    there = get_checkpoint(conn, target)
    if there is not None:
        if there.request_id == request_id:
            return there
        raise CheckpointExists(f"{target.path} already exists")
    original = get_checkpoint(conn, source)
    if original is None or original.status != CheckpointStatus.COMPLETED:
        return None
    copy = msgspec.structs.replace(
        original,
        model_id=target.model_id,
        kind=target.kind,
        name=target.name,
        owner=owner,
        folder=folder,
        request_id=request_id,
        public=False,
        created_at=now,
        completed_at=now,
        expires_at=None if ttl_s is None else now + ttl_s,
    )
    return add_checkpoint(conn, copy)


def add_checkpoint(conn: Connection, row: CheckpointRow) -> CheckpointRow:
    """Stores a checkpoint whose files are complete already."""
    conn.execute(insert(t).values(**msgspec.to_builtins(row)))
    return row


# Finding


def get_checkpoint(conn: Connection, key: CheckpointKey) -> CheckpointRow | None:
    return fetch_one(conn, CheckpointRow, select(t).where(_is(key)))


def list_checkpoints(
    conn: Connection,
    *,
    owner: str | None = None,
    model_id: str | None = None,
    alive_at: float | None = None,
    limit: int | None = None,
    offset: int = 0,
) -> Page[CheckpointRow]:
    """Returns completed checkpoints, newest first; without `owner` or `model_id` those of all owners or models.
    `alive_at` leaves out those that have expired by then."""
    query = select(t).where(t.c.status == CheckpointStatus.COMPLETED)
    if alive_at is not None:
        query = query.where(is_alive(alive_at))
    if owner is not None:
        query = query.where(t.c.owner == owner)
    if model_id is not None:
        query = query.where(t.c.model_id == model_id)
    query = query.order_by(t.c.created_at.desc(), t.c.model_id, t.c.kind, t.c.name)
    return fetch_page(conn, CheckpointRow, query, limit=limit, offset=offset)


def last_checkpoints(
    conn: Connection,
    model_ids: Collection[str],
    kind: CheckpointKind = CheckpointKind.WEIGHTS,
    *,
    visible_to: str | None = None,
    alive_at: float | None = None,
) -> dict[str, CheckpointRow]:
    """Returns the newest completed checkpoint of each model that has one. `visible_to` names an owner; of other owners
    only public checkpoints are considered."""
    condition = (t.c.model_id.in_(model_ids)) & (t.c.kind == kind) & (t.c.status == CheckpointStatus.COMPLETED)
    if visible_to is not None:
        condition &= (t.c.owner == visible_to) | t.c.public
    if alive_at is not None:
        condition &= is_alive(alive_at)
    newest_first = (t.c.created_at.desc(), t.c.seq_id.desc())
    place = func.row_number().over(partition_by=t.c.model_id, order_by=newest_first).label("place")
    ranked = select(t, place).where(condition).subquery()
    query = select(*(ranked.c[column.name] for column in t.c)).where(ranked.c.place == 1)
    return {checkpoint.model_id: checkpoint for checkpoint in fetch_all(conn, CheckpointRow, query)}


def expired_checkpoints(conn: Connection, now: float) -> list[CheckpointRow]:
    expired = (t.c.expires_at <= now) & (t.c.status == CheckpointStatus.COMPLETED)
    return fetch_all(conn, CheckpointRow, select(t).where(expired).order_by(t.c.expires_at))


def checkpoint_folders(conn: Connection) -> set[str]:
    """Returns the folders that any path or save refers to. Other folders below the checkpoint root were left behind by
    a crash."""
    return set(conn.execute(union_all(select(t.c.folder), select(saves.c.folder))).scalars())


# Changing


def delete_checkpoint(conn: Connection, key: CheckpointKey) -> CheckpointRow | None:
    """Deletes a path and returns its row, so that the caller can delete the folder. A save under way continues and
    appears when it is done."""
    there = get_checkpoint(conn, key)
    if there is None or there.status == CheckpointStatus.PENDING:
        return None
    if _is_being_saved(conn, key):
        _change(conn, key, status=CheckpointStatus.PENDING, size_bytes=0, expires_at=None)
    else:
        conn.execute(delete(t).where(_is(key)))
    return there


def publish_checkpoint(conn: Connection, key: CheckpointKey, *, public: bool) -> bool:
    """Makes a checkpoint public or private. Returns False if there is no completed checkpoint."""
    return _change_completed(conn, key, public=public)


def set_ttl(conn: Connection, key: CheckpointKey, ttl_s: float | None, *, now: float) -> bool:
    """Sets the time to live, counted from now; None keeps the checkpoint until it is deleted. Returns False if there is
    no completed checkpoint."""
    return _change_completed(conn, key, expires_at=None if ttl_s is None else now + ttl_s)


def is_alive(now: float) -> ColumnElement[bool]:
    return t.c.expires_at.is_(None) | (t.c.expires_at > now)


def _is(key: CheckpointKey) -> ColumnElement[bool]:
    return (t.c.model_id == key.model_id) & (t.c.kind == key.kind) & (t.c.name == key.name)


def _change(conn: Connection, key: CheckpointKey, **values: object) -> None:
    conn.execute(update(t).where(_is(key)).values(**values))


def _change_completed(conn: Connection, key: CheckpointKey, **values: object) -> bool:
    completed = _is(key) & (t.c.status == CheckpointStatus.COMPLETED)
    return conn.execute(update(t).where(completed).values(**values)).rowcount > 0


def _must_get(conn: Connection, key: CheckpointKey) -> CheckpointRow:
    checkpoint = get_checkpoint(conn, key)
    assert checkpoint is not None, f"a save of {key.path} without its checkpoint"
    return checkpoint


def _take_save(conn: Connection, request_id: str) -> PendingSave | None:
    save = get_save(conn, request_id)
    if save is not None:
        conn.execute(delete(saves).where(saves.c.request_id == request_id))
    return save


def _is_being_saved(conn: Connection, key: CheckpointKey) -> bool:
    same = (saves.c.model_id == key.model_id) & (saves.c.kind == key.kind) & (saves.c.name == key.name)
    return conn.execute(select(saves.c.request_id).where(same).limit(1)).first() is not None
