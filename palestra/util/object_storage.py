"""Object storage by URL (s3://bucket/folder, file:///folder and whatever else fsspec knows): files go up and come down
whole.

Every call blocks.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from palestra.util.atomic_files import TEMPORARY, sync

OWNER = "owner"
"""Name of the object that says who uses a place."""


class StorageError(Exception):
    """The storage cannot be used now; the message says why."""


class ObjectLost(StorageError):
    """An object is not there, or is damaged."""


class ObjectStorage:
    def __init__(self, url: str):
        """Raises StorageError if the URL or its driver is unknown. Nothing is connected to yet."""
        self.url = url.rstrip("/")
        with self._explained():
            import fsspec

            self._files, root = fsspec.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
            self._root = root.rstrip("/")
            self._has_folders = "file" in self._files.protocol
            """Whether folders have to be made, and a file that is being written can be seen."""

    def claim(self, owner: str) -> None:
        """Notes who uses this place, so that no other server deletes what is in it. Raises StorageError if another
        does."""
        found = self.read(OWNER)
        if found is None:
            with tempfile.NamedTemporaryFile() as file:
                file.write(owner.encode())
                file.flush()
                self.put(Path(file.name), OWNER)
        elif found.decode(errors="replace") != owner:
            raise StorageError(
                f"{self.url} belongs to a server with another database; use another folder or, if that server is gone "
                f"for good, delete {OWNER!r} there"
            )

    def put(self, file: Path, name: str) -> None:
        """Stores a file. Under its name it is whole or absent."""
        path = self._path(name)
        with self._explained():
            if not self._has_folders:
                self._files.put_file(str(file), path)
                return
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(file), path + TEMPORARY)
            sync(Path(path + TEMPORARY))
            Path(path + TEMPORARY).replace(path)
            sync(Path(path).parent)

    def get(self, name: str, file: Path, *, digest: str | None = None) -> None:
        """Fetches an object into a file that is replaced as a whole. Raises ObjectLost if it is not there, or does
        not have this SHA-256."""
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f".{file.name}{TEMPORARY}")
        try:
            with self._explained():
                self._files.get_file(self._path(name), str(unfinished))
            if digest is not None and sha256_of(unfinished) != digest:
                raise ObjectLost(f"{self.url}/{name} is damaged: it does not match its SHA-256")
            sync(unfinished)
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
        sync(file.parent)

    def read(self, name: str) -> bytes | None:
        """Returns the content of a small object; None if there is none."""
        with self._explained():
            try:
                return self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; those that are not there are no error."""
        for name in names:
            with self._explained():
                try:
                    self._files.rm_file(self._path(name))
                except FileNotFoundError:
                    continue

    def names(self, below: str = "") -> list[str]:
        """Returns the names of all objects, or of those below a folder."""
        folder = self._path(below) if below else self._root
        with self._explained():
            try:
                found = self._files.find(folder)
            except FileNotFoundError:
                return []
        names = (path[len(self._root) + 1 :] for path in found)
        return [name for name in names if name != OWNER and not name.endswith(TEMPORARY)]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ModuleNotFoundError as e:
            raise StorageError(f"{self.url} needs {e.name}: pip install 'palestra[storage]'") from e
        except ImportError as e:  # fsspec names the driver that is missing
            raise StorageError(f"{self.url}: {e}; pip install 'palestra[storage]'") from e
        except FileNotFoundError as e:
            raise ObjectLost(f"{self.url}: there is no {e}") from e
        except Exception as e:  # boundary: each driver has errors of its own
            raise StorageError(f"{self.url}: {e or type(e).__name__}") from e


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
