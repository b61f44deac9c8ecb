"""A worker in the role of a sampler: it takes adapters by digest, and samples as the trainer does."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from typing import Any

import pytest

from palestra.types.engine import (
    PART_BYTES,
    AdapterPart,
    AdapterPlaced,
    AdapterRefused,
    DropAdapters,
    GetAdapterPart,
    KeptSampler,
    Leaving,
    PlaceAdapter,
    PlacedAdapter,
    SavedAdapter,
    SendAdapter,
    Stop,
)
from tests.engine.conftest import Driver


def fetch(driver: Driver, weights: KeptSampler | SavedAdapter) -> bytes:
    """An adapter's file, as the worker that trains sends it."""
    driver.send(SendAdapter(transfer_id=f"t{len(driver.others)}", weights=weights))
    before = len(driver.others)
    driver.until(lambda: sum(len(p.data) for p in driver.others[before:]) >= size(driver.others[before:]))
    parts = driver.others[before:]
    file = b"".join(part.data for part in parts)
    assert {part.digest for part in parts} == {hashlib.sha256(file).hexdigest()}
    return file


def size(parts: list[AdapterPart]) -> int:
    return parts[0].size_bytes if parts else 1


def next_of(driver: Driver, kind: type) -> Any:
    driver.until(lambda: any(isinstance(message, kind) for message in driver.others))
    found = next(message for message in driver.others if isinstance(message, kind))
    driver.others.remove(found)
    return found


def hand_over(driver: Driver, digest: str, file: bytes) -> None:
    """One part, as it was asked for."""
    wanted = next_of(driver, GetAdapterPart)
    data = file[wanted.offset : wanted.offset + PART_BYTES]
    driver.send(AdapterPart(transfer_id=digest, digest=digest, size_bytes=len(file), offset=wanted.offset, data=data))


@pytest.fixture
def replica(drivers: Callable[..., Driver]) -> Driver:
    driver = drivers(role="sampler")
    driver.start()
    return driver


def test_an_adapter_travels_as_bytes_and_gives_the_same_tokens(driver: Driver, replica: Driver) -> None:
    driver.create("a")
    driver.step("a")
    kept = driver.keep("a", "s")
    driver.step("a", seed=1)  # the frozen weights are not those of today any more
    file, saved = fetch(driver, kept), driver.save("a", "saved")
    assert fetch(driver, kept) == file != fetch(driver, SavedAdapter(folder=str(saved)))
    digest = hashlib.sha256(file).hexdigest()
    replica.send(PlaceAdapter(digest=digest))
    hand_over(replica, digest, file)
    assert next_of(replica, AdapterPlaced) == AdapterPlaced(digest=digest)
    seeded = {"max_tokens": 20, "temperature": 1.0}
    expected = driver.answer(driver.sample(kept, **seeded))
    assert replica.answer(replica.sample(PlacedAdapter(digest=digest), **seeded)) == expected
    assert replica.answer(replica.sample(**seeded)) != expected
    replica.kill()
    assert replica.start().placed == [digest]  # a new process still has it
    assert replica.answer(replica.sample(PlacedAdapter(digest=digest), **seeded)) == expected
    replica.send(DropAdapters(digests=[digest]))
    assert "not at this replica" in replica.answer(replica.sample(PlacedAdapter(digest=digest))).message


def test_what_does_not_match_its_digest_is_fetched_again_and_then_refused(driver: Driver, replica: Driver) -> None:
    driver.create("a")
    file = fetch(driver, driver.keep("a", "s"))
    digest, damaged = hashlib.sha256(file).hexdigest(), file[:-1] + bytes([file[-1] ^ 1])
    replica.send(PlaceAdapter(digest=digest))
    hand_over(replica, digest, damaged)
    hand_over(replica, digest, file)
    assert next_of(replica, AdapterPlaced).error == ""
    replica.send(DropAdapters(digests=[digest]))
    replica.send(PlaceAdapter(digest=digest))
    for _ in range(3):
        hand_over(replica, digest, damaged)
    assert "does not match its digest, 3 times" in next_of(replica, AdapterPlaced).error
    replica.send(PlaceAdapter(digest=digest))
    replica.send(AdapterPart(transfer_id=digest, digest=digest, size_bytes=0, offset=0, data=b""))
    assert "no longer has it" in next_of(replica, AdapterPlaced).error
    assert replica.answer(replica.sample()).sequences


def test_an_adapter_is_waited_for_and_one_that_is_gone_is_refused(driver: Driver) -> None:
    driver.create("a")
    long = driver.train("a", driver.a_pass(100))
    kept = driver.keep("a", "s")
    assert len(fetch(driver, kept)) > 1000
    assert long in driver.results
    driver.send(SendAdapter(transfer_id="x", weights=KeptSampler(sampler_id="none", model_id="a", seq_id=0)))
    driver.others.clear()
    refused = next_of(driver, AdapterRefused)
    assert (refused.transfer_id, refused.failure.blame) == ("x", "user")
    assert "no longer exists" in refused.failure.message


def test_a_replica_that_is_asked_to_end_finishes_its_samples(replica: Driver) -> None:
    names = [replica.sample(max_tokens=300) for _ in range(3)]
    replica.until(lambda: any(stats.running_samples for stats in replica.stats))
    assert replica.process is not None
    replica.process.send_signal(signal.SIGTERM)
    next_of(replica, Leaving)
    assert [len(replica.answer(name).sequences[0].tokens) for name in names] == [300] * 3
    replica.send(Stop())
    assert replica.wait_exit() == 0
