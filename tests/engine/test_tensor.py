"""Several processes that compute every layer together sample and train as one process does, whatever happens to any of
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from msgspec import json, structs
from safetensors.numpy import load_file

from palestra.engine.ranks.group_backend import GroupBackend
from palestra.types import AdamParams, LoraConfig, SampleRequest, SamplingParams
from palestra.types.engine import (
    CreateModel,
    EngineFailure,
    LoadWeights,
    OptimStep,
    Sample,
    SavedAdapter,
    Stop,
    WorkerConfig,
)
from tests.engine.conftest import Driver
from tests.engine.test_group_of_one import train_and_sample
from tests.engine.test_recovery import kill_and_compare

pytestmark = pytest.mark.distributed

Drivers = Callable[..., Driver]
LORA = LoraConfig(rank=4, seed=7, train_attn=True, train_mlp=True, train_unembed=True)


@pytest.fixture(scope="module")
def model(random_model: Any) -> Path:
    """With as many heads as there are ranks at most."""
    return random_model(overrides={"num_attention_heads": 8, "num_key_value_heads": 4})


def group(drivers: Drivers, model: Path, tensor: int, data: int = 1, **options: Any) -> Driver:
    ranks = tensor * data
    devices = ("cpu",) * ranks if ranks > 1 else ()
    options = {"micro_batch_tokens": 48, "gradient_shards": 8, "threads": 1, "device": "cpu", **options}
    driver = drivers(model, devices=devices, tensor=tensor, **options)
    driver.start()
    return driver


def end(driver: Driver) -> None:
    driver.send(Stop())
    assert driver.wait_exit() == 0


def train(driver: Driver, steps: int = 4, *, first: int = 0) -> None:
    for step in range(first, first + steps):
        for part in range(1 + step % 2):
            outcome = driver.run("m", driver.a_pass((1, 5, 17, 30)[step % 4], seed=10 * step + part, shared=20 * part))
            assert not isinstance(outcome, EngineFailure), outcome
        driver.run("m", OptimStep(adam=AdamParams(learning_rate=1e-2, grad_clip_norm=0.5)))


def sample_all(driver: Driver, folder: Path) -> list[Any]:
    """Sixteen sequences of an adapter and four of the base model at once: greedy and seeded, short prompts and long
    ones, with a common beginning and without."""
    rng = np.random.default_rng(5)
    common, names = rng.integers(5, 300, 37).tolist(), []
    for number in range(10):
        prompt = [*common[: 37 * (number % 2)], *rng.integers(5, 300, 3 + 5 * number).tolist()]
        temperature = 0.0 if number % 3 == 0 else 1.0
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=number, stop_token_ids=(), top_p=0.95)
        request = SampleRequest(prompt=tuple(prompt), num_samples=2, params=params, prompt_logprobs=number % 2 == 0)
        weights = SavedAdapter(folder=str(folder)) if number < 8 else driver.a_sample().weights
        sample = Sample(request_id=f"s{number}", weights=weights, request=request)
        driver.send(sample)
        names.append(sample.request_id)
    outcomes = [driver.answer(name) for name in names]
    assert not any(isinstance(outcome, EngineFailure) for outcome in outcomes), outcomes
    return outcomes


def matrices(folder: Path) -> dict[str, Any]:
    return load_file(folder / "adapter_model.safetensors")


def assert_close(a: Path, b: Path, within: float = 1e-5) -> None:
    ours, theirs = matrices(a), matrices(b)
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], atol=within, err_msg=name)


def test_any_number_of_ranks_draws_the_tokens_of_one(drivers: Drivers, model: Path) -> None:
    compare_samples(drivers, model, (2, 1), (4, 1), (2, 2))


def test_two_ranks_that_share_every_expert_draw_the_tokens_of_one(drivers: Drivers, random_model: Any) -> None:
    compare_samples(drivers, random_model("qwen3_moe"), (2, 1))


def compare_samples(drivers: Drivers, model: Path, *shapes: tuple[int, int]) -> None:
    alone = group(drivers, model, 1)
    alone.run("m", CreateModel(lora=LORA))
    train(alone)
    saved = alone.save("m", "saved")
    expected = sample_all(alone, saved)
    end(alone)
    for tensor, data in shapes:
        driver = group(drivers, model, tensor, data)
        assert driver.process is not None
        assert len(psutil.Process(driver.process.pid).children()) == tensor * data - 1
        for ours, theirs in zip(sample_all(driver, saved), expected, strict=True):
            for one, other in zip(ours.sequences, theirs.sequences, strict=True):
                assert one.tokens == other.tokens
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
            if theirs.prompt_logprobs:
                np.testing.assert_allclose(ours.prompt_logprobs[1:], theirs.prompt_logprobs[1:], atol=1e-5)
        end(driver)


def test_training_ends_near_one_process_and_at_the_same_bits_every_time(drivers: Drivers, model: Path) -> None:
    saved, losses = {}, {}
    for run, (tensor, data) in enumerate(((1, 1), (2, 1), (2, 1), (2, 2), (4, 1))):
        driver = group(drivers, model, tensor, data)
        driver.run("m", CreateModel(lora=LORA))
        train(driver)
        saved[run] = driver.save("m", "saved")
        losses[run] = [result.outcome for result in driver.results.values()][1:-1]
        end(driver)
    for run in (1, 4):
        assert_close(saved[run], saved[0])
    for run in (2, 3):  # the same again, and with micro-batches on two groups
        assert losses[run] == losses[1]
        assert Driver.same_files(saved[run], saved[1])


def test_a_model_is_sampled_from_while_it_trains(drivers: Drivers, model: Path) -> None:
    """Followers alias the weights of the model until it changes, and copy them then."""
    found = []
    for tensor in (1, 2):
        driver = group(drivers, model, tensor)
        driver.run("m", CreateModel(lora=LORA))
        train(driver, 1)
        saved = driver.save("m", "saved")
        train(driver, 1, first=1)
        first = driver.keep("m", "first")
        names = [driver.sample(first, max_tokens=300, n=2)]
        driver.run("m", LoadWeights(folder=str(saved), optimizer=True))
        train(driver, 2, first=2)
        names += [driver.sample(driver.keep("m", "second")), driver.sample(first), driver.sample()]
        found.append([driver.answer(name).sequences for name in names])
        end(driver)
    for ours, theirs in zip(*found, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.tokens == other.tokens
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)


def test_a_checkpoint_of_one_number_of_ranks_goes_on_with_another(drivers: Drivers, model: Path) -> None:
    whole = group(drivers, model, 1)
    whole.run("m", CreateModel(lora=LORA))
    train(whole, 6)
    expected = whole.save("m", "saved")
    folder = None
    for tensor, first in ((2, 0), (1, 2), (4, 4)):
        driver = group(drivers, model, tensor)
        driver.run("m", CreateModel(lora=LORA))
        if folder is not None:
            driver.run("m", LoadWeights(folder=str(folder), optimizer=True))
        train(driver, 2, first=first)
        folder = driver.save("m", "saved")
        end(driver)
    assert folder is not None
    assert_close(folder, expected, within=5e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_running_ahead_and_recomputing_change_no_bit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """As on a GPU: steps begin before the tokens of the last one are read."""
    found = []
    for is_other in (False, True):
        config = WorkerConfig(
            address=f"ipc://{tmp_path}/link",
            model=str(model),
            state=str(tmp_path / "state"),
            devices=("cpu", "cpu"),
            tensor=2,
            dtype=dtype,
            threads=1,
            micro_batch_tokens=48,
            cache_tokens=1024,
            max_sample_rows=8,
            checkpointing=is_other,
        )
        monkeypatch.setenv("PALESTRA_WORKER", json.encode(config).decode())  # for the follower
        backend = GroupBackend(config)
        backend.sampler.runs_ahead = is_other
        found.append(train_and_sample(backend))
        backend.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("data", [1, 2])
def test_killed_groups_end_at_the_same_bits(drivers: Drivers, data: int) -> None:
    moments = np.random.default_rng(data).uniform(0.0, 0.4, 3).tolist()
    kill_and_compare(drivers, moments, 4, gradient_shards=8, devices=("cpu",) * 2 * data, device="cpu", tensor=2)


def test_a_state_folder_of_another_number_is_refused_unless_told(drivers: Drivers, model: Path) -> None:
    driver = group(drivers, model, 2)
    driver.run("m", CreateModel(lora=LORA))
    train(driver, 1)
    saved = driver.save("m", "saved")
    end(driver)
    driver.config = structs.replace(driver.config, devices=(), tensor=1)
    with pytest.raises(AssertionError, match=r"trained with parallel\.tensor=2, and now it is 1"):
        driver.start()
    driver.config = structs.replace(driver.config, allow_tensor_mismatch=True)
    driver.restart()
    assert Driver.same_files(driver.save("m", "again"), saved)
