"""Copies of the worker's snapshots in object storage, so that a server on another machine can go on with its models.

A copy is an object whose name has its digest, and a row in the database that names it: the row is written when the
object is whole, and the journal keeps every request until then. What the row replaces is deleted afterwards. All writes
to the database need its lock, so a server that has lost it cannot damage the copies of its successor.

Owns: which files are copied and when, fetching them. Never touches: when snapshots are taken, what is in them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.store import Store
from palestra.store.queries import snapshot_copies as rows
from palestra.store.queries.settings import get_setting, put_setting
from palestra.store.records import SnapshotCopy
from palestra.types.engine import Hello, SamplerSpooled, Snapshotted
from palestra.util.atomic_files import replacing
from palestra.util.object_storage import ObjectLost, ObjectStorage, StorageError, sha256_of

log = structlog.get_logger()

RETRY_S = 5.0  # after the storage or the database could not be used
SWEEP_S = 60.0
FETCHED_AT_ONCE = 8
NO_REQUEST = -1
_PLACE = "snapshots_at:"
"""Name of the setting that says which server has the newest snapshots of a base model on its disk."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    item: str
    """Id of the model or sampler."""
    base_model: str
    file: str
    """Name in the worker's state folder."""
    seq_id: int
    link: Path
    """Another name of the file, which stays when the worker replaces it."""


class SnapshotCopies:
    def __init__(self, store: Store, url: str, state: Path):
        self._store, self._storage = store, ObjectStorage(url)
        self._links = state / "copying"
        self._server_file = state / "server-id"
        self._known: dict[str, SnapshotCopy] = {}
        self._waiting: dict[str, CopyJob] = {}
        """Jobs by their items, in order. A newer snapshot of a model takes the place of an older one."""
        self._wake = asyncio.Event()

    # When a server starts

    async def claim(self, owner: str) -> None:
        await asyncio.to_thread(self._storage.claim, f"{owner} snapshots")

    async def open(
        self, workers: Collection[WorkerSupervisor], names_of: Callable[[WorkerSupervisor], list[str]]
    ) -> None:
        """Fetches the snapshots of each worker whose last ones were taken by another server. Raises StorageError if the
        storage cannot be reached."""
        shutil.rmtree(self._links, ignore_errors=True)
        self._links.mkdir(parents=True)
        server_id = self._server_id()
        self._known = {copy.item: copy for copy in await self._store.read(rows.list_copies)}
        for worker in workers:
            names = names_of(worker)
            places = await self._store.read(lambda c, names=names: [get_setting(c, _PLACE + name) for name in names])
            if any(place not in (None, server_id) for place in places):
                await self._fetch(worker, set(names))
            await self._store.write(
                lambda c, names=names: [put_setting(c, _PLACE + name, server_id) for name in names] and None
            )
        await self._remove_strays()

    def _server_id(self) -> str:
        if not self._server_file.exists():
            with replacing(self._server_file) as file:
                file.write(uuid.uuid4().hex.encode())
        return self._server_file.read_text()

    async def _fetch(self, worker: WorkerSupervisor, names: set[str]) -> None:
        """Replaces what is on this disk: it is older, and so is a worker that still runs here."""
        await worker.end_earlier()
        folder = Path(worker.config.state)
        copies = [copy for copy in self._known.values() if copy.base_model in names]
        for kind in ("models", "samplers"):
            await asyncio.to_thread(shutil.rmtree, folder / kind, ignore_errors=True)
        room = asyncio.Semaphore(FETCHED_AT_ONCE)

        async def fetch(copy: SnapshotCopy) -> None:
            async with room:
                try:
                    await asyncio.to_thread(self._storage.get, copy.object, folder / copy.file, digest=copy.digest)
                except ObjectLost as e:  # its model is lost, and its clients are told so
                    log.error("a snapshot cannot be fetched", item=copy.item, error=str(e))

        await asyncio.gather(*map(fetch, copies))
        log.info("fetched snapshots of another server", worker=worker.name, files=len(copies))

    async def _remove_strays(self) -> None:
        """Deletes objects that no row names, which a server left that was killed before it wrote one."""
        known = {copy.object for copy in self._known.values()}
        try:
            strays = set(await asyncio.to_thread(self._storage.names)) - known
            await asyncio.to_thread(self._storage.delete, strays)
        except StorageError as e:
            log.warning("objects that are not needed could not be deleted", error=str(e))

    # While it runs

    @asynccontextmanager
    async def running(self, on_copied: Callable[[str], None]) -> AsyncIterator[None]:
        """`on_copied` is called with the id of each model or sampler that was copied."""
        tasks = [
            asyncio.create_task(self._copy_all(on_copied), name="snapshot copies"),
            asyncio.create_task(self._sweep_often(), name="sweep of snapshot copies"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def copied_seq(self, model_id: str) -> int:
        """Returns the last request that the copy of a model covers; -1 if there is none."""
        copy = self._known.get(model_id)
        return NO_REQUEST if copy is None else copy.seq_id

    def on_hello(self, worker: WorkerSupervisor, hello: Hello) -> None:
        for spooled in hello.spooled:
            if spooled.sampler_id not in self._known:
                self.on_spooled(worker, spooled)
        for snapshot in hello.snapshots:
            if snapshot.seq_id > self.copied_seq(snapshot.model_id):
                self.on_snapshotted(worker, snapshot)

    def on_snapshotted(self, worker: WorkerSupervisor, message: Snapshotted) -> None:
        self._add(worker, message.model_id, message.file, message.seq_id)

    def on_spooled(self, worker: WorkerSupervisor, message: SamplerSpooled) -> None:
        self._add(worker, message.sampler_id, message.file, NO_REQUEST)

    def _add(self, worker: WorkerSupervisor, item: str, file: str, seq_id: int) -> None:
        job = CopyJob(item, worker.name, file, seq_id, self._links / uuid.uuid4().hex)
        source = Path(worker.config.state) / file
        try:
            os.link(source, job.link)
        except FileNotFoundError:  # it was dropped meanwhile
            return
        except OSError:  # no links on this file system
            shutil.copyfile(source, job.link)
        earlier = self._waiting.pop(item, None)  # the newer one waits behind the samplers that it needs
        if earlier is not None:
            earlier.link.unlink(missing_ok=True)
        self._waiting[item] = job
        self._wake.set()

    async def _copy_all(self, on_copied: Callable[[str], None]) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                job = self._waiting.pop(next(iter(self._waiting)))
                try:
                    await self._copy(job)
                    on_copied(job.item)
                except Exception as e:  # boundary: whatever it is, the next try may succeed
                    log.error("a snapshot could not be copied; trying again", item=job.item, error=str(e))
                    if job.item not in self._waiting:  # a newer one keeps its place behind the samplers it needs
                        self._waiting = {job.item: job, **self._waiting}
                    await asyncio.sleep(RETRY_S)
                if self._waiting.get(job.item) is not job:
                    job.link.unlink(missing_ok=True)

    async def _copy(self, job: CopyJob) -> None:
        digest = await asyncio.to_thread(sha256_of, job.link)
        copy = SnapshotCopy(
            item=job.item,
            base_model=job.base_model,
            file=job.file,
            seq_id=job.seq_id,
            object=f"{job.file}.{digest}",
            digest=digest,
            size_bytes=job.link.stat().st_size,
        )
        await asyncio.to_thread(self._storage.put, job.link, copy.object)
        earlier = await self._store.write(lambda c: rows.put_copy(c, copy))
        self._known[job.item] = copy
        if earlier is not None and earlier.object != copy.object:
            await asyncio.to_thread(self._storage.delete, [earlier.object])

    async def _sweep_often(self) -> None:
        while True:
            try:
                stale = await self._store.write(rows.take_stale_copies)
                for copy in stale:
                    self._known.pop(copy.item, None)
                await asyncio.to_thread(self._storage.delete, [copy.object for copy in stale])
            except Exception as e:  # boundary: whatever it is, the next round may succeed
                log.warning("copies that are not needed could not be deleted", error=str(e))
            await asyncio.sleep(SWEEP_S)
