"""Experts by kernels: routes and sorted pairs are the plain code's, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from palestra.model import Adapter, AdapterPool, load_model
from palestra.model.kernels import routing
from palestra.model.kernels.routing import choose, sort_pairs
from palestra.model.loading.layer_spec import ExpertsSpec
from palestra.model.lora.linear import LoraPlan
from palestra.model.mlp import routing as plain
from palestra.model.mlp.experts import ExpertsMlp
from palestra.model.mlp.routing import Routing
from palestra.types import LoraConfig

SOFTMAX = ExpertsSpec(n_experts=12, per_token=3, size=8, normalises=True)
SPECS = {
    "softmax": SOFTMAX,
    "shares": replace(SOFTMAX, normalises=False),
    "one": replace(SOFTMAX, per_token=1),
    "sigmoid": replace(SOFTMAX, router="sigmoid", scale=2.5),
    "groups": replace(SOFTMAX, router="sigmoid", groups=(4, 2), normalises=False),
}
ADAPTERS = (
    LoraConfig(rank=3, seed=0),
    LoraConfig(rank=8, seed=1),
    LoraConfig(rank=5, seed=2, per_expert=True),
)


def drawn(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(device, dtype)


EVERY_DAY = {("softmax", False), ("shares", True), ("sigmoid", True), ("groups", False)}
CHOICES = [
    pytest.param(*one, marks=() if one in EVERY_DAY else pytest.mark.slow) for one in product(SPECS, (False, True))
]


@pytest.mark.parametrize(("name", "has_bias"), CHOICES)
def test_a_row_visits_whom_the_plain_code_sends_it_to(
    name: str, has_bias: bool, device: str, dtype: torch.dtype
) -> None:
    spec, x = SPECS[name], drawn(5, 600, device=device, dtype=dtype)
    router, bias = drawn(12, 600, device=device, dtype=dtype) * 0.05, drawn(12, device=device) if has_bias else None
    replayed = torch.full((5, spec.per_token), -1, device=device)
    replayed[2] = torch.arange(spec.per_token, device=device)
    logits, weights, numbers = choose(x, router, bias, spec, replayed)
    expected, truth = plain._choose(x.float() @ router.float().T, bias, spec, replayed)
    assert torch.equal(numbers, truth)
    assert torch.allclose(weights, expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(logits, x.float() @ router.float().T, rtol=1e-4, atol=1e-3)
    alone = [choose(x[n : n + 1], router, bias, spec, replayed[n : n + 1]) for n in range(5)]
    for whole, parts in zip((logits, weights, numbers), zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))


def test_what_is_not_a_number_visits_real_experts(device: str, dtype: torch.dtype) -> None:
    """A tenant whose weights have gone wrong must not send the kernels anywhere else."""
    x = torch.full((2, 32), torch.nan, device=device, dtype=dtype)
    for spec in SPECS.values():
        numbers = choose(x, drawn(12, 32, device=device, dtype=dtype), None, spec)[2]
        assert ((numbers >= 0) & (numbers < 12)).all()


@pytest.mark.parametrize(("rows", "k", "n"), [(1, 3, 5), (70, 4, 8), (300, 2, 3), (130, 8, 100)])
def test_pairs_are_sorted_by_expert_and_cut_into_tiles(rows: int, k: int, n: int, device: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.stack([torch.randperm(n, generator=generator)[:k] for _ in range(rows)])
    numbers[rows // 2] = -1
    found = sort_pairs(numbers.to(device), n)
    real = int((numbers >= 0).sum())
    experts, order = numbers.flatten().sort(stable=True)
    order, experts = order[-real:] if real else order[:0], experts[-real:] if real else experts[:0]
    assert torch.equal(found.order[:real].long().cpu(), order)
    assert (found.places.cpu()[numbers < 0] == -1).all()
    assert torch.equal(found.places.cpu().flatten()[order].long(), torch.arange(real))
    assert found.ends.tolist() == [int((experts <= e).sum()) for e in range(n)]
    covered = []
    for expert, first, count in found.tiles.tolist():
        assert 0 < count <= found.tile_pairs or expert < 0
        if expert >= 0:
            assert (experts[first : first + count] == expert).all()
            covered += range(first, first + count)
    assert covered == list(range(real))


def open_experts(folder: Path, dtype: str, device: str) -> tuple[ExpertsMlp, list[Adapter]]:
    model = load_model(folder, dtype=dtype, device=device)
    pool = AdapterPool(model.spec, dtype=model.decoder.dtype, device=device)
    adapters = [pool.create(config) for config in ADAPTERS]
    for i, adapter in enumerate(adapters):
        pool.before_change(adapter)
        noise = torch.randn(adapter.stack.layout.size, generator=torch.Generator().manual_seed(i)) * 0.2
        adapter.row("weights").copy_(noise)
        pool.after_change(adapter)
    mlp = model.decoder.mlps[0]
    assert isinstance(mlp, ExpertsMlp)
    return mlp, adapters


FAMILIES = ["qwen3_moe", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gpt_oss", "qwen3_5_moe"))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("with_kernels")
def test_experts_return_what_the_plain_code_does_whoever_stands_beside_a_row(
    random_model: Callable[..., Path],
    family: str,
    device: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    assert_close: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Adapters of three ranks and two layouts and the base model in one tile; tiles of all sizes."""
    folder = random_model(family)
    wide, wide_adapters = open_experts(folder, "float32", device)
    x = drawn(32, wide.weights.router.shape[1], device=device)
    one, two, own = wide_adapters
    runs = [(one, 5), (None, 3), (two, 8), (own, 7), (one, 6), (None, 3)]
    chosen = Routing()
    truth = wide(x, LoraPlan.of(runs, device=device), chosen)
    half, adapters = open_experts(folder, str(dtype).removeprefix("torch."), device)
    runs = [(None if a is None else adapters[wide_adapters.index(a)], n) for a, n in runs]
    x = x.to(dtype)
    results = []
    for size in (16, 128):
        monkeypatch.setattr(routing, "_tile_pairs", lambda *_, size=size: size)
        with torch.no_grad():
            results.append(half(x, LoraPlan.of(runs, device=device), Routing(chosen.numbers)))
    assert_close(results[0], truth)
    assert torch.equal(*results)
    start = 0
    for adapter, n in runs[:4]:  # each kind once
        with torch.no_grad():
            rows = slice(start, start + n)
            routes = Routing({layer: numbers[rows] for layer, numbers in chosen.numbers.items()})
            alone = half(x[rows], LoraPlan.of([(adapter, n)], device=device), routes)
        assert torch.equal(alone, results[0][rows])
        start += n
