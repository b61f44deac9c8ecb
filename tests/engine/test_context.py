"""Several processes that compute every micro-batch together train as one process does, whatever happens to any of
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from palestra.types import LoraConfig
from palestra.types.engine import CreateModel, EngineFailure
from tests.engine.conftest import Driver
from tests.engine.test_recovery import kill_and_compare
from tests.engine.test_tensor import LORA, assert_close, end, sample_all, train

pytestmark = pytest.mark.distributed

Drivers = Callable[..., Driver]


@pytest.fixture(scope="module")
def model(random_model: Any) -> Path:
    return random_model(overrides={"num_attention_heads": 8, "num_key_value_heads": 4})


def group(
    drivers: Drivers, model: Path, context: int, data: int = 1, tensor: int = 1, shard: int = 1, **options: Any
) -> Driver:
    ranks = context * data * tensor
    devices = ("cpu",) * ranks if ranks > 1 else ()
    shape = {"devices": devices, "context": context, "tensor": tensor, "shard": shard}
    options = {"micro_batch_tokens": 48, "gradient_shards": 8, "threads": 1, "device": "cpu", **options}
    driver = drivers(model, **shape, **options)
    driver.start()
    return driver


def trained(driver: Driver) -> tuple[Path, list[Any]]:
    driver.run("m", CreateModel(lora=LORA))
    train(driver)
    saved = driver.save("m", "saved")
    outcomes = [result.outcome for result in driver.results.values()][1:-1]
    assert not any(isinstance(outcome, EngineFailure) for outcome in outcomes), outcomes
    return saved, outcomes


@pytest.mark.parametrize(
    "shapes",  # context, data, tensor and shard; the second is the first, recomputed and in other places
    [((2, 1, 1), (2, 1, 1, 2)), ((2, 1, 1), (2, 2, 1, 4)), ((2, 1, 1), (2, 2, 1)), ((4,),), ((2, 1, 2), (2, 1, 2))],
    ids=["divided base", "divided base of two groups", "two groups", "four ranks", "with tensor"],
)
def test_training_ends_near_one_process_and_at_the_same_bits_every_time(
    drivers: Drivers, model: Path, shapes: tuple[tuple[int, ...], ...]
) -> None:
    alone = group(drivers, model, 1)
    expected, losses = trained(alone)
    samples = sample_all(alone, expected)
    end(alone)
    found = []
    for shape in shapes:
        driver = group(drivers, model, *shape, checkpointing=bool(found))
        found.append(trained(driver))
        for ours, theirs in zip(sample_all(driver, expected), samples, strict=True):
            assert [one.tokens for one in ours.sequences] == [one.tokens for one in theirs.sequences]
        end(driver)
        for ours, theirs in zip(found[-1][1], losses, strict=True):
            if hasattr(theirs, "outputs"):
                for one, other in zip(ours.outputs, theirs.outputs, strict=True):
                    own, its = (np.frombuffer(output.logprobs, "<f4") for output in (one, other))
                    np.testing.assert_allclose(own, its, atol=5e-5)
        assert_close(found[-1][0], expected)
    for saved, outcomes in found[1:]:
        assert outcomes == found[0][1]
        assert Driver.same_files(saved, found[0][0])


@pytest.mark.parametrize(("context", "data"), [(1, 2), (2, 1)])
def test_the_head_alone_trains_where_the_base_model_lies_across_ranks(
    drivers: Drivers, model: Path, context: int, data: int
) -> None:
    """A rank without a part runs one token with another adapter, whose layers must not wait for ranks that have none
    to train."""
    found = []
    for shape in ((1,), (context, data, 1, 2)):
        driver = group(drivers, model, *shape)
        driver.run("m", CreateModel(lora=LoraConfig(rank=4, seed=1, train_attn=False, train_mlp=False)))
        train(driver, 2)
        found.append(driver.save("m", "saved"))
        end(driver)
    assert_close(*found)


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v3", "qwen3_moe"])
def test_models_that_mix_otherwise_train_too(drivers: Drivers, random_model: Any, family: str) -> None:
    found = []
    for context in (1, 2):
        driver = group(drivers, random_model(family), context)
        found.append(trained(driver)[0])
        end(driver)
    assert_close(*found)


@pytest.mark.parametrize("data", [1, 2])
def test_killed_groups_end_at_the_same_bits(drivers: Drivers, data: int) -> None:
    moments = np.random.default_rng(data).uniform(0.0, 0.4, 3).tolist()
    kill_and_compare(drivers, moments, 4, gradient_shards=8, devices=("cpu",) * 2 * data, device="cpu", context=2)


def test_a_state_folder_of_another_number_is_refused_unless_told(drivers: Drivers, model: Path) -> None:
    driver = group(drivers, model, 2)
    driver.run("m", CreateModel(lora=LORA))
    train(driver, 1)
    saved = driver.save("m", "saved")
    end(driver)
    driver.config = structs.replace(driver.config, devices=(), context=1)
    with pytest.raises(AssertionError, match=r"trained with parallel\.context=2, and now it is 1"):
        driver.start()
    driver.config = structs.replace(driver.config, allow_context_mismatch=True)
    driver.restart()
    assert Driver.same_files(driver.save("m", "again"), saved)


def test_heads_that_cannot_be_divided_are_refused_at_the_start(drivers: Drivers, random_model: Any) -> None:
    with pytest.raises(AssertionError, match=r"parallel\.context=4 does not divide this model: it has 2 groups"):
        group(drivers, random_model("nemotron_h"), 4)
