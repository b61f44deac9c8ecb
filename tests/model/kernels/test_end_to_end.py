"""A whole model through the kernels: gradients as in float32, and the sampler's bits are the trainer's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from palestra.model import Adapter, AdapterPool, Sampler, Trainer, TrainItem, encode, load_model
from palestra.types import Datum, LoraConfig, SampleRequest, SamplingParams
from tests.model.conftest import GEMMA4

PROMPT = tuple(range(40, 71))
OPTIONS = {"gemma4": {"tie": True, "overrides": GEMMA4}}


@dataclass
class Side:
    trainer: Trainer
    adapters: list[Adapter]

    def logprobs(self, adapter: Adapter | None, tokens: list[int]) -> list[float]:
        datum = Datum.of_tokens(tokens[:-1], target_tokens=encode(np.array(tokens[1:])))
        return self.trainer.forward([TrainItem(adapter, datum)])[0].logprobs.tolist()


def open_side(folder: Path, dtype: str, device: str) -> Side:
    model = load_model(folder, dtype=dtype, device=device)
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device=device)
    adapters = [pool.create(LoraConfig(rank=rank, seed=i)) for i, rank in enumerate((4, 6))]
    for i, adapter in enumerate(adapters):
        pool.before_change(adapter)
        noise = torch.randn(adapter.stack.layout.size, generator=torch.Generator().manual_seed(i)) * 0.05
        adapter.row("weights").copy_(noise)
        pool.after_change(adapter)
    return Side(Trainer(model.decoder, pool), adapters)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "gemma4"])
@pytest.mark.usefixtures("with_kernels")
def test_gradients_agree_with_float32(
    random_model: Callable[..., Path], family: str, device: str, dtype: torch.dtype
) -> None:
    folder = random_model(family, **OPTIONS.get(family, {}))
    rng = np.random.default_rng(0)
    lengths = (5, 12)
    tokens = [rng.integers(0, 500, n + 1) for n in lengths]
    sides = [open_side(folder, name, device) for name in (str(dtype).removeprefix("torch."), "float32")]
    results = [
        side.trainer.forward_backward(
            [
                TrainItem(adapter, Datum.of_tokens(t[:-1].tolist(), target_tokens=encode(t[1:])))
                for adapter, t in zip(side.adapters, tokens, strict=True)
            ]
        )
        for side in sides
    ]
    for ours, truth in zip(*results, strict=True):
        assert np.abs(ours.logprobs - truth.logprobs).max() < 0.2
    for ours, truth in zip(sides[0].adapters, sides[1].adapters, strict=True):
        assert torch.cosine_similarity(ours.row("grads"), truth.row("grads"), 0) > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "deepseek_v3", "gemma4"])
@pytest.mark.usefixtures("with_kernels")
def test_sampled_logprobs_are_the_trainers_bits(
    random_model: Callable[..., Path], family: str, device: str, dtype: torch.dtype
) -> None:
    """Through chunked prefill, a shared prompt, and batches that mix adapters and the base model."""
    side = open_side(random_model(family, **OPTIONS.get(family, {})), str(dtype).removeprefix("torch."), device)
    sampler = Sampler(side.trainer.decoder, side.trainer.pool, cache_tokens=512, prefill_tokens=24)
    request = SampleRequest(
        prompt=PROMPT, num_samples=2, params=SamplingParams(max_tokens=4, seed=1, stop_token_ids=())
    )
    adapters = [*side.adapters, None]
    for adapter, result in zip(adapters, sampler.generate([request] * 3, adapters), strict=True):
        for sequence in result.sequences:
            trained = side.logprobs(adapter, [*PROMPT, *sequence.tokens])
            assert trained[len(PROMPT) - 1 :] == sequence.logprobs
