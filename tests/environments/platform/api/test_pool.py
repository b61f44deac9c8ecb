"""Lives of instances: by time, by limits, in memory and on disk, over restarts and crashes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.environments.platform import PlatformError
from palestra.environments.platform.pool import CLOSED, CRASHED, OTHER_VERSION, TIMED_OUT, InstancePool
from palestra.environments.platform.pool_memory import TimerWheel
from palestra.environments.platform.pool_records import (
    DuplicateRequest,
    InstanceGone,
    InstanceOver,
    InstanceSpec,
    InstanceState,
    LimitReached,
    PoolLimits,
)
from tests.properties import examples

WANTED = InstanceSpec(app="keys", data="tiny-0", version="v1")
SMALL = PoolLimits(max_resident_bytes=1)  # one that is not in use has no place in memory


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def later(pool: InstancePool, clock: Clock, seconds: float) -> int:
    """Second by second, as the server does."""
    ended = 0
    for _ in range(int(seconds)):
        clock.now += 1
        ended += pool.tick()
    return ended


def put(pool: InstancePool, instance_id: str, value: int) -> None:
    with pool.use(instance_id) as instance:
        assert not instance.call("put", {"value": value}).is_error


def values(pool: InstancePool, instance_id: str) -> list[int]:
    with pool.use(instance_id) as instance:
        return [value for (value,) in instance.connection.execute("SELECT value FROM numbers ORDER BY id")]


# Time


def test_an_instance_ends_when_nobody_used_it_for_its_ttl_and_is_forgotten_later(clock: Clock):
    with InstancePool(PoolLimits(ttl_s=60, kept_s=600), clock=clock) as pool:
        record = pool.create("a", WANTED)
        later(pool, clock, 50)
        put(pool, record.id, 1)
        assert later(pool, clock, 59) == 0
        assert later(pool, clock, 2) == 1
        assert (record.state, record.reason) == (InstanceState.STOPPED, TIMED_OUT)
        with pytest.raises(InstanceOver, match="stopped"), pool.use(record.id):
            pass
        later(pool, clock, 595)
        assert pool.record(record.id) is record
        later(pool, clock, 10)
        with pytest.raises(InstanceGone):
            pool.record(record.id)
        assert pool.usage().known == 0


def test_use_keeps_an_instance_alive_up_to_a_cap(clock: Clock):
    with InstancePool(PoolLimits(ttl_s=60, max_age_s=300), clock=clock) as pool:
        record = pool.create("a", InstanceSpec(app="keys", data="tiny-0", version="v1", ttl_s=10_000))
        assert record.ttl_s == 300
        for n in range(29):
            later(pool, clock, 10)
            put(pool, record.id, n)
        assert later(pool, clock, 12) == 1


def test_an_instance_with_heartbeats_ends_when_two_are_missing(clock: Clock):
    with InstancePool(PoolLimits(ttl_s=600), clock=clock) as pool:
        record = pool.create("a", InstanceSpec(app="keys", data="tiny-0", version="v1", heartbeat_s=10))
        for _ in range(10):
            assert later(pool, clock, 15) == 0
            pool.beat(record.id, "a")
        assert later(pool, clock, 21) == 1
        assert pool.beat(record.id, "a").is_over


def test_what_is_closed_early_is_looked_at_once_more_and_not_twice(clock: Clock):
    with InstancePool(PoolLimits(ttl_s=10, kept_s=600), clock=clock) as pool:
        for _ in range(5):
            pool.close(pool.create("a", WANTED).id, "a")
        later(pool, clock, 60)
        assert sum(map(len, pool._wheel._slots.values())) == pool.usage().known == 5


def test_one_that_is_in_use_does_not_end(clock: Clock):
    with InstancePool(PoolLimits(ttl_s=10), clock=clock) as pool:
        record = pool.create("a", WANTED)
        with pool.use(record.id) as instance:
            assert later(pool, clock, 30) == 0
            assert instance.is_open
        assert later(pool, clock, 30) == 1


def test_one_that_is_held_waits_for_long_but_not_longer_than_it_may_live(clock: Clock):
    with InstancePool(PoolLimits(ttl_s=10, max_age_s=100), clock=clock) as pool:
        held, left = pool.create("a", WANTED), pool.create("a", WANTED)
        with pool.hold(left.id):
            assert later(pool, clock, 30) == 1  # the other
            assert held.is_over
        with pool.hold(left.id):
            assert later(pool, clock, 30) == 0
        assert later(pool, clock, 11) == 1
        old = pool.create("a", WANTED)
        with pool.hold(old.id):
            assert later(pool, clock, 90) == 0
            assert later(pool, clock, 12) == 1


@examples(50)
@given(st.lists(st.tuples(st.floats(0, 300), st.floats(0, 5)), max_size=40))
def test_a_wheel_gives_back_each_thing_once_and_not_before_its_time(things: list[tuple[float, float]]):
    now, wheel = 0.0, TimerWheel(0.0)
    waiting: dict[str, float] = {}
    for n, (span, step) in enumerate(things):
        wheel.put(str(n), now + span)
        waiting[str(n)] = now + span
        now += step
        for key, _ in wheel.due(now):
            assert waiting.pop(key) <= now
    assert sorted(key for key, _ in wheel.due(now + 301)) == sorted(waiting)


# Limits and requests


def test_limits_hold_for_a_team_and_for_all(clock: Clock):
    with InstancePool(PoolLimits(max_instances=3, max_per_team=2), clock=clock) as pool:
        first = pool.create("a", WANTED)
        pool.create("a", WANTED)
        with pytest.raises(LimitReached, match="you have 2 running instances of at most 2"):
            pool.create("a", WANTED)
        pool.create("b", WANTED)
        with pytest.raises(LimitReached, match="the platform has 3"):
            pool.create("c", WANTED)
        pool.close(first.id, "a")
        pool.create("a", WANTED)


def test_a_request_that_comes_again_gets_its_instance(clock: Clock):
    with InstancePool(clock=clock) as pool:
        record = pool.create("a", WANTED, "one")
        assert pool.create("a", WANTED, "one") is record
        assert pool.create("b", WANTED, "one") is not record
        with pytest.raises(DuplicateRequest, match="another request") as refused:
            pool.create("a", InstanceSpec(app="keys", data="tiny-1", version="v1"), "one")
        assert refused.value.instance_id is None
        pool.close(record.id, "a")
        assert pool.create("a", WANTED, "one").state is InstanceState.STOPPED
        assert pool.usage().instances == 1


def test_a_request_that_comes_again_while_its_instance_is_made_is_told_which(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    begun, go_on = threading.Event(), threading.Event()
    from palestra.environments.platform import pool as module

    real = module.seed_named

    def slow(*args):
        begun.set()
        assert go_on.wait(30)
        return real(*args)

    with InstancePool(clock=clock) as pool:
        monkeypatch.setattr(module, "seed_named", slow)
        making = threading.Thread(target=pool.create, args=("a", WANTED, "one"))
        making.start()
        assert begun.wait(30)
        with pytest.raises(DuplicateRequest, match="in progress") as refused:
            pool.create("a", WANTED, "one")
        (record,) = pool.records("a")
        assert (refused.value.instance_id, record.state) == (record.id, InstanceState.PENDING)
        pool.close(record.id, "a")
        go_on.set()
        making.join(30)
        assert record.state is InstanceState.STOPPED
        assert (pool.usage().instances, pool.usage().resident) == (0, 0)


def test_closing_twice_says_the_same(clock: Clock):
    with InstancePool(clock=clock) as pool:
        record = pool.create("a", WANTED)
        with pytest.raises(InstanceGone):
            pool.close(record.id, "b")
        assert pool.close(record.id, "a").reason == CLOSED
        ended = record.ended_at
        clock.now += 5
        assert pool.close(record.id, "a").ended_at == ended


def test_what_cannot_be_made_ends_as_an_error(clock: Clock):
    with InstancePool(clock=clock) as pool:
        with pytest.raises(PlatformError, match="has no data"):
            pool.create("a", InstanceSpec(app="keys", data="huge", version="v1"))
        (record,) = pool.records("a")
        assert record.state is InstanceState.ERROR
        assert pool.usage().instances == 0


def test_an_instance_that_is_closed_during_a_call_ends_after_it(clock: Clock):
    with InstancePool(clock=clock) as pool:
        record = pool.create("a", WANTED)
        with pool.use(record.id) as instance:
            pool.close(record.id, "a")
            assert not instance.call("list", {}).is_error
        assert not instance.is_open
        assert pool.usage().resident == 0


def test_an_instance_can_be_given_another_seed(clock: Clock, tmp_path: Path):
    with InstancePool(folder=tmp_path, clock=clock) as pool:
        record = pool.create("a", WANTED)
        put(pool, record.id, 1)
        pool.replace(record.id, "tiny-3")
        with pool.use(record.id) as instance:
            assert instance.seed.key == "tiny-3"
        over = pool.close(pool.create("a", WANTED).id, "a")
        with pytest.raises(InstanceOver, match="closed by its owner"):
            pool.replace(over.id, "tiny-3")
        assert pool.usage().resident == 1
    with InstancePool(folder=tmp_path, clock=clock) as pool, pool.use(record.id) as instance:
        assert instance.seed.key == "tiny-3"


# Disk


def test_idle_instances_go_to_disk_and_come_back_as_they_were(clock: Clock):
    with InstancePool(SMALL, clock=clock) as pool:
        ids = [pool.create("a", WANTED).id for _ in range(5)]
        assert (pool.usage().resident, pool.usage().spilled) == (0, 5)
        for n in range(3):
            for number, instance_id in enumerate(ids):
                put(pool, instance_id, 10 * number + n)
        for number, instance_id in enumerate(ids):
            assert values(pool, instance_id) == [10 * number + n for n in range(3)]
        assert (pool.usage().resident, pool.usage().resident_bytes) == (0, 0)


def test_those_used_longest_ago_go_first(clock: Clock):
    with InstancePool(clock=clock) as pool:
        size = pool.create("a", WANTED).size_bytes
    with InstancePool(PoolLimits(max_resident_bytes=3 * size), clock=clock) as pool:
        records = [pool.create("a", WANTED) for _ in range(3)]
        with pool.use(records[0].id):
            pass
        pool.create("a", WANTED)
        assert [record.instance is not None for record in records] == [True, False, True]


def test_one_that_is_in_use_stays_in_memory(clock: Clock):
    with InstancePool(SMALL, clock=clock) as pool:
        record = pool.create("a", WANTED)
        with pool.use(record.id) as instance:
            pool.create("a", WANTED)
            assert record.instance is instance
        assert record.instance is None


def test_an_instance_that_cannot_be_read_back_ends_as_an_error(clock: Clock, tmp_path: Path):
    with InstancePool(SMALL, tmp_path, clock) as pool:
        record, other = pool.create("a", WANTED), pool.create("a", WANTED)
        (tmp_path / "instances" / record.id).write_bytes(b"nothing" * 1000)
        with pytest.raises(InstanceOver, match="cannot be read"), pool.use(record.id):
            pass
        assert record.state is InstanceState.ERROR
        put(pool, other.id, 1)


def test_after_a_restart_instances_go_on(clock: Clock, tmp_path: Path):
    with InstancePool(folder=tmp_path, clock=clock) as pool:
        record, closed = pool.create("a", WANTED, "one"), pool.create("a", WANTED)
        put(pool, record.id, 7)
        pool.close(closed.id, "a")
        secret = pool.files.secret()
    clock.now += 100
    with InstancePool(folder=tmp_path, clock=clock) as pool:
        assert pool.create("a", WANTED, "one").id == record.id
        put(pool, record.id, 8)
        assert values(pool, record.id) == [7, 8]
        assert pool.record(closed.id).reason == CLOSED
        assert pool.files.secret() == secret
        assert later(pool, clock, 602) == 1


def test_an_app_of_another_version_ends_its_instances(clock: Clock, tmp_path: Path):
    with InstancePool(folder=tmp_path, clock=clock) as pool:
        record = pool.create("a", InstanceSpec(app="keys", data="tiny-0", version="v0"))
    with InstancePool(folder=tmp_path, clock=clock) as pool:
        assert (pool.record(record.id).state, pool.record(record.id).reason) == (InstanceState.ERROR, OTHER_VERSION)
        assert not list((tmp_path / "instances").iterdir())


def test_two_pools_do_not_share_a_folder(tmp_path: Path):
    with InstancePool(folder=tmp_path), pytest.raises(PlatformError, match="another platform uses"):
        InstancePool(folder=tmp_path)


CRASHING = """
import os, sys
from pathlib import Path
from palestra.environments.platform.pool import InstancePool
from palestra.environments.platform.pool_records import PoolLimits, InstanceSpec

pool = InstancePool(PoolLimits(max_resident_bytes=200_000), Path(sys.argv[1]))
ids = [pool.create("a", InstanceSpec(app="keys", data="tiny-0", version="v1"), str(n)).id for n in range(6)]
for n, instance_id in enumerate(ids):
    with pool.use(instance_id) as instance:
        instance.call("put", {"value": n})
spilled = [i for i in ids if pool.record(i).instance is None]
print(*(("disk" if i in spilled else "memory") + ":" + i for i in ids), flush=True)
os.kill(os.getpid(), 9)
"""


def test_after_a_crash_what_was_on_disk_goes_on_and_the_rest_ends_cleanly(tmp_path: Path):
    ran = subprocess.run(
        [sys.executable, "-c", CRASHING, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == -9, ran.stderr
    where = [one.split(":") for one in ran.stdout.split()]
    assert {place for place, _ in where} == {"disk", "memory"}
    with (tmp_path / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"id": "cut sh')
    with InstancePool(folder=tmp_path) as pool:
        for number, (place, instance_id) in enumerate(where):
            if place == "disk":
                assert values(pool, instance_id) == [number]
            else:
                assert (pool.record(instance_id).state, pool.record(instance_id).reason) == (
                    InstanceState.ERROR,
                    CRASHED,
                )
        assert pool.usage().instances == sum(place == "disk" for place, _ in where)


def test_the_journal_does_not_grow_without_end(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("palestra.environments.platform.pool.SPARE_LINES", 20)
    with InstancePool(PoolLimits(kept_s=1), tmp_path, clock) as pool:
        for _ in range(50):
            pool.close(pool.create("a", WANTED).id, "a")
            later(pool, clock, 1)
        assert pool.files.lines <= 40


# Many at once


def test_threads_that_play_beside_each_other_lose_nothing(clock: Clock):
    """On fewer places than there are players, so that each call brings an instance back."""
    with InstancePool(PoolLimits(max_resident_bytes=400_000), clock=clock) as pool:
        ids = [pool.create("a", WANTED).id for _ in range(12)]

        def play(seed: int) -> None:
            for n in range(30):
                put(pool, ids[(seed * 5 + n) % len(ids)], seed * 1000 + n)

        players = [threading.Thread(target=play, args=(seed,)) for seed in range(6)]
        for player in players:
            player.start()
        for player in players:
            player.join(60)
        assert sorted(v for i in ids for v in values(pool, i)) == sorted(
            s * 1000 + n for s in range(6) for n in range(30)
        )
        assert pool.usage().resident_bytes == sum(pool.record(i).size_bytes for i in ids if pool.record(i).instance)
