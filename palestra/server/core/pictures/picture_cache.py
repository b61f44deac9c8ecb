"""Pictures of conversations, as files by their digests: each is there once, with the owners who have it.

Traces name pictures by digest, and a conversation that goes on by `previous_response_id` reads them again. Beyond an
owner's quota its least recently used ones go; beyond the bound for all, those of the owner who has the most. A file
goes with its last owner.

On disk `ab/<digest>` is a picture, and `owners/<hash of the name>/<digest>` an empty file that says who has it; what
nobody has is from a server that did not count owners, and belongs to all of them.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from palestra.types import Picture
from palestra.util.atomic_files import replacing

OWNERS = "owners"
SHARED = ""
"""Stands for all owners, where an owner's hash would."""
DIGEST_LENGTH = 64


def no_quota(owner: str) -> int | None:
    return None


class PictureCache:
    def __init__(self, folder: Path, max_bytes: int, quota_of: Callable[[str], int | None] = no_quota):
        """`quota_of`: bytes that an owner may keep; None: any number."""
        self._folder, self._max_bytes, self._quota_of = folder, max_bytes, quota_of
        self._kept: _KeptPictures | None = None
        """None: the folder was not read yet."""
        self._lock = threading.Lock()  # protects what is kept, and which files there are

    def keep(self, owner: str, pictures: Iterable[Picture]) -> None:
        """Keeps pictures, which are on disk when this returns. It writes files, so call it in a thread."""
        quota, name = self._quota_of(owner), _hash(owner)
        with self._lock:
            kept = self._known()
            for picture in pictures:
                if picture.digest not in kept.sizes:
                    kept.sizes[picture.digest] = self._write(picture)
                    kept.used_bytes += kept.sizes[picture.digest]
                self._touch(kept, name, picture.digest)
            while quota is not None and kept.bytes_of[name] > quota and len(kept.owned[name]) > 1:
                self._drop(kept, name)
            while kept.used_bytes > self._max_bytes and len(kept.sizes) > 1:
                self._drop(kept, max(kept.owned, key=lambda one: kept.bytes_of[one]))

    def find(self, owner: str, digest: str) -> Picture | None:
        """Finds a picture of an owner; call it in a thread. None: it was never kept, was deleted, or is another
        owner's."""
        with self._lock:
            kept = self._known()
            name = next((one for one in (_hash(owner), SHARED) if digest in kept.owned.get(one, ())), None)
            if name is None:
                return None
            self._touch(kept, name, digest)
            return msgspec.msgpack.decode(self._file(digest).read_bytes(), type=Picture)

    def used_by_owner(self) -> Callable[[str], int]:
        """Tells for each owner the bytes of its pictures, as of now; call it in a thread."""
        with self._lock:
            found = Counter(self._known().bytes_of)
        return lambda owner: found[_hash(owner)]

    def _known(self) -> _KeptPictures:
        if self._kept is None:
            self._kept = kept = _KeptPictures()
            files = [file for file in self._folder.glob("*/*") if len(file.name) == DIGEST_LENGTH]
            kept.sizes = {file.name: file.stat().st_size for file in files}
            kept.used_bytes = sum(kept.sizes.values())
            marks = [(mark.stat().st_mtime, mark) for mark in self._folder.glob(f"{OWNERS}/*/*")]
            for _, mark in sorted(marks):
                if mark.name in kept.sizes:
                    kept.add(mark.parent.name, mark.name)
            for _, file in sorted((file.stat().st_mtime, file) for file in files if not kept.holders[file.name]):
                kept.add(SHARED, file.name)
        return self._kept

    def _write(self, picture: Picture) -> int:
        file, data = self._file(picture.digest), msgspec.msgpack.encode(picture)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, mode=0o600) as out:
            out.write(data)
        return len(data)

    def _touch(self, kept: _KeptPictures, name: str, digest: str) -> None:
        if digest not in kept.owned.get(name, ()):
            kept.add(name, digest)
        kept.owned[name].move_to_end(digest)
        mark = self._mark(name, digest)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch(mode=0o600)

    def _drop(self, kept: _KeptPictures, name: str) -> None:
        """Drops an owner's least recently used picture."""
        digest = kept.remove_first(name)
        if name != SHARED:
            self._mark(name, digest).unlink(missing_ok=True)
        if not kept.holders[digest]:
            kept.used_bytes -= kept.sizes.pop(digest)
            self._file(digest).unlink(missing_ok=True)

    def _file(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest

    def _mark(self, name: str, digest: str) -> Path:
        """The file whose time says when the owner has used the picture last."""
        return self._file(digest) if name == SHARED else self._folder / OWNERS / name / digest


class _KeptPictures:
    """What the folder has."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        """The bytes of each file, by digest."""
        self.used_bytes = 0
        self.owned: dict[str, OrderedDict[str, None]] = {}
        """The digests of each owner, the least recently used first."""
        self.bytes_of = Counter[str]()
        self.holders = Counter[str]()
        """How many owners have each picture."""

    def add(self, name: str, digest: str) -> None:
        self.owned.setdefault(name, OrderedDict())[digest] = None
        self.bytes_of[name] += self.sizes[digest]
        self.holders[digest] += 1

    def remove_first(self, name: str) -> str:
        digest, _ = self.owned[name].popitem(last=False)
        self.bytes_of[name] -= self.sizes[digest]
        self.holders[digest] -= 1
        if not self.owned[name]:
            del self.owned[name]
        return digest


def _hash(owner: str) -> str:
    return hashlib.sha256(owner.encode()).hexdigest()[:32]
