"""Adapters that a replica was sent: fetched over the link part by part, checked by digest, kept as folders.

Owns: those folders, transfers under way. Never touches: which adapters are needed, which the server decides.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.engine.files import FileThread, own_folder
from palestra.engine.sampler_cache import SamplerCache
from palestra.model import DataError, unpack_adapter
from palestra.types.engine import AdapterPart, AdapterPlaced, FromWorker, GetAdapterPart, PlaceAdapter
from palestra.util.atomic_files import TEMPORARY

log = logging.getLogger(__name__)

MAX_TRIES = 3  # of a file whose content does not match its digest
DIGEST_CHARACTERS = 64


@dataclass(slots=True, eq=False)
class AdapterFetch:
    digest: str
    file: Path
    tries: int = 1
    received: int = 0
    hash: Any = field(default_factory=hashlib.sha256)


class PlacedAdapters:
    def __init__(
        self, sampler_cache: SamplerCache, files: FileThread, folder: Path, send: Callable[[FromWorker], None]
    ):
        self.sampler_cache, self.files, self.folder, self._send = sampler_cache, files, own_folder(folder), send
        for left in folder.glob(f".*{TEMPORARY}"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        self.digests = {found.name for found in folder.iterdir() if len(found.name) == DIGEST_CHARACTERS}
        self._fetches: dict[str, AdapterFetch] = {}

    def folder_of(self, digest: str) -> str:
        if digest not in self.digests:
            raise DataError(f"adapter {digest[:12]} is not at this replica")
        return str(self.folder / digest)

    def place(self, message: PlaceAdapter) -> None:
        digest = message.digest
        if digest in self.digests:
            self._send(AdapterPlaced(digest=digest))
        elif digest not in self._fetches:
            self._begin(AdapterFetch(digest, self.folder / (digest + TEMPORARY)))

    def drop(self, digests: list[str]) -> None:
        for digest in digests:
            self._fetches.pop(digest, None)
            if digest in self.digests:
                self.digests.discard(digest)
                folder = self.folder / digest
                self.sampler_cache.close(str(folder))
                self.files.submit(lambda folder=folder: shutil.rmtree(folder, ignore_errors=True), _ignore)

    def forget_fetches(self) -> None:
        """Another server, or the same one after a pause: it asks again for what it needs."""
        self._fetches.clear()

    # Fetching

    def _begin(self, fetch: AdapterFetch) -> None:
        self._fetches[fetch.digest] = fetch
        self._send(GetAdapterPart(digest=fetch.digest, offset=0))

    def take(self, part: AdapterPart) -> None:
        fetch = self._fetches.get(part.digest)
        if fetch is None or part.offset != fetch.received:
            return
        if part.size_bytes == 0:
            self._fail(fetch, "the server no longer has it")
            return
        fetch.received += len(part.data)
        self.files.submit(
            lambda: self._write(fetch, part), lambda is_right, error: self._written(fetch, part, is_right, error)
        )

    def _write(self, fetch: AdapterFetch, part: AdapterPart) -> bool:
        """Writes in the file thread; returns whether all is well so far."""
        with fetch.file.open("r+b" if part.offset else "wb") as file:
            file.seek(part.offset)
            file.write(part.data)
        fetch.hash.update(part.data)
        if part.offset + len(part.data) < part.size_bytes:
            return True
        if fetch.hash.hexdigest() != fetch.digest:
            fetch.file.unlink()
            return False
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder / fetch.digest)  # dropped, and asked for again before it was deleted
        unpack_adapter(fetch.file, self.folder / fetch.digest)
        return True

    def _written(self, fetch: AdapterFetch, part: AdapterPart, is_right: bool, error: Exception | None) -> None:
        if self._fetches.get(fetch.digest) is not fetch:
            return
        if error is not None:
            self._fail(fetch, f"it could not be stored: {error}")
        elif not is_right:
            self._mismatch(fetch)
        elif fetch.received < part.size_bytes:
            self._send(GetAdapterPart(digest=fetch.digest, offset=fetch.received))
        else:
            del self._fetches[fetch.digest]
            self.digests.add(fetch.digest)
            log.info("adapter_placed digest=%s bytes=%d", fetch.digest[:12], part.size_bytes)
            self._send(AdapterPlaced(digest=fetch.digest))

    def _mismatch(self, fetch: AdapterFetch) -> None:
        log.error("adapter_mismatch digest=%s try=%d", fetch.digest[:12], fetch.tries)
        if fetch.tries == MAX_TRIES:
            self._fail(fetch, f"what arrived does not match its digest, {MAX_TRIES} times in a row")
        else:
            self._begin(AdapterFetch(fetch.digest, fetch.file, fetch.tries + 1))

    def _fail(self, fetch: AdapterFetch, why: str) -> None:
        del self._fetches[fetch.digest]
        self._send(AdapterPlaced(digest=fetch.digest, error=f"adapter {fetch.digest[:12]} is refused: {why}"))


def _ignore(_: None, error: Exception | None) -> None:
    if error is not None:
        log.error("file_work_failed error=%r", error)
