"""A state folder that was moved or copied: its checkpoints are found where they are now, and none is swept away."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection

from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.paths import TinkerPath
from palestra.store import Store
from palestra.store.queries import checkpoints as rows
from palestra.store.records import PendingSave
from palestra.types import LoraConfig

PATH = TinkerPath.parse("tinker://0123456789abcdef0123456789abcdef:train:0/weights/kept")


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_a_checkpoint_is_found_and_stays_in_a_state_folder_that_was_moved_or_copied(
    move: Callable[[Path, Path], object], tmp_path: Path
) -> None:
    with Store.open(f"sqlite:///{tmp_path}/palestra.db") as store:
        keep(store, CheckpointFiles(store, tmp_path / "before", keep_deleted_s=0).folder(PATH, "1"))
        move(tmp_path / "before", tmp_path / "after")
        after = CheckpointFiles(store, tmp_path / "after", keep_deleted_s=0)

        async def found_after_sweeps() -> str:
            for _ in range(2):  # what nothing leads to is removed the second time
                await after.sweep(set())
            return (await after.find(PATH, "o")).folder

        assert asyncio.run(found_after_sweeps()) == str(after.folder(PATH, "1"))
        assert after.folder(PATH, "1").is_dir()


def keep(store: Store, folder: Path) -> None:
    folder.mkdir(parents=True)
    fields = {"model_id": PATH.model_id, "kind": PATH.kind, "name": PATH.name, "folder": str(folder)}
    save = PendingSave(request_id="1", seq_id=1, created_at=time.time(), **fields)

    def write(conn: Connection) -> None:
        rows.begin_checkpoint(conn, save, owner="o", base_model="m", lora=LoraConfig(), overwrite=False)
        rows.complete_checkpoint(conn, "1", size_bytes=1, now=time.time())

    store.write_now(write)
