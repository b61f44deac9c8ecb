"""Micro-batches that several ranks compute together, each a part of the rows, give what one process gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from palestra.model import AdapterPool, ModelError, ModelSpec, Trainer, TrainItem, encode, load_model
from palestra.model.context_group import LEAST_ROWS, ContextGroup, ContextRows
from palestra.model.loading.context_parallel import require_divisible_heads
from palestra.model.training.trainer import DatumResult
from palestra.types import Checkpointing, Datum, LoraConfig, RoutedExperts
from tests.model.conftest import GEMMA4
from tests.model.context_ranks import on_ranks

KINDS: dict[str, dict[str, Any]] = {  # what attends, or mixes otherwise
    "qwen3": {},
    "gemma3": {},  # windows
    "gpt_oss": {},  # sinks, windows and experts
    "deepseek_v3": {},  # one compressed row for all heads
    "qwen3_next": {},  # delta nets
    "nemotron_h": {},  # Mamba, and layers with one half
    "gemma4": {"overrides": GEMMA4},  # layers that read the keys of others
}
EVERYDAY = ("qwen3", "gpt_oss", "qwen3_next")
BOTH = LoraConfig(rank=4, seed=1)
UNEMBED_ALONE = LoraConfig(rank=2, seed=2, train_attn=False, train_mlp=False)


@dataclass
class Work:
    """Requests as data of two adapters, of which one trains the head alone."""

    folder: Path
    checkpointing: Checkpointing = False
    share_prefixes: bool = True
    vocab: int = 512

    def life(self, data: list[tuple[int, str, Datum]], context: ContextGroup | None) -> Found:
        decoder = load_model(self.folder).decoder
        pool = AdapterPool(decoder.spec)
        options: Any = {"checkpointing": self.checkpointing, "share_prefixes": self.share_prefixes}
        trainer = Trainer(decoder, pool, token_budget=1024, context=context, **options)
        adapters = [pool.create(config) for config in (BOTH, UNEMBED_ALONE)]
        for n, adapter in enumerate(adapters):
            noise = torch.randn(adapter.stack.layout.size, generator=torch.Generator().manual_seed(n))
            pool.before_change(adapter)
            adapter.row("weights").add_(noise, alpha=0.05)
            pool.after_change(adapter)
        prepared = trainer.prepare([TrainItem(adapters[n], datum, loss) for n, loss, datum in data], train=True)
        only_read = trainer.forward_micro(prepared, train=False).results
        done = trainer.forward_micro(prepared, train=True)
        results = done.results
        trainer.backward(done)
        for adapter in adapters:
            adapter.stack.collect_gradient(adapter.slot)
        return Found(only_read, results, [adapter.row("grads").numpy().copy() for adapter in adapters])


@dataclass
class Found:
    only_read: list[DatumResult]
    results: list[DatumResult]
    gradients: list[NDArray[np.float32]]


def datum(rng: np.random.Generator, tokens: NDArray[np.int64], loss: str) -> Datum:
    if loss == "cross_entropy":
        inputs = {"weights": rng.normal(size=len(tokens)) * (rng.random(len(tokens)) < 0.7)}
    else:
        inputs = {"logprobs": rng.normal(-6.0, 0.2, len(tokens)), "advantages": rng.normal(size=len(tokens))}
    targets = np.append(tokens[1:], rng.integers(0, 512))
    given = {name: encode(array.astype(np.float32)) for name, array in inputs.items()}
    return Datum.of_tokens(tokens.tolist(), target_tokens=encode(targets), **given)


def some_data(lengths: list[int], losses: tuple[str, ...] = ("cross_entropy",), common: int = 0) -> list[Any]:
    """Data that begin with the same `common` tokens, by turns of each loss and adapter."""
    rng = np.random.default_rng(3)
    prefix, found = rng.integers(0, 512, common), []
    for n, length in enumerate(lengths):
        tokens = np.concatenate([prefix, rng.integers(0, 512, length)])
        loss = losses[n % len(losses)]
        found.append((n % 2, loss, datum(rng, tokens, loss)))
    return found


def compare(work: Work, ranks: int, data: list[Any]) -> None:
    alone = work.life(data, None)
    found = on_ranks(ranks, lambda context: work.life(data, context))
    for one in found:
        for ours, theirs in zip(one.results + one.only_read, alone.results + alone.only_read, strict=True):
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4, abs=1e-5)
            np.testing.assert_array_equal(ours.visits, theirs.visits)
            if theirs.entropies is not None:
                assert ours.entropies is not None
                np.testing.assert_allclose(ours.entropies, theirs.entropies, atol=1e-5)
    assert_same_sums(found, alone)


def assert_same_sums(found: list[Found], alone: Found) -> None:
    for n, expected in enumerate(alone.gradients):
        total = sum(one.gradients[n].astype(np.float64) for one in found)
        np.testing.assert_allclose(total, expected, atol=2e-5 * max(1e-3, float(np.abs(expected).max())))


def kinds() -> list[Any]:
    return [pytest.param(kind, marks=() if kind in EVERYDAY else pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", kinds())
def test_two_ranks_find_what_one_finds(random_model: Any, kind: str) -> None:
    """Data of two adapters, some of which share their beginnings: rows of both are at each rank."""
    work = Work(random_model(kind, **KINDS[kind]))
    compare(work, 2, some_data([30, 7, 21, 1, 44, 9], ("cross_entropy", "importance_sampling"), common=20))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("qwen3_next", "nemotron_h")])
def test_more_ranks_than_heads_of_keys_have_some_of_them_twice(random_model: Any, kind: str) -> None:
    compare(Work(random_model(kind, **KINDS[kind])), 4, some_data([61, 40, 33], common=18))


@pytest.mark.parametrize("checkpointing", [True, "offload"])
def test_layers_that_are_computed_again_find_the_same_bits(random_model: Any, checkpointing: Checkpointing) -> None:
    folder, data = random_model(), some_data([40, 61])
    plain, again = (
        on_ranks(2, lambda context, way=way: Work(folder, way).life(data, context)) for way in (False, checkpointing)
    )
    for one, other in zip(plain, again, strict=True):
        for ours, theirs in zip(one.results, other.results, strict=True):
            np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
        for ours, theirs in zip(one.gradients, other.gradients, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("loss", ["gspo", "ppo"])
def test_losses_of_whole_sequences_reach_over_all_ranks(random_model: Any, loss: str) -> None:
    """The second rank has no row whose layers are trained, and takes part in their gradients nevertheless."""
    compare(Work(random_model()), 2, some_data([30, 80], (loss,), common=17))


def test_wide_targets_and_data_without_sharing(random_model: Any) -> None:
    rng, data = np.random.default_rng(0), []
    for length in (40, 17):
        targets, weights = rng.integers(0, 512, (length, 3)), rng.random((length, 3)).astype(np.float32)
        given = {"target_tokens": encode(targets), "weights": encode(weights)}
        data.append((0, "cross_entropy", Datum.of_tokens(rng.integers(0, 512, length).tolist(), **given)))
    compare(Work(random_model(), share_prefixes=False), 2, data)


def test_experts_that_must_be_visited_are_visited_at_every_rank(random_model: Any) -> None:
    folder = random_model("qwen3_moe")
    experts = next(iter((spec := ModelSpec.from_folder(folder)).experts.values()))
    data = some_data([50, 20])
    shape = (50, len(spec.experts), experts.per_token)
    ids = np.argsort(np.random.default_rng(0).random((*shape[:2], experts.n_experts)), -1)[..., : experts.per_token]
    replayed = RoutedExperts(data=ids.astype(np.uint8).tobytes(), shape=shape)
    number, loss, first = data[0]
    data[0] = (number, loss, Datum(chunks=first.chunks, loss_inputs=first.loss_inputs, routing=replayed))
    compare(Work(folder), 2, data)


def test_what_is_too_short_for_all_is_computed_by_the_first_alone(random_model: Any) -> None:
    work, data = Work(random_model()), some_data([LEAST_ROWS, LEAST_ROWS - 1])
    alone = work.life(data, None)
    first, second = on_ranks(2, lambda context: work.life(data, context))
    assert second.results == []
    assert not any(gradient.any() for gradient in second.gradients)
    for ours, theirs in zip(first.gradients, alone.gradients, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(first.results[0].logprobs, alone.results[0].logprobs)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_go_to_heads_and_back(ranks: int) -> None:
    """Nothing is lost or mixed, whatever the bounds; and gradients go the same ways."""
    rows, heads = 23, torch.arange(23 * 4 * 3, dtype=torch.float32).view(23, 4, 3)
    bounds = [0, *sorted(np.random.default_rng(ranks).choice(np.arange(1, rows), ranks - 1, replace=False)), rows]

    def work(context: ContextGroup) -> tuple[torch.Tensor, ...]:
        divided = ContextRows(context, [int(bound) for bound in bounds])
        own = heads[divided.own].clone().requires_grad_()
        inner = divided.to_heads(own)
        divided.to_rows(inner * 2).square().sum().backward()
        assert own.grad is not None
        return inner.detach(), own.grad, divided.gather(own.detach())

    for rank, (inner, gradient, gathered) in enumerate(on_ranks(ranks, work)):
        part = 4 // ranks
        assert inner.equal(heads[:, rank * part : (rank + 1) * part])
        assert gradient.equal(8 * heads[bounds[rank] : bounds[rank + 1]])
        assert gathered.equal(heads)


@pytest.mark.parametrize(
    ("kind", "ranks", "said"),
    [
        ("qwen3", 8, "it has 4 heads of queries and 2 of keys and values in a layer; parallel.context=4 does"),
        ("nemotron_h", 4, "2 groups of heads in a Mamba; parallel.context=2 does"),
    ],
)
def test_heads_that_cannot_be_divided_are_refused_with_what_can(
    random_model: Any, kind: str, ranks: int, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        require_divisible_heads(ModelSpec.from_folder(random_model(kind)), ranks)
