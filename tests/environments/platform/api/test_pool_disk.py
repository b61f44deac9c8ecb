"""Instances where the disk is full or not writable: what was answered stays true, nothing is left behind half."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from palestra.environments.platform import PlatformError
from palestra.environments.platform.pool import CRASHED, TIMED_OUT, InstancePool
from palestra.environments.platform.pool_records import DiskFull, InstanceOver, InstanceState, PoolLimits
from tests.environments.platform.api.test_pool import SMALL, WANTED, Clock, later, put, values

ROOMY = PoolLimits()


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """What a process sees of a full disk: the write that does not fit is cut short, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def nowhere_to_spill(folder: Path) -> Iterator[None]:
    """A file stands in the place of the folder that states go to."""
    states = folder / "instances"
    states.rename(folder / "aside")
    states.write_text("")
    try:
        yield
    finally:
        states.unlink()
        (folder / "aside").rename(states)


def journal_bytes(folder: Path) -> int:
    return (folder / "journal.jsonl").stat().st_size


def test_a_call_that_was_made_is_answered_though_nothing_can_go_to_disk(tmp_path: Path):
    with InstancePool(SMALL, tmp_path) as pool:
        record = pool.create("a", WANTED)
        with pool.use(record.id) as instance, nowhere_to_spill(tmp_path):
            assert not instance.call("put", {"value": 5}).is_error
            with pool.use(record.id):
                pass
        assert record.instance is None  # there was room again
        assert values(pool, record.id) == [5]


def test_memory_that_cannot_be_made_free_makes_no_more_instances(tmp_path: Path):
    with InstancePool(SMALL, tmp_path) as pool:
        first = pool.create("a", WANTED)
        with nowhere_to_spill(tmp_path), pytest.raises(DiskFull, match="is full or not writable"):
            pool.create("a", WANTED)
        assert (pool.usage().instances, pool.usage().resident) == (1, 0)
        put(pool, first.id, 1)
        pool.create("a", WANTED)


def test_an_instance_that_cannot_be_noted_is_not_handed_out(tmp_path: Path):
    with InstancePool(ROOMY, tmp_path) as pool:
        first = pool.create("a", WANTED)
        with files_of_at_most(journal_bytes(tmp_path) + 20), pytest.raises(DiskFull):
            pool.create("a", WANTED)
        assert pool.usage().instances == pool.count("a") == 1
        second = pool.create("a", WANTED)  # in a line of its own
        put(pool, second.id, 2)
    with InstancePool(ROOMY, tmp_path) as pool:
        assert {record.id for record in pool.records("a") if not record.is_over} == {first.id, second.id}
        assert values(pool, second.id) == [2]


def test_closing_and_the_reaper_go_on_when_nothing_can_be_noted(tmp_path: Path):
    clock = Clock()
    with InstancePool(PoolLimits(ttl_s=10, kept_s=5), tmp_path, clock) as pool:
        closed, *others = [pool.create("a", WANTED) for _ in range(4)]
        with files_of_at_most(journal_bytes(tmp_path)):
            assert pool.close(closed.id, "a").state is InstanceState.STOPPED
            assert later(pool, clock, 12) == 3
        assert {other.reason for other in others} == {TIMED_OUT}
        later(pool, clock, 12)
        assert (pool.usage().known, pool.usage().resident) == (0, 0)


def test_a_journal_that_cannot_be_begun_anew_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("palestra.environments.platform.pool.SPARE_LINES", -100)
    clock = Clock()
    with InstancePool(ROOMY, tmp_path, clock) as pool:
        pool.create("a", WANTED)
        (tmp_path / "journal.jsonl.part").mkdir()
        with pytest.raises(OSError, match=r"journal\.jsonl\.part"):
            later(pool, clock, 1)
        record = pool.create("a", WANTED)
        (tmp_path / "journal.jsonl.part").rmdir()
        later(pool, clock, 1)
    with InstancePool(ROOMY, tmp_path, clock) as pool:
        assert values(pool, record.id) == []


def test_a_reset_that_cannot_be_noted_ends_the_instance(tmp_path: Path):
    with InstancePool(ROOMY, tmp_path) as pool:
        record = pool.create("a", WANTED)
        with files_of_at_most(journal_bytes(tmp_path)), pytest.raises(DiskFull):
            pool.replace(record.id, "tiny-3")
        with pytest.raises(InstanceOver, match="is full or not writable"), pool.use(record.id):
            pass


def test_going_down_loses_only_what_the_disk_does_not_take(tmp_path: Path):
    with InstancePool(ROOMY, tmp_path) as pool:
        lost, kept = pool.create("a", WANTED), pool.create("a", WANTED)
        (tmp_path / "instances" / f"{lost.id}.part").mkdir()
    shutil.rmtree(tmp_path / "instances" / f"{lost.id}.part")
    with InstancePool(ROOMY, tmp_path) as pool:
        assert pool.record(lost.id).reason == CRASHED
        assert values(pool, kept.id) == []


def test_a_state_that_cannot_be_read_for_now_is_kept(tmp_path: Path):
    with InstancePool(SMALL, tmp_path) as pool:
        record = pool.create("a", WANTED)
        put(pool, record.id, 4)
        with nowhere_to_spill(tmp_path), pytest.raises(PlatformError, match="ask again"), pool.use(record.id):
            pass
        assert values(pool, record.id) == [4]
