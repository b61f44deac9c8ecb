"""Real processes that are killed: nothing acknowledged is lost, nothing is applied twice."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.types import LoraConfig
from palestra.types.engine import (
    Blame,
    CreateModel,
    DropModel,
    EngineFailure,
    KeepSampler,
    KeptSampler,
    SaveWeights,
    Stop,
    Stored,
)


def work(driver: Any, model_id: str, rounds: int) -> list[str]:
    """Creation, then rounds of passes, steps and a sampler; everything is sent at once."""
    ids = [driver.train(model_id, CreateModel(lora=LoraConfig(rank=4, seed=5)))]
    for i in range(rounds):
        ids += [
            driver.train(model_id, driver.a_pass(30 + i, seed=i)),
            driver.train(model_id, driver.a_pass(8, seed=50 + i, shared=24)),
        ]
        ids += [driver.train(model_id, driver.optim), driver.train(model_id, KeepSampler(sampler_id=f"{model_id}-{i}"))]
    folder = driver.folder / f"{model_id}-saved"
    return [*ids, driver.train(model_id, SaveWeights(folder=str(folder), optimizer=True))]


def kill_and_compare(
    drivers: Callable[..., Any], moments: list[float], rounds: int, *model: Path, **options: Any
) -> None:
    """The same work twice: undisturbed, and with the worker killed at these shares of the time it took."""
    driver = drivers(*model, micro_batch_tokens=64, snapshot_every_s=0.05, **options)
    driver.start()
    ids = work(driver, "calm", rounds)
    driver.result(ids[0])
    start = time.monotonic()
    driver.result(ids[-1])
    whole = time.monotonic() - start
    expected = [driver.results[i].outcome for i in ids]
    driver.send(DropModel(model_id="calm"))
    del driver.requests["calm"]
    ids = work(driver, "wild", rounds)
    driver.result(ids[0])
    for moment in moments:
        deadline = time.monotonic() + moment * whole
        while time.monotonic() < deadline:
            driver.pump(0.001)
        driver.restart()
    driver.result(ids[-1])
    driver.until(lambda: all(i in driver.results for i in ids))
    found = [driver.results[i].outcome for i in ids]
    for a, b in zip(expected[:-1], found[:-1], strict=True):
        assert a == b
    assert driver.same_files(driver.folder / "calm-saved", driver.folder / "wild-saved")
    assert not list(driver.folder.glob(".*.partial"))
    for i in range(rounds):
        last = [driver.logprobs(kept(driver, name, i)) for name in ("calm", "wild")]
        assert last[0] == last[1]


def kept(driver: Any, model_id: str, i: int) -> Any:
    return KeptSampler(sampler_id=f"{model_id}-{i}", model_id=model_id, seq_id=4 * i + 4)


@pytest.mark.slow
def test_killed_workers_end_at_the_same_bits(drivers: Callable[..., Any]) -> None:
    kill_and_compare(drivers, [0.1, 0.5], rounds=3)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_killed_workers_of_models_with_experts_end_at_the_same_bits(
    drivers: Callable[..., Any], random_model: Callable[..., Path], family: str
) -> None:
    kill_and_compare(drivers, [0.2, 0.5], 2, random_model(family))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_workers_killed_at_any_moment_end_at_the_same_bits(drivers: Callable[..., Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    kill_and_compare(drivers, rng.uniform(0.0, 0.4, 8).tolist(), rounds=6)


def test_a_new_server_adopts_the_worker_with_its_results(drivers: Callable[..., Any]) -> None:
    driver = drivers(micro_batch_tokens=64)
    first = driver.start()
    driver.create("a")
    driver.send(Stored(request_ids=["a/0"]))
    ids = [driver.train("a", driver.a_pass(20, seed=i)) for i in range(3)]
    lost = driver.sample(max_tokens=2000)
    driver.result(ids[0])
    driver.die()
    time.sleep(0.5)  # it goes on without us
    driver.open()
    start = time.monotonic()
    hello = driver.welcome()
    assert time.monotonic() - start < 2.5  # a server that starts gives a living worker 3 s
    assert hello.worker_id == first.worker_id
    assert [m.received_seq for m in hello.models] == [3]
    unstored = [r.request_id for r in hello.unstored]
    assert unstored == ids[: len(unstored)] != []  # how far it came without us is chance
    driver.send(driver.requests["a"][1])  # again: answered, not applied
    assert driver.result(ids[0]) == hello.unstored[0].outcome
    later = driver.train("a", driver.optim)
    assert driver.result(later).metrics["grad_norm"] > 0
    driver.answer(driver.sample())
    assert lost not in driver.sampled


def test_stop_keeps_every_model_as_of_its_last_request(drivers: Callable[..., Any]) -> None:
    driver = drivers(micro_batch_tokens=64, snapshot_every_s=1000.0)
    driver.start()
    driver.create("a")
    driver.result(driver.train("a", driver.a_pass(5)))
    driver.train("a", driver.a_pass(800))  # seconds: nobody waits for it
    driver.pump(0.2)
    driver.send(Stop())
    assert driver.wait_exit() == 0
    assert driver.snapshots == {"a": 1}  # not the second pass: it was not waited for
    hello = driver.start()
    assert [(m.received_seq, m.applied_seq) for m in hello.models] == [(1, 1)]
    assert [r.request_id for r in hello.unstored] == ["a/0", "a/1"]


def test_a_full_disk_fails_the_save_and_nothing_else(drivers: Callable[..., Any]) -> None:
    driver = drivers(snapshot_every_s=0.2)
    driver.start()
    driver.create("a")
    driver.create("b", seed=8)
    assert driver.process is not None
    limits = resource.prlimit(driver.process.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    driver.step("a")
    outcome = driver.run("a", SaveWeights(folder=str(driver.folder / "c" / "x"), optimizer=True))
    assert isinstance(outcome, EngineFailure)
    assert (outcome.blame, "could not be written" in outcome.message) == (Blame.SERVER, True)
    assert not list((driver.folder / "c").iterdir())
    for request in driver.step("b"):
        assert not isinstance(driver.result(request), EngineFailure)
    assert driver.snapshots.get("a", -1) < 3
    resource.prlimit(driver.process.pid, resource.RLIMIT_FSIZE, limits)
    driver.until(lambda: driver.snapshots.get("a") == 3)
    assert driver.save("a", "c/x").is_dir()
    assert not list(Path(driver.config.state, "models").glob("*.partial"))
