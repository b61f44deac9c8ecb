"""Weights from elsewhere: files of an adapter that a client uploads, as a checkpoint that can be loaded for a while.

The engine looks into the files when they are loaded. What the client then saves is an ordinary checkpoint, so what was
uploaded expires soon.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import time
from pathlib import Path

from sqlalchemy import Connection

from palestra.server.core.checkpoints.files import UPLOADS, CheckpointFiles, key_of
from palestra.server.core.errors import Refusal, not_found
from palestra.server.core.owners.callers import Caller
from palestra.server.core.owners.quotas import exceeded
from palestra.server.core.owners.usage import day_of
from palestra.server.core.paths import ModelId, TinkerPath
from palestra.server.core.telemetry.disk_health import MIN_FREE_BYTES
from palestra.server.core.wire_errors import shown
from palestra.server.core.workers.served_models import ServedModels
from palestra.server.tinker.copies import add_detached_run
from palestra.server.tinker.schemas_rest import ImportWeightsRequest
from palestra.store import Store
from palestra.store.errors import QuotaExceeded
from palestra.store.queries import checkpoints as checkpoint_rows
from palestra.store.queries.quotas import check_checkpoint_bytes
from palestra.store.queries.usage import add_usage
from palestra.store.records import CheckpointKind, CheckpointRow, CheckpointStatus, UsageCounts, UsageKey
from palestra.types import LoraConfig
from palestra.util.atomic_files import sync

FILES = ("adapter_config.json", "adapter_model.safetensors")
VALID_S = 3600.0
MAX_BYTES = 64 << 30
_UPLOAD = re.compile("[0-9a-f]{32}")


class WeightImports:
    def __init__(self, store: Store, served: ServedModels, checkpoints: CheckpointFiles, secret: str):
        self._store, self._served, self._checkpoints, self._secret = store, served, checkpoints, secret

    async def receive_part(self, caller: Caller, upload_id: str, file: str, offset: int, body: bytes) -> int:
        """Writes a part of a file and returns the file's size. The same part again changes nothing."""
        if file not in FILES:
            raise Refusal(400, f"{shown(file)} is no file of an adapter; send {' and '.join(FILES)}")
        if offset + len(body) > MAX_BYTES:
            raise Refusal(400, f"a file may have {MAX_BYTES >> 30} GiB at most")
        return await asyncio.to_thread(_write_part, self._folder(caller, upload_id) / file, offset, body)

    async def import_weights(self, caller: Caller, request: ImportWeightsRequest) -> str:
        """Returns the path of a checkpoint with what was uploaded. The same request again gets the same path."""
        if self._served.find(request.base_model) is None:
            names = ", ".join(self._served.names)
            raise Refusal(400, f"base model {request.base_model[:200]!r} is not served here; served: {names}")
        uploaded = self._folder(caller, request.upload_id)
        run = ModelId(hashlib.sha256(f"{self._secret} {uploaded.name}".encode()).hexdigest()[:32], 0)
        path = TinkerPath(str(run), CheckpointKind.WEIGHTS, "imported")
        if await self._store.read(lambda c: checkpoint_rows.get_checkpoint(c, key_of(path))) is not None:
            return str(path)
        if not all((uploaded / file).is_file() for file in FILES):
            raise not_found("upload", request.upload_id)
        limit, size = self._checkpoints.max_bytes(caller.owner), sum((uploaded / file).stat().st_size for file in FILES)
        try:
            await self._store.read(
                lambda c: check_checkpoint_bytes(c, key_of(path), caller.owner, limit, size_bytes=size)
            )
        except QuotaExceeded as e:
            raise exceeded(e) from None
        folder, now = self._checkpoints.folder(path, "0"), time.time()
        size = await asyncio.to_thread(_move, uploaded, folder)
        await self._checkpoints.upload(folder)
        row = CheckpointRow(
            model_id=path.model_id,
            kind=path.kind,
            name=path.name,
            owner=caller.owner,
            status=CheckpointStatus.COMPLETED,
            folder=str(folder),
            base_model=request.base_model,
            lora=LoraConfig(**request.lora.model_dump()),
            request_id=f"import:{request.upload_id}",
            seq_id=0,
            created_at=now,
            completed_at=now,
            expires_at=now + VALID_S,
            size_bytes=size,
        )
        await self._store.write(lambda c: _record(c, row))
        return str(path)

    def _folder(self, caller: Caller, upload_id: str) -> Path:
        """Owners have folders of their own, so that none can write into another's upload."""
        if not _UPLOAD.fullmatch(upload_id):
            raise Refusal(400, f"{shown(upload_id)} is not the id of an upload; send 32 hexadecimal digits")
        owner = hashlib.sha256(caller.owner.encode()).hexdigest()[:16]
        return self._checkpoints.root / UPLOADS / f"{owner}_{upload_id}"


def _record(conn: Connection, row: CheckpointRow) -> None:
    """Writes session, run, checkpoint and usage in one transaction."""
    if checkpoint_rows.get_checkpoint(conn, row.key) is None:
        add_detached_run(conn, row, project_id=None, display_name="import")
        checkpoint_rows.add_checkpoint(conn, row)
        key = UsageKey(day_of(row.created_at), row.owner, row.model_id)
        add_usage(conn, {key: UsageCounts(checkpoint_bytes=row.size_bytes)})


def _write_part(file: Path, offset: int, body: bytes) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    size = file.stat().st_size if file.exists() else 0
    if offset > size:
        raise Refusal(400, f"{file.name} has {size} bytes here; go on from there, not from {offset}")
    if shutil.disk_usage(file.parent).free < len(body) + MIN_FREE_BYTES:
        raise Refusal(400, "the server's disk has no room for this upload")
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as stream:
        stream.seek(offset)
        stream.write(body)
        stream.flush()
        os.fsync(stream.fileno())
    return max(size, offset + len(body))


def _move(uploaded: Path, folder: Path) -> int:
    """Moves what was uploaded to its place as a checkpoint, and returns its size."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        uploaded.rename(folder)
        for directory in (folder, *list(folder.parents)[:2]):
            sync(directory)
    return sum(file.stat().st_size for file in folder.iterdir())
