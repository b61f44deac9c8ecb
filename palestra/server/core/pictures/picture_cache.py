"""Pictures of conversations, as files by their digests: each is there once, whoever sent it.

Traces name pictures by digest, and a conversation that goes on by `previous_response_id` reads them again. Beyond the
bound the least recently used ones are deleted.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import msgspec

from palestra.types import Picture
from palestra.util.atomic_files import replacing


class PictureCache:
    def __init__(self, folder: Path, max_bytes: int):
        self._folder, self._max_bytes = folder, max_bytes
        self._sizes: OrderedDict[str, int] | None = None
        """By digest, the least recently used first; None: the folder was not read yet."""
        self._used_bytes = 0
        self._lock = threading.Lock()  # protects the two above, and which files there are

    def keep(self, pictures: Iterable[Picture]) -> None:
        """Keeps pictures, which are on disk when this returns. It writes files, so call it in a thread."""
        with self._lock:
            sizes = self._known()
            for picture in pictures:
                if picture.digest not in sizes:
                    self._write(sizes, picture)
                self._touch(sizes, picture.digest)
            while self._used_bytes > self._max_bytes and len(sizes) > 1:
                digest, size = sizes.popitem(last=False)
                self._used_bytes -= size
                self._file(digest).unlink(missing_ok=True)

    def find(self, digest: str) -> Picture | None:
        """Finds a picture; call it in a thread. None: it was never kept, or was deleted."""
        with self._lock:
            sizes = self._known()
            if digest not in sizes:
                return None
            self._touch(sizes, digest)
            return msgspec.msgpack.decode(self._file(digest).read_bytes(), type=Picture)

    def _known(self) -> OrderedDict[str, int]:
        if self._sizes is None:
            found = [(file.stat().st_mtime, file) for file in self._folder.glob("*/*") if len(file.name) == 64]
            self._sizes = OrderedDict((file.name, file.stat().st_size) for _, file in sorted(found))
            self._used_bytes = sum(self._sizes.values())
        return self._sizes

    def _write(self, sizes: OrderedDict[str, int], picture: Picture) -> None:
        file, data = self._file(picture.digest), msgspec.msgpack.encode(picture)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, mode=0o600) as out:
            out.write(data)
        sizes[picture.digest] = len(data)
        self._used_bytes += len(data)

    def _touch(self, sizes: OrderedDict[str, int], digest: str) -> None:
        sizes.move_to_end(digest)
        os.utime(self._file(digest))

    def _file(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest
