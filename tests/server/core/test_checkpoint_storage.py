"""Checkpoints in object storage: whole or absent, sent once, fetched when needed. A folder stands in for a bucket."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.checkpoints.storage import MANIFEST, CheckpointStorage
from palestra.store import Store
from palestra.util.object_storage import ObjectLost, ObjectStorage, StorageError

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a" * 1000, "optimizer.safetensors": b"b" * 2000}
NAME = "run_train_0/weights/first@1"


def saved(root: Path, name: str = NAME) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for file, content in FILES.items():
        (folder / file).write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def storage(bucket: Path) -> CheckpointStorage:
    return CheckpointStorage(f"file://{bucket}", max_cache_bytes=1 << 20)


def test_what_one_server_uploads_another_fetches(storage: CheckpointStorage, tmp_path: Path) -> None:
    storage.upload(saved(tmp_path / "here"))
    storage.fetch(tmp_path / "there" / NAME)
    assert contents(tmp_path / "there" / NAME) == FILES
    assert storage.names() == {NAME}


def test_an_interrupted_upload_is_not_there_and_goes_on_where_it_was(
    storage: CheckpointStorage, bucket: Path, tmp_path: Path
) -> None:
    folder, obstacle = saved(tmp_path / "here"), bucket / NAME / "optimizer.safetensors"
    obstacle.mkdir(parents=True)  # the last file cannot be put there
    with pytest.raises(StorageError):
        storage.upload(folder)
    with pytest.raises(ObjectLost, match="has no checkpoint"):
        storage.fetch(tmp_path / "there" / NAME)
    assert not (tmp_path / "there" / NAME).exists()
    first = (bucket / NAME / "adapter_model.safetensors").stat().st_ino
    obstacle.rmdir()
    CheckpointStorage(f"file://{bucket}", max_cache_bytes=1).upload(folder)  # of another process
    assert (bucket / NAME / "adapter_model.safetensors").stat().st_ino == first
    storage.fetch(tmp_path / "there" / NAME)
    assert contents(tmp_path / "there" / NAME) == FILES


def test_an_upload_after_another_server_has_stored_the_checkpoint_takes_what_is_there(
    storage: CheckpointStorage, tmp_path: Path
) -> None:
    """The other server was killed before it wrote that. The save was repeated here, to other bits, or is not here."""
    storage.upload(saved(tmp_path / "there"))
    repeated = saved(tmp_path / "repeated")
    (repeated / "adapter_model.safetensors").write_bytes(b"c" * 1000)
    for folder in (repeated, tmp_path / "absent" / NAME):
        storage.upload(folder)
        assert contents(folder) == FILES
        assert storage.is_stored(folder)
    storage.fetch(tmp_path / "elsewhere" / NAME)
    assert contents(tmp_path / "elsewhere" / NAME) == FILES


def test_a_folder_that_went_with_another_server_cannot_be_uploaded(storage: CheckpointStorage, tmp_path: Path) -> None:
    """A client learns of the loss at once: waiting would not bring the weights back."""
    with Store.open(f"sqlite:///{tmp_path}/palestra.db") as store:
        files = CheckpointFiles(store, tmp_path, keep_deleted_s=0, write_wait_s=math.inf, storage=storage)
        with pytest.raises(ObjectLost, match="neither on this disk nor in"):
            asyncio.run(files.upload(tmp_path / NAME))
    assert storage.names() == set()


class HeldFiles(MemoryFileSystem):
    """A storage that does not answer until it is released."""

    protocol = "held"
    released = Event()
    reads = count()

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        next(self.reads)
        self.released.wait()
        return super().cat_file(path, *args, **kwargs)


def test_a_storage_that_hangs_holds_up_nothing_else(tmp_path: Path) -> None:
    """Many checkpoints are fetched at once, each by two clients: for all else there are threads."""
    fsspec.register_implementation("held", HeldFiles)
    folders = [str(tmp_path / f"run_train_0/weights/n@{number}") for number in range(64)]

    async def run(files: CheckpointFiles) -> list[Any]:
        fetching = [asyncio.create_task(files.fetch([folder])) for folder in folders * 2]
        try:
            for _ in range(10):  # all of them begin
                await asyncio.sleep(0)
            async with asyncio.timeout(10):
                await asyncio.to_thread(str)
        finally:
            HeldFiles.released.set()
        return await asyncio.gather(*fetching, return_exceptions=True)

    with Store.open(f"sqlite:///{tmp_path}/palestra.db") as store:
        storage = CheckpointStorage("held://bucket", max_cache_bytes=1)
        results = asyncio.run(run(CheckpointFiles(store, tmp_path, keep_deleted_s=0, storage=storage)))
    assert {type(result) for result in results} == {ObjectLost}
    assert next(HeldFiles.reads) == len(folders)


def test_a_damaged_object_is_noticed(storage: CheckpointStorage, bucket: Path, tmp_path: Path) -> None:
    storage.upload(saved(tmp_path / "here"))
    (bucket / NAME / "adapter_model.safetensors").write_bytes(b"c" * 1000)
    with pytest.raises(ObjectLost, match="does not match its SHA-256"):
        storage.fetch(tmp_path / "there" / NAME)
    assert not (tmp_path / "there" / NAME).exists()


def test_a_deleted_checkpoint_is_gone_before_its_files_are(
    storage: CheckpointStorage, bucket: Path, tmp_path: Path
) -> None:
    storage.upload(saved(tmp_path / "here"))
    storage.upload(saved(tmp_path / "here", NAME + "0"))
    (bucket / NAME / MANIFEST).unlink()
    with pytest.raises(ObjectLost):
        storage.fetch(tmp_path / "there" / NAME)
    storage.delete(NAME)
    assert storage.names() == {NAME + "0"}


def test_the_cache_keeps_what_was_used_last_and_what_is_needed(bucket: Path, tmp_path: Path) -> None:
    size = sum(map(len, FILES.values()))
    storage = CheckpointStorage(f"file://{bucket}", max_cache_bytes=2 * size)
    folders = [saved(tmp_path / "here", f"run_train_0/weights/n@{number}") for number in range(5)]
    for number, folder in enumerate(folders[:4]):  # the last one is not stored: it stays
        storage.upload(folder)
        os.utime(folder, (number, 1000))
    storage.evict(folders, {str(folders[0])})
    assert [folder.exists() for folder in folders] == [True, False, False, False, True]
    storage.fetch(folders[3])
    assert contents(folders[3]) == FILES


def test_an_eviction_cut_short_leaves_no_half_a_checkpoint(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = CheckpointStorage(f"file://{bucket}", max_cache_bytes=1)
    folder = saved(tmp_path / "here")
    storage.upload(folder)

    def kill(path: Path, **_: object) -> None:
        if path.is_dir():
            next(path.iterdir()).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            storage.evict([folder], set())
    storage.fetch(folder)
    assert contents(folder) == FILES


def test_an_object_store_in_memory_serves_as_well(tmp_path: Path) -> None:
    storage = CheckpointStorage("memory://bucket/below", max_cache_bytes=1)
    storage.upload(saved(tmp_path / "here"))
    storage.fetch(tmp_path / "there" / NAME)
    assert contents(tmp_path / "there" / NAME) == FILES
    assert storage.names() == {NAME}
    storage.delete(NAME)
    assert storage.names() == set()


def test_a_place_belongs_to_one_database(storage: CheckpointStorage) -> None:
    storage.claim("first")
    storage.claim("first")
    with pytest.raises(StorageError, match="belongs to a server with another database"):
        storage.claim("second")
    assert storage.names() == set()


def test_a_url_that_nobody_knows_is_named() -> None:
    with pytest.raises(StorageError, match="nowhere://x"):
        ObjectStorage("nowhere://x")
