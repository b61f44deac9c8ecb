"""Checkpoints on disk and in the database: begun, completed, found, removed.

Every save has a folder of its own, so the switch to a new one is a write to the database, and a folder is never
changed.

Owns: the checkpoint root. Never touches: what is in a folder; the engine writes it.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec
import structlog
from sqlalchemy import Connection

from palestra.server.core.checkpoints.storage import CheckpointStorage, forget_note, name_of
from palestra.server.core.errors import Refusal, not_found
from palestra.server.core.futures import TrainFuture
from palestra.server.core.owners.quotas import exceeded
from palestra.server.core.owners.usage import day_of
from palestra.server.core.paths import TinkerPath
from palestra.server.core.training.models import TrackedModel
from palestra.store import Store
from palestra.store.errors import CheckpointExists, QuotaExceeded
from palestra.store.queries import checkpoints as rows
from palestra.store.queries.quotas import check_checkpoint_bytes
from palestra.store.queries.samplers import live_samplers
from palestra.store.queries.usage import add_usage
from palestra.store.records import (
    CheckpointKey,
    CheckpointKind,
    CheckpointRow,
    CheckpointStatus,
    PendingSave,
    UsageCounts,
    UsageKey,
)
from palestra.types.engine import EngineFailure, Saved, TrainOutcome
from palestra.util.object_storage import ObjectLost, StorageError

log = structlog.get_logger()
P = ParamSpec("P")
T = TypeVar("T")
UPLOADS = "uploads"
"""Folder for files that clients upload, below that of the checkpoints."""
UPLOAD_S = 3600.0  # an upload without a new part for this time is given up


UPLOAD_AGAIN_S = 2.0
STORAGE_THREADS = 16
SWEEP_STORAGE_S = 3600.0  # a listing of all objects costs money


class CheckpointFiles:
    def __init__(
        self,
        store: Store,
        root: Path,
        *,
        keep_deleted_s: float,
        max_bytes: Callable[[str], int | None] = lambda owner: None,
        write_wait_s: float = 0.0,
        storage: CheckpointStorage | None = None,
    ):
        """`storage`: the root is a cache of what is there. `max_bytes`: how many bytes an owner may keep; None:
        any number."""
        self._store, self.root, self._keep_deleted_s = store, root, keep_deleted_s
        self.max_bytes, self._write_wait_s, self.storage = max_bytes, write_wait_s, storage
        self._doomed: dict[str, float] = {}
        """Folders and stored checkpoints that nothing refers to, and when that was first noticed."""
        self._uploading: set[str] = set()
        """Names of checkpoints that are being stored, which no row may refer to yet."""
        self._threads = ThreadPoolExecutor(STORAGE_THREADS, "storage")
        """For transfers alone: everything else that needs a thread must not wait for a slow storage."""
        self._fetching: dict[str, asyncio.Task[None]] = {}
        """By their folders."""
        self._storage_swept_at = -math.inf

    # Saving

    async def begin(
        self,
        model: TrackedModel,
        path: TinkerPath,
        *,
        seq_id: int,
        request_id: str,
        ttl_s: float | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> str:
        """Records a save and returns its folder. The same request again gets the same folder."""
        save = PendingSave(
            request_id=request_id,
            model_id=path.model_id,
            kind=path.kind,
            name=path.name,
            seq_id=seq_id,
            folder=str(self.folder(path, str(seq_id))),
            created_at=time.time(),
            ttl_s=ttl_s,
            user_metadata=user_metadata,
        )
        limit = self.max_bytes(model.owner)

        def write(c: Connection) -> PendingSave:
            if not rows.is_begun(c, save):
                check_checkpoint_bytes(c, save.key, model.owner, limit)
            return rows.begin_checkpoint(
                c, save, owner=model.owner, base_model=model.base_model, lora=model.lora, overwrite=overwrite
            )

        try:
            return (await self._store.write(write)).folder
        except CheckpointExists as e:
            raise Refusal(400, str(e)) from None
        except QuotaExceeded as e:
            raise exceeded(e) from None

    async def on_saved(self, future: TrainFuture, outcome: TrainOutcome) -> None:
        """Called when a save request has its result."""
        if isinstance(outcome, Saved):
            save = await self._store.read(lambda c: rows.get_save(c, future.request_id))
            if save is not None:
                try:
                    await self.upload(Path(self.locate(save.folder)))
                except StorageError as e:
                    reason = f"the checkpoint could not be stored: {e}"
                    await self._store.write(lambda c: rows.fail_checkpoint(c, future.request_id, error=reason))
                    raise
            now = time.time()

            def write(c: Connection) -> None:
                """A save that was completed before is not counted again."""
                done = rows.complete_checkpoint(c, future.request_id, size_bytes=outcome.size_bytes, now=now)
                if done is not None:
                    key = UsageKey(day_of(now), future.owner, future.model_id)
                    add_usage(c, {key: UsageCounts(checkpoint_bytes=outcome.size_bytes)})

            await self._store.write(write)
        elif isinstance(outcome, EngineFailure):
            await self._store.write(lambda c: rows.fail_checkpoint(c, future.request_id, error=outcome.message))

    async def upload(self, folder: Path) -> None:
        """Stores the files of a checkpoint where others find them, before any row refers to them as complete. Raises
        StorageError if that was not possible for `write_wait_s`, and ObjectLost at once if the files are gone."""
        if self.storage is None:
            return
        self._uploading.add(name_of(folder))
        give_up_at = time.monotonic() + self._write_wait_s
        try:
            while True:
                try:
                    await self._in_storage(self.storage.upload, folder)
                    return
                except ObjectLost:
                    raise
                except StorageError as e:
                    if time.monotonic() > give_up_at:
                        raise
                    log.error("a checkpoint could not be stored; trying again", folder=str(folder), error=str(e))
                    await asyncio.sleep(UPLOAD_AGAIN_S)
        finally:
            self._uploading.discard(name_of(folder))

    def folder(self, path: TinkerPath, tag: str) -> Path:
        return self.root / path.model_id.replace(":", "_") / path.kind.value / f"{path.name}@{tag}"

    def locate(self, folder: str) -> str:
        """Returns where a folder is now: the root may have been moved or copied, together with the state folder, or a
        server elsewhere has written it."""
        here = self.root / name_of(folder)
        return folder if not here.is_dir() and Path(folder).is_dir() else str(here)

    # Finding

    async def find(self, path: TinkerPath, owner: str, *, own: bool = False) -> CheckpointRow:
        """Returns a checkpoint that is complete, not expired, and this owner's or, unless `own`, public; all others do
        not exist for the caller."""
        key = key_of(path)
        found = await self._store.read(lambda c: rows.get_checkpoint(c, key))
        if (
            found is None
            or found.status != CheckpointStatus.COMPLETED
            or not (found.owner == owner or (found.public and not own))
            or (found.expires_at is not None and found.expires_at <= time.time())
        ):
            raise not_found("checkpoint", str(path))
        return msgspec.structs.replace(found, folder=self.locate(found.folder))

    async def open(self, path: TinkerPath, owner: str) -> CheckpointRow:
        """Returns a checkpoint as `find` does, whose folder is on this disk."""
        found = await self.find(path, owner)
        try:
            await self.fetch([found.folder])
        except ObjectLost as e:
            log.error("the files of a checkpoint are gone", path=str(path), error=str(e))
            raise not_found("checkpoint", str(path)) from e
        except StorageError as e:
            raise Refusal(503, f"the checkpoint cannot be fetched now: {e}", retry_after_s=UPLOAD_AGAIN_S) from e
        return found

    async def claim(self, owner: str) -> None:
        """Makes sure that the storage, if there is one, belongs to this server's database. Raises StorageError."""
        if self.storage is not None:
            await self._in_storage(self.storage.claim, f"{owner} checkpoints")

    async def fetch(self, folders: Collection[str]) -> None:
        """Makes sure that folders are on this disk. Raises StorageError."""
        storage = self.storage
        if storage is not None:
            await asyncio.gather(*(self._fetch(storage, folder) for folder in folders))

    async def _fetch(self, storage: CheckpointStorage, folder: str) -> None:
        """All who wait for one folder wait for the same transfer, which goes on when one of them is cancelled."""
        task = self._fetching.get(folder)
        if task is None:
            task = self._fetching[folder] = asyncio.create_task(self._in_storage(storage.fetch, Path(folder)))
            task.add_done_callback(lambda _: self._fetching.pop(folder))
        await asyncio.shield(task)

    async def _in_storage(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))

    async def fetch_for_replay(self, folders: Collection[str]) -> None:
        """Fetches what a replay or a restored sampler reads. One that is gone fails there. Raises StorageError if the
        storage cannot be reached."""
        for folder in folders:
            try:
                await self.fetch([self.locate(folder)])
            except ObjectLost as e:
                log.error("the files of a checkpoint are gone", folder=folder, error=str(e))

    async def delete(self, path: TinkerPath, owner: str) -> None:
        await self.find(path, owner, own=True)
        await self._store.write(lambda c: rows.delete_checkpoint(c, key_of(path)))

    # Cleaning

    async def sweep(self, to_read: set[str]) -> None:
        """Deletes expired checkpoints, and folders that nothing has referred to for a while. `to_read` are folders that
        requests name which wait, or would be repeated after a crash."""
        now = time.time()
        for expired in await self._store.read(lambda c: rows.expired_checkpoints(c, now)):
            await self._store.write(lambda c, key=expired.key: rows.delete_checkpoint(c, key))
        needed = await self._store.read(rows.checkpoint_folders)
        in_use = to_read | {s.folder for s in await self._store.read(live_samplers) if s.folder is not None}
        in_use = {self.locate(folder) for folder in in_use}
        needed = {self.locate(folder) for folder in needed} | in_use
        for folder in await asyncio.to_thread(self._folders):
            if self._is_over(folder, folder in needed or name_of(folder) in self._uploading, now):
                log.info("removing a checkpoint folder", folder=folder)
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                forget_note(Path(folder))
        await asyncio.to_thread(self._sweep_uploads, now)
        if self.storage is not None:
            await self._sweep_storage(self.storage, needed, in_use, now)

    def _is_over(self, name: str, is_needed: bool, now: float) -> bool:
        """Whether nothing has referred to a folder or stored checkpoint for long enough."""
        if is_needed:
            self._doomed.pop(name, None)
        elif now - self._doomed.setdefault(name, now) > self._keep_deleted_s:
            del self._doomed[name]
            return True
        return False

    async def _sweep_storage(self, storage: CheckpointStorage, needed: set[str], in_use: set[str], now: float) -> None:
        """Stores what was saved before there was a storage, makes room on this disk, and deletes what is not needed."""
        folders = [Path(folder) for folder in await asyncio.to_thread(self._folders)]
        for folder in folders:
            if str(folder) in needed and not storage.is_stored(folder):
                try:
                    await self.upload(folder)
                except ObjectLost as e:  # the others are stored all the same
                    log.error("a checkpoint could not be stored", folder=str(folder), error=str(e))
        await self._in_storage(storage.evict, folders, in_use)
        if now - self._storage_swept_at < min(SWEEP_STORAGE_S, self._keep_deleted_s):
            return
        self._storage_swept_at = now
        names = {name_of(folder) for folder in needed} | self._uploading
        for name in await self._in_storage(storage.names):
            if self._is_over(f"stored {name}", name in names, now):
                log.info("removing a stored checkpoint", name=name)
                await self._in_storage(storage.delete, name)

    def _sweep_uploads(self, now: float) -> None:
        for folder in (self.root / UPLOADS).glob("*"):
            if now - max(one.stat().st_mtime for one in (folder, *folder.iterdir())) > UPLOAD_S:
                shutil.rmtree(folder, ignore_errors=True)

    def _folders(self) -> list[str]:
        """Returns folders whose names have our form: the root may contain other things."""
        kinds = [kind.value for kind in CheckpointKind]
        return [str(f) for kind in kinds for f in self.root.glob(f"*_train_*/{kind}/*@*") if f.is_dir()]

    async def settle_after_restart(self, known_requests: set[str], absent_models: set[str]) -> None:
        """Deletes saves that were recorded but never sent to the engine: no client was told that they would happen."""
        for save in await self._store.read(rows.saves_under_way):
            if save.request_id not in known_requests and save.model_id not in absent_models:
                await self._store.write(
                    lambda c, r=save.request_id: rows.fail_checkpoint(
                        c, r, error="the server stopped before the save began"
                    )
                )


def key_of(path: TinkerPath) -> CheckpointKey:
    return CheckpointKey(path.model_id, path.kind, path.name)
