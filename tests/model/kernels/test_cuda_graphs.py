"""A step from fixed buffers has the bits of a step that is launched kernel by kernel. On a CPU nothing can be recorded:
the forward pass over the buffers runs again at every replay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from palestra.model import AdapterPool, Sampler, load_model
from palestra.types import LoraConfig, SampledSequence, SampleRequest, SamplingParams
from tests.model.conftest import GEMMA4

ROWS = 8
OPTIONS = {"gemma4": {"tie": True, "overrides": GEMMA4}}


class Repeated:
    def __init__(self, forward: Callable[[], Tensor]):
        self.forward, self.hidden, self.replays = forward, forward(), 0

    def replay(self) -> None:
        self.hidden.copy_(self.forward())
        self.replays += 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_moe", "gpt_oss", "nemotron_h", "gemma4", "gemma4_moe"])
@pytest.mark.usefixtures("with_kernels")
def test_a_recorded_step_has_the_bits_of_one_that_is_not(
    random_model: Callable[..., Path], family: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill beside decoding rows, two adapters and the base model, a prompt that two samples share."""
    from palestra.model.sampling import cuda_graphs

    monkeypatch.setattr(cuda_graphs, "PREFILL_SIZES", (48,))
    model = load_model(
        random_model(family, **OPTIONS.get(family, {})), dtype=str(dtype).removeprefix("torch."), device=device
    )
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device=device)
    adapters = [pool.create(LoraConfig(rank=rank, seed=rank)) for rank in (4, 6)]
    for adapter in adapters:
        pool.before_change(adapter)
        adapter.row("weights").normal_(0, 0.05, generator=torch.Generator(device).manual_seed(1))
        pool.after_change(adapter)
    recorded: list[Repeated] = []

    def record(forward: Callable[[], Tensor]) -> Repeated:
        recorded.append(Repeated(forward))
        return recorded[-1]

    def play(*, with_graphs: bool) -> list[list[SampledSequence]]:
        sampler = Sampler(model.decoder, pool, cache_tokens=512, max_rows=ROWS, prefill_tokens=24)
        sampler.graphs = None
        if with_graphs:
            sampler.graphs = cuda_graphs.StepGraphs(model.decoder, sampler.cache, sampler.states, ROWS, record)
        params = SamplingParams(max_tokens=2, seed=1, stop_token_ids=())
        requests = [
            SampleRequest(prompt=tuple(range(40, 40 + n)), num_samples=k, params=params) for n, k in ((19, 2), (30, 1))
        ]
        results = sampler.generate([*requests, requests[0]], [*adapters, None])
        return [result.sequences for result in results]

    assert play(with_graphs=True) == play(with_graphs=False)
    assert {step.hidden.shape[0] for step in recorded if step.replays} == {64 if model.spec.experts else 32, 48}
