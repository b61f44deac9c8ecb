"""Checkpoints on disk and in the database: begun, completed, found, removed.

Every save has a folder of its own, so the switch to a new one is a write to the database, and a folder is never
changed.

Owns: the checkpoint root. Never touches: what is in a folder; the engine writes it.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import msgspec
import structlog

from palestra.server.core.errors import Refusal, not_found
from palestra.server.core.futures import TrainFuture
from palestra.server.core.models import TrackedModel
from palestra.server.core.paths import TinkerPath
from palestra.store import Store
from palestra.store import checkpoints as rows
from palestra.store.errors import CheckpointExists
from palestra.store.records import CheckpointKey, CheckpointKind, CheckpointRow, CheckpointStatus, PendingSave
from palestra.store.samplers import live_samplers
from palestra.types.engine import EngineFailure, Saved, TrainOutcome

log = structlog.get_logger()
UPLOADS = "uploads"
"""Folder for files that clients upload, below that of the checkpoints."""
UPLOAD_S = 3600.0  # after this time without a new part nobody goes on with an upload


class CheckpointFiles:
    def __init__(self, store: Store, root: Path, *, keep_deleted_s: float):
        self._store, self.root, self._keep_deleted_s = store, root, keep_deleted_s
        self._doomed: dict[str, float] = {}
        """Folders that nothing refers to, and when that was first noticed."""

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
        try:
            stored = await self._store.write(
                lambda c: rows.begin_checkpoint(
                    c, save, owner=model.owner, base_model=model.base_model, lora=model.lora, overwrite=overwrite
                )
            )
        except CheckpointExists as e:
            raise Refusal(400, str(e)) from None
        return stored.folder

    async def on_saved(self, future: TrainFuture, outcome: TrainOutcome) -> None:
        """Called when a save request has its result."""
        if isinstance(outcome, Saved):
            now = time.time()
            await self._store.write(
                lambda c: rows.complete_checkpoint(c, future.request_id, size_bytes=outcome.size_bytes, now=now)
            )
        elif isinstance(outcome, EngineFailure):
            await self._store.write(lambda c: rows.fail_checkpoint(c, future.request_id, error=outcome.message))

    def folder(self, path: TinkerPath, tag: str) -> Path:
        return self.root / path.model_id.replace(":", "_") / path.kind.value / f"{path.name}@{tag}"

    def locate(self, folder: str) -> str:
        """Returns where a folder is now: the root may have been moved or copied, together with the state folder, or a
        server elsewhere has written it."""
        here = self.root.joinpath(*Path(folder).parts[-3:])
        return str(here) if here.is_dir() else folder

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

    async def delete(self, path: TinkerPath, owner: str) -> None:
        await self.find(path, owner, own=True)
        await self._store.write(lambda c: rows.delete_checkpoint(c, key_of(path)))

    # Cleaning

    async def sweep(self, to_load: set[str]) -> None:
        """Deletes expired checkpoints, and folders that nothing has referred to for a while. `to_load` are folders that
        requests name which would be repeated after a crash."""
        now = time.time()
        for expired in await self._store.read(lambda c: rows.expired_checkpoints(c, now)):
            await self._store.write(lambda c, key=expired.key: rows.delete_checkpoint(c, key))
        needed = to_load | await self._store.read(rows.checkpoint_folders)
        needed |= {s.folder for s in await self._store.read(live_samplers) if s.folder is not None}
        needed = {self.locate(folder) for folder in needed}
        for folder in await asyncio.to_thread(self._folders):
            if folder in needed:
                self._doomed.pop(folder, None)
            elif now - self._doomed.setdefault(folder, now) > self._keep_deleted_s:
                log.info("removing a checkpoint folder", folder=folder)
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                del self._doomed[folder]
        await asyncio.to_thread(self._sweep_uploads, now)

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
