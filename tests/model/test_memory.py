"""What training holds in memory at once: counted tensor by tensor, by asking torch about every operation."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from palestra.model import TrainItem
from palestra.types import SampleRequest, SamplingParams


class Allocations(TorchDispatchMode):
    """Remembers the size of every tensor an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize(
    ("active", "name"),
    [
        (1.0, "cross_entropy"),
        (0.3, "gspo"),
        pytest.param(0.3, "cross_entropy", marks=pytest.mark.slow),
        pytest.param(1.0, "gspo", marks=pytest.mark.slow),
    ],
)
def test_full_logits_never_exist_at_once(get_bench, name, active):
    """With 500 tokens and 20,000 words they would have ten million cells; the weights have 1.28 million."""
    bench = get_bench(vocab_size=20_000)
    n, adapter = 500, bench.adapter()
    gate = np.where(bench.rng.random(n) < active, 1.0, 0.0)
    inputs = {"weights": gate} if name == "cross_entropy" else {"advantages": gate, "logprobs": np.full(n, -9.0)}
    items = [TrainItem(adapter, bench.datum(n, **inputs), name)]
    with Allocations() as seen:
        bench.trainer.forward_backward(items)
        bench.trainer.forward(items)
    assert 20_000 < seen.largest < n * bench.vocab / 3


def test_full_prompt_logits_never_exist_at_once(get_bench):
    bench = get_bench(vocab_size=20_000)
    sampler = bench.sampler()
    request = SampleRequest(
        prompt=tuple(bench.tokens(500)),
        params=SamplingParams(max_tokens=1),
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
    )
    with Allocations() as seen:
        sampler.generate([request], [bench.adapter()])
    assert 20_000 < seen.largest < 500 * bench.vocab / 3


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made in here held at any one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        mine = {a.untyped_storage()._cdata for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)}
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage._cdata in mine or storage._cdata in self._known:
                continue
            self._known.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_bytes(work) -> int:
    with LiveBytes() as seen:
        work()
    return seen.peak


def test_activation_checkpointing_needs_less_memory(get_bench):
    peaks = []
    for checkpointing in (False, True):
        bench = get_bench(overrides={"num_hidden_layers": 6}, checkpointing=checkpointing)
        items = bench.items([bench.adapter(rank=4)], [400])
        bench.trainer.forward_backward(items)  # gradient rows exist now
        peaks.append(peak_bytes(lambda b=bench, i=items: b.trainer.forward_backward(i)))
    assert peaks[1] < 0.6 * peaks[0]


def test_peak_memory_follows_the_budget_and_not_the_request(get_bench):
    peaks = []
    for count in (4, 16):
        bench = get_bench(token_budget=100)
        items = bench.items([bench.adapter()], [50] * count)
        bench.trainer.forward_backward(items)
        peaks.append(peak_bytes(lambda b=bench, i=items: b.trainer.forward_backward(i)))
    assert peaks[1] < 1.1 * peaks[0]
