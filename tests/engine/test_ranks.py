"""Several processes as one worker end at the bits of one process, whatever happens to any of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from palestra.types import AdamParams
from palestra.types.engine import OptimStep, Stop
from tests.engine.conftest import Driver
from tests.engine.test_recovery import kill_and_compare

pytestmark = pytest.mark.distributed

TENANTS = 16
Drivers = Callable[..., Driver]


def group(drivers: Drivers, ranks: int, **options: Any) -> Driver:
    """A worker of this many processes; one of a single process has the same gradient shards."""
    devices = ("cpu",) * ranks if ranks > 1 else ()
    options = {"micro_batch_tokens": 48, "gradient_shards": 8, "threads": 1, "device": "cpu", **options}
    return drivers(devices=devices, **options)


def followers(driver: Driver) -> list[psutil.Process]:
    assert driver.process is not None
    return psutil.Process(driver.process.pid).children()


def train_tenants(driver: Driver, steps: int = 3) -> list[Path]:
    """Tenants of mixed sizes by turns, each alone in its batches, half of them with data that begin alike: what they
    end with is promised to the bit."""
    for tenant in range(TENANTS):
        driver.create(f"t{tenant}", rank=(2, 4, 8)[tenant % 3], seed=tenant)
    for step in range(steps):
        for tenant in range(TENANTS):
            for part in range(1 + tenant % 2):
                count, shared = (1, 2, 5, 17, 40)[tenant % 5], 20 * (tenant % 2)
                a_pass = driver.a_pass(count, seed=100 * step + tenant + 7 * part, shared=shared)
                driver.run(f"t{tenant}", a_pass)
            driver.run(f"t{tenant}", OptimStep(adam=AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)))
    return [driver.save(f"t{tenant}", f"saved{tenant}") for tenant in range(TENANTS)]


def test_any_number_of_ranks_ends_at_the_bits_of_one(drivers: Drivers) -> None:
    saved, results = {}, {}
    for ranks in (1, 2, 4):
        driver = group(drivers, ranks)
        driver.start()
        assert len(followers(driver)) == ranks - 1
        saved[ranks] = train_tenants(driver)
        results[ranks] = {name: result.outcome for name, result in driver.results.items()}
        driver.send(Stop())
        assert driver.wait_exit() == 0
    for ranks in (2, 4):
        assert results[ranks] == results[1]
        for ours, theirs in zip(saved[ranks], saved[1], strict=True):
            assert Driver.same_files(ours, theirs), ours


@pytest.mark.parametrize("shard", [1, 2])
def test_killed_groups_end_at_the_same_bits(drivers: Drivers, shard: int) -> None:
    moments = np.random.default_rng(shard).uniform(0.0, 0.4, 4).tolist()
    options = {"gradient_shards": 8, "devices": ("cpu", "cpu"), "device": "cpu", "shard": shard}
    kill_and_compare(drivers, moments, 4, **options)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_base_model_across_ranks_gives_the_bits_of_a_whole_one(
    drivers: Drivers, ranks: int, checkpointing: bool
) -> None:
    saved, sampled = [], []
    for shard in (1, 2):
        driver = group(drivers, ranks if shard > 1 else 1, shard=shard, checkpointing=checkpointing)
        driver.start()
        saved.append(train_tenants(driver, steps=2))
        kept = driver.keep("t3", "s")
        sampled.append([driver.logprobs(), driver.logprobs(kept)])
        driver.send(Stop())
        assert driver.wait_exit() == 0
    assert sampled[0] == sampled[1]
    for ours, theirs in zip(*saved, strict=True):
        assert Driver.same_files(ours, theirs), ours
