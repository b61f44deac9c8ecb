"""A whole server on a GPU: the official clients, bits that survive kill -9, a crowd, and memory that runs out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tinker
import torch
from tinker import types

from tests.server.conftest import KEY, NAME, Server
from tests.server.test_faults import assert_same_bits, batch, repeatedly, train, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
START_S = 300.0  # kernels are compiled at the first start
CROWD = 1000
FAMILIES = ("qwen3", "qwen3_moe", "qwen3_5", "nemotron_h")
"""Dense, with experts, with delta nets, with Mamba-2 and experts."""
MakeServer = Callable[..., Server]


class GpuServer(Server):
    device = "cuda"

    def start(self) -> Server:
        self.launch()
        self.wait_ready(START_S)
        return self


def make_model(folder: Path, family: str = "qwen3") -> Path:
    from palestra.testing.random_model import make_random_model

    return make_random_model(folder, family=family, shape="small", dtype="bfloat16")


@pytest.fixture(scope="module", params=FAMILIES)
def gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(folder / "model", request.param)
    with GpuServer(folder / "server", model, "models.0.cache_tokens=200000") as server:
        yield server.start()


def test_sampled_logprobs_are_the_trainers_bits(gpu: Server) -> None:
    """Through the official SDK, after a step, so that the adapter is not zero."""
    model = gpu.client().create_lora_training_client(base_model=NAME, rank=16, seed=3)
    model.forward_backward(batch(0), "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    sampler = model.save_weights_and_get_sampling_client()
    prompt = np.random.default_rng(0).integers(5, 8000, 700).tolist()
    params = types.SamplingParams(max_tokens=40, seed=5, stop=[])
    result = sampler.sample(types.ModelInput.from_ints(prompt), num_samples=8, sampling_params=params).result()
    for sequence in result.sequences:
        tokens = [*prompt, *sequence.tokens]
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        (output,) = model.forward([datum], "cross_entropy").result().loss_fn_outputs
        trained = output["logprobs"].to_numpy()[len(prompt) - 1 :]
        assert trained.astype(np.float32).tolist() == np.float32(sequence.logprobs or []).tolist()


def test_a_killed_worker_ends_at_the_same_bits(gpu: Server) -> None:
    run = train(gpu.client())
    truth = weights(gpu, run)

    def kill() -> None:
        gpu.wait_worker(other_than=gpu.kill_worker(), timeout_s=START_S)

    with repeatedly(kill, every_s=(0.5, 2.0), times=2):
        again = train(gpu.client())
    assert again.losses == run.losses
    assert_same_bits(weights(gpu, again), truth)


@pytest.mark.parametrize("gpu", ["qwen3"], indirect=True)
def test_a_crowd_of_chats_is_answered_and_a_seeded_one_does_not_notice(gpu: Server) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": f"Say {number} in other words. " * (1 + number % 5)}],
            seed=number,
            max_tokens=32,
            stream=True,
            logprobs=number % 2 == 0,
            top_p=0.9 if number % 3 == 0 else 1.0,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    async def crowd() -> tuple[list[str], str]:
        async with openai.AsyncOpenAI(base_url=f"{gpu.url}/v1", api_key=KEY, timeout=300, max_retries=0) as client:
            alone = await ask(client, 7)
            return await asyncio.gather(*(ask(client, n) for n in range(CROWD))), alone

    texts, alone = asyncio.run(crowd())
    assert len(texts) == CROWD
    assert texts[7] == alone


@pytest.fixture
def short_of_memory(tmp_path: Path) -> Iterator[Server]:
    with GpuServer(tmp_path / "server", make_model(tmp_path / "model"), "models.0.cache_tokens=512") as server:
        server.sabotage("""
            import torch
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(2.0e9 / total)
        """)
        yield server.start()


def test_what_does_not_fit_is_refused_or_computed_with_less_memory(short_of_memory: Server) -> None:
    server = short_of_memory
    model = server.client().create_lora_training_client(base_model=NAME, rank=8, seed=1)
    data = []
    for seed in range(16):
        tokens = np.random.default_rng(seed).integers(5, 8000, 513).tolist()
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * 512}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    result = model.forward_backward(data, "cross_entropy").result(timeout=100)
    assert len(result.loss_fn_outputs) == 16
    assert "checkpointing" in server.worker_log.read_text()
    model.optim_step(types.AdamParams(learning_rate=1e-3)).result(timeout=100)

    sampler, prompt = model.save_weights_and_get_sampling_client(), types.ModelInput.from_ints(list(range(5, 50)))
    going_on, too_large = (
        sampler.sample(prompt, num_samples=n, sampling_params=types.SamplingParams(max_tokens=tokens, stop=[]))
        for n, tokens in ((4, 200), (1, 1000))
    )
    with pytest.raises(tinker.RequestFailedError, match="ask for fewer tokens"):
        too_large.result(timeout=60)
    assert all(len(s.tokens) == 200 for s in going_on.result(timeout=60).sequences)
