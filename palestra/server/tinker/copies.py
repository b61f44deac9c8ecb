"""Copies of checkpoints: the same files under the path of a run of their own, which cannot be trained.

Files are linked if the disk allows it, so a copy takes no space; the folder of a checkpoint never changes, so both may
share them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from sqlalchemy import Connection

from palestra.server.core.checkpoints.files import CheckpointFiles, key_of
from palestra.server.core.errors import Refusal, not_found
from palestra.server.core.owners.callers import Caller
from palestra.server.core.owners.quotas import exceeded
from palestra.server.core.paths import ModelId, TinkerPath
from palestra.server.core.sessions import TinkerSessions
from palestra.server.tinker.downloads import files_in
from palestra.server.tinker.schemas_rest import CopyWeightsRequest
from palestra.store import Store
from palestra.store.errors import CheckpointExists, QuotaExceeded
from palestra.store.queries import checkpoints as checkpoint_rows
from palestra.store.queries import models as model_rows
from palestra.store.queries import sessions as session_rows
from palestra.store.queries.quotas import check_checkpoint_bytes
from palestra.store.records import CheckpointRow, ModelRow, ModelStatus, SessionRow, SessionStatus
from palestra.util.atomic_files import sync
from palestra.util.json_types import JsonObject


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """A request for a copy. A repeated request has the same `request_id` and the same target."""

    source: TinkerPath
    target: TinkerPath
    request_id: str
    ttl_s: int | None
    project_id: str | None
    """The project of the session that is made for the copy; None: the copy goes into the target's own session, which
    exists."""


class CheckpointCopies:
    def __init__(self, store: Store, checkpoints: CheckpointFiles, sessions: TinkerSessions, secret: str):
        self._store, self._checkpoints, self._sessions, self._secret = store, checkpoints, sessions, secret

    async def copy(self, caller: Caller, request: CopyWeightsRequest, idempotency_key: str | None) -> str:
        """Returns the path of the copy."""
        copy = self._plan(caller, request, idempotency_key)
        original = await self._checkpoints.open(copy.source, caller.owner)
        key = key_of(copy.target)
        there = await self._store.read(lambda c: checkpoint_rows.get_checkpoint(c, key))
        if there is not None and there.request_id == copy.request_id:
            return str(copy.target)
        folder = self._checkpoints.folder(copy.target, f"copy-{secrets.token_hex(8)}")
        try:
            await asyncio.to_thread(_share_files, original.folder, folder)
            await self._checkpoints.upload(folder)
            limit = self._checkpoints.max_bytes(caller.owner)
            stored = await self._store.write(lambda c: _write(c, copy, original, caller.owner, str(folder), limit))
        except BaseException as e:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            if isinstance(e, CheckpointExists):
                raise Refusal(400, str(e)) from None
            if isinstance(e, QuotaExceeded):
                raise exceeded(e) from None
            if isinstance(e, FileNotFoundError):
                raise not_found("checkpoint", str(copy.source)) from e
            raise
        if stored.folder != str(folder):  # the same request arrived twice at once
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return str(copy.target)

    def _plan(self, caller: Caller, request: CopyWeightsRequest, idempotency_key: str | None) -> CheckpointCopy:
        source = TinkerPath.parse(request.source_path)
        fingerprint = [caller.owner, str(source), request.ttl_seconds, request.destination_project_id]
        if request.session_id is not None:
            if self._sessions.find(request.session_id, caller.owner) is None:
                raise Refusal(404, f"no such session, or it has ended: {request.session_id[:200]}")
            run = ModelId(request.session_id, request.model_seq_id or 0)
            fingerprint += [str(run)]
        else:
            fingerprint += [idempotency_key or secrets.token_hex(16), self._secret]
            run = ModelId(_digest(fingerprint)[:32], 0)
        target = TinkerPath(str(run), source.kind, source.name)
        return CheckpointCopy(
            source, target, f"copy:{_digest(fingerprint)}", request.ttl_seconds, request.destination_project_id
        )


def _digest(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _share_files(source: str, folder: Path) -> None:
    """Links or copies the files, completely or not at all: nothing refers to the folder before all of it is there."""
    files = files_in(source)
    if not files:
        raise FileNotFoundError(source)
    for name, file in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, target)
        except OSError:  # no links on this file system, or too many of this file
            shutil.copyfile(file, target)
            sync(target)
    for directory in (*(p for p in folder.rglob("*") if p.is_dir()), folder, *list(folder.parents)[:2]):
        sync(directory)


def _write(
    conn: Connection, copy: CheckpointCopy, original: CheckpointRow, owner: str, folder: str, max_bytes: int | None
) -> CheckpointRow:
    """Writes session, run and checkpoint in one transaction."""
    now = time.time()
    target = msgspec.structs.replace(original, model_id=copy.target.model_id, owner=owner, created_at=now)
    source_run = model_rows.get_model(conn, copy.source.model_id)
    is_new = add_detached_run(
        conn,
        target,
        project_id=copy.project_id,
        display_name=None if copy.project_id is None else f"copy of {copy.source}",
        user_metadata=source_run.user_metadata if source_run else None,
    )
    there = checkpoint_rows.get_checkpoint(conn, key_of(copy.target))
    if not is_new and (there is None or there.request_id != copy.request_id):
        raise CheckpointExists(f"{copy.target.model_id} already exists; use the next model_seq_id")
    if there is None:
        check_checkpoint_bytes(conn, key_of(copy.target), owner, max_bytes, size_bytes=original.size_bytes)
    stored = checkpoint_rows.copy_checkpoint(
        conn,
        key_of(copy.source),
        key_of(copy.target),
        owner=owner,
        folder=folder,
        request_id=copy.request_id,
        ttl_s=copy.ttl_s,
        now=now,
    )
    if stored is None:
        raise FileNotFoundError(original.folder)
    return stored


def add_detached_run(
    conn: Connection,
    checkpoint: CheckpointRow,
    *,
    project_id: str | None,
    display_name: str | None,
    user_metadata: JsonObject | None = None,
) -> bool:
    """Adds the run of a checkpoint that no model here has saved, and with a `display_name` also its session, which has
    ended. Returns whether the run is new."""
    run, now = ModelId.parse(checkpoint.model_id), checkpoint.created_at
    if display_name is not None:
        session = SessionRow(
            session_id=run.session_id,
            owner=checkpoint.owner,
            created_at=now,
            last_heartbeat_at=now,
            status=SessionStatus.FINISHED,
            project_id=project_id,
            display_name=display_name,
            finish_reason="success",
        )
        session_rows.insert_session(conn, session)
    model = ModelRow(
        model_id=checkpoint.model_id,
        session_id=run.session_id,
        owner=checkpoint.owner,
        base_model=checkpoint.base_model,
        lora=checkpoint.lora,
        created_at=now,
        last_request_at=now,
        user_metadata=user_metadata,
        status=ModelStatus.UNLOADED,
    )
    return model_rows.insert_model(conn, model) == model
