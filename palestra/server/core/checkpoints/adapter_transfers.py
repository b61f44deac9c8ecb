"""Adapters on their way to replicas: files by digest, asked of the worker that trains them, bounded in size.

A file is PEFT's `adapter_model.safetensors` with the config in its metadata. The worker keeps what it has frozen, so a
file that was removed here is asked for again. Which replica needs which adapter is decided in `server/replicas`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.types import LoraConfig
from palestra.types.engine import (
    AdapterPart,
    AdapterRefused,
    Blame,
    EngineFailure,
    KeptSampler,
    SampleWeights,
    SavedAdapter,
    SendAdapter,
)

log = structlog.get_logger()

MAX_TRIES = 3  # of a transfer whose content does not match its digest


class AdapterUnavailable(Exception):
    """There is no such adapter, or it cannot be had."""

    def __init__(self, failure: EngineFailure):
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class TransferredAdapter:
    digest: str
    """SHA-256 of its file."""
    size_bytes: int
    lora: LoraConfig


@dataclass(slots=True, eq=False)
class AdapterTransfer:
    worker: WorkerSupervisor
    weights: KeptSampler | SavedAdapter
    transfer_id: str = ""
    """Another one at each try: parts of earlier tries may still arrive."""
    parts: asyncio.Queue[AdapterPart | AdapterRefused | None] = field(default_factory=asyncio.Queue)
    """None: the worker is another one, or can be asked again."""
    task: asyncio.Task[TransferredAdapter] | None = None


class AdapterTransfers:
    """Fetches adapters from workers, and keeps their files for replicas."""

    def __init__(self, folder: Path, *, max_bytes: int, is_held: Callable[[WorkerSupervisor], bool]):
        self._folder, self._max_bytes, self._is_held = folder, max_bytes, is_held
        """`is_held` says whether a worker may be asked for nothing now."""
        shutil.rmtree(folder, ignore_errors=True)
        self._stored: OrderedDict[str, TransferredAdapter] = OrderedDict()
        """Adapters by digest, the least recently used first."""
        self._known: dict[SampleWeights, str] = {}
        self._held: Counter[str] = Counter()
        self._transfers: dict[SampleWeights, AdapterTransfer] = {}

    async def get(self, worker: WorkerSupervisor, weights: KeptSampler | SavedAdapter) -> TransferredAdapter:
        """Returns an adapter whose file is here, after a transfer if need be. Raises AdapterUnavailable."""
        found = self._stored.get(self._known.get(weights, ""))
        if found is not None:
            self._stored.move_to_end(found.digest)
            return found
        transfer = self._transfers.get(weights)
        if transfer is None:
            transfer = self._transfers[weights] = AdapterTransfer(worker, weights)
            transfer.task = asyncio.create_task(self._transfer(transfer), name=f"transfer {weights}")
            transfer.task.add_done_callback(lambda task: self._ended(weights, task))
        assert transfer.task is not None
        return await asyncio.shield(transfer.task)

    def put(self, file: bytes, lora: LoraConfig) -> TransferredAdapter:
        """Stores an adapter that the server has made itself. It stays."""
        adapter = TransferredAdapter(hashlib.sha256(file).hexdigest(), len(file), lora)
        self._folder.mkdir(parents=True, exist_ok=True)
        self.path(adapter.digest).write_bytes(file)
        self._stored[adapter.digest] = adapter
        self._held[adapter.digest] += 1
        return adapter

    def path(self, digest: str) -> Path:
        return self._folder / f"{digest}.safetensors"

    @contextlib.contextmanager
    def reading(self, digest: str) -> Iterator[Path | None]:
        """The file, which is not removed during the block; None if it is not here."""
        if digest not in self._stored:
            yield None
            return
        self._held[digest] += 1
        try:
            self._stored.move_to_end(digest)
            yield self.path(digest)
        finally:
            self._held[digest] -= 1

    def forget(self, weights: SampleWeights) -> TransferredAdapter | None:
        """Forgets weights that will not be used again; returns their adapter if no others are equal to them."""
        digest = self._known.pop(weights, None)
        if digest is None or digest in self._known.values():
            return None
        adapter = self._stored.get(digest)
        if adapter is not None and not self._held[digest]:
            self._remove(digest)
        return adapter

    # The worker

    def on_message(self, message: AdapterPart | AdapterRefused) -> None:
        for transfer in self._transfers.values():
            if transfer.transfer_id == message.transfer_id:
                transfer.parts.put_nowait(message)

    def ask_again(self, worker: WorkerSupervisor) -> None:
        """Called when the worker is another one, or can be asked again."""
        for transfer in self._transfers.values():
            if transfer.worker is worker:
                transfer.parts.put_nowait(None)

    async def close(self) -> None:
        tasks = [transfer.task for transfer in self._transfers.values() if transfer.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Transfers

    async def _transfer(self, transfer: AdapterTransfer) -> TransferredAdapter:
        for number in range(1, MAX_TRIES + 1):
            self._ask(transfer)
            adapter = await self._receive(transfer)
            if adapter is not None:
                self._known[transfer.weights] = adapter.digest
                self._stored[adapter.digest] = adapter
                self._make_room()
                return adapter
            log.error("an adapter does not match its digest", weights=str(transfer.weights), transfer=number)
        raise AdapterUnavailable(
            EngineFailure(
                message=f"the adapter did not match its digest, {MAX_TRIES} times in a row", blame=Blame.SERVER
            )
        )

    def _ask(self, transfer: AdapterTransfer) -> None:
        transfer.transfer_id = uuid.uuid4().hex
        if not self._is_held(transfer.worker):
            transfer.worker.link.send(SendAdapter(transfer_id=transfer.transfer_id, weights=transfer.weights))

    async def _receive(self, transfer: AdapterTransfer) -> TransferredAdapter | None:
        """Returns the adapter once its file is here; None if it arrived damaged."""
        unfinished = self._folder / f"{uuid.uuid4().hex}.partial"
        hashed, received = hashlib.sha256(), 0

        def write(part: AdapterPart) -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            with unfinished.open("ab") as file:
                file.write(part.data)
            hashed.update(part.data)

        try:
            while True:
                part = await transfer.parts.get()
                if part is None:
                    unfinished.unlink(missing_ok=True)
                    hashed, received = hashlib.sha256(), 0
                    self._ask(transfer)
                    continue
                if part.transfer_id != transfer.transfer_id:
                    continue
                if isinstance(part, AdapterRefused):
                    raise AdapterUnavailable(part.failure)
                if part.offset != received or part.lora is None:
                    return None
                await asyncio.to_thread(write, part)
                received += len(part.data)
                if received >= part.size_bytes:
                    if hashed.hexdigest() != part.digest:
                        return None
                    unfinished.replace(self.path(part.digest))
                    return TransferredAdapter(part.digest, part.size_bytes, part.lora)
        finally:
            unfinished.unlink(missing_ok=True)

    def _ended(self, weights: SampleWeights, task: asyncio.Task[TransferredAdapter]) -> None:
        self._transfers.pop(weights, None)
        if not task.cancelled():
            task.exception()  # those who wait get the error; there may be none left

    def _make_room(self) -> None:
        used = sum(adapter.size_bytes for adapter in self._stored.values())
        for digest in list(self._stored)[:-1]:  # the newest stays, however large it is
            if used <= self._max_bytes:
                return
            if not self._held[digest]:
                used -= self._stored[digest].size_bytes
                self._remove(digest)

    def _remove(self, digest: str) -> None:
        del self._stored[digest]
        self._known = {weights: known for weights, known in self._known.items() if known != digest}
        self.path(digest).unlink(missing_ok=True)
