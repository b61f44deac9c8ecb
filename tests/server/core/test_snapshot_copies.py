"""Copies of snapshots: in an order in which another server can use what there is at any time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from palestra.server.core.checkpoints import snapshot_copies
from palestra.server.core.checkpoints.snapshot_copies import SnapshotCopies
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.server.core.workers.watchdog import WatchdogTimeouts
from palestra.store import Store
from palestra.types.engine import SamplerSpooled, Snapshotted, WorkerConfig
from tests.waiting import until

NOBODY: Any = None
"""No worker is started, so nobody has to listen to one."""


def test_after_an_outage_samplers_are_copied_before_the_newer_snapshot_that_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the first snapshot fails, while a sampler is kept and the next snapshot is taken."""
    monkeypatch.setattr(snapshot_copies, "RETRY_S", 0.01)
    state, bucket = tmp_path / "worker", tmp_path / "bucket"
    for name in ("models/m", "samplers/s"):
        (state / name).parent.mkdir(parents=True)
        (state / name).write_bytes(b"content")
    copied: list[str] = []

    async def run(store: Store) -> None:
        worker = WorkerSupervisor(
            "w",
            WorkerConfig(address=f"ipc://{tmp_path}/x.ipc", model="", state=str(state)),
            NOBODY,
            log_file=tmp_path / "worker.log",
            patience=WatchdogTimeouts(0, 0, 0),
            write_wait_s=1,
        )
        copies = SnapshotCopies(store, f"file://{bucket}", tmp_path / "state")
        await copies.open([], lambda _: [])
        bucket.mkdir(exist_ok=True)
        (bucket / "models").touch()  # no folder can be made there
        with capture_logs() as logged:
            async with copies.running(copied.append):
                copies.on_snapshotted(worker, Snapshotted(model_id="m", seq_id=1, covered_seq=1, file="models/m"))
                await asyncio.sleep(0)  # it is being copied
                copies.on_spooled(worker, SamplerSpooled(sampler_id="s", file="samplers/s"))
                copies.on_snapshotted(worker, Snapshotted(model_id="m", seq_id=2, covered_seq=2, file="models/m"))
                await asyncio.to_thread(until, lambda: any("could not be copied" in entry["event"] for entry in logged))
                (bucket / "models").unlink()
                await asyncio.to_thread(until, lambda: copies.copied_seq("m") == 2)
        await worker.abandon()

    with Store.open(f"sqlite:///{tmp_path}/palestra.db") as store:
        asyncio.run(run(store))
    assert copied == ["s", "m"]
