"""Whether a disk takes writes is looked at, not remembered."""

from __future__ import annotations

import asyncio
from pathlib import Path

from palestra.server.core.telemetry.disk_health import DiskHealth


def test_a_disk_without_room_is_named_and_one_with_room_is_not(tmp_path: Path) -> None:
    disks = DiskHealth({"state folder": tmp_path / "not" / "made yet", "checkpoints": Path("/proc")})
    (trouble,) = asyncio.run(disks.troubles())
    assert trouble.startswith("checkpoints: the disk is full (0 KiB free")
    (trouble,) = asyncio.run(DiskHealth(dict.fromkeys(("state folder", "database"), Path("/proc"))).troubles())
    assert trouble.startswith("state folder, database: the disk is full")
    assert not list(tmp_path.iterdir())


def test_many_who_ask_at_once_are_answered(tmp_path: Path) -> None:
    async def run() -> list[list[str]]:
        disks = DiskHealth({"state folder": tmp_path})
        return await asyncio.gather(*(disks.troubles() for _ in range(100)))

    assert asyncio.run(run()) == [[]] * 100
