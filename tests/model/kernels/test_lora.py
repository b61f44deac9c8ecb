"""LoRA by kernels agrees with the plain code for adapters of many ranks and targets in one batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from palestra.model.loading.spec import ModelSpec
from palestra.model.lora.adapters import Adapter, AdapterPool
from palestra.model.lora.buckets import BucketedLora, RowRun
from palestra.model.lora.layout import UNEMBED, SiteName
from palestra.types import LoraConfig

Close = Callable[[Tensor, Tensor], None]

CONFIGS = (
    LoraConfig(rank=4, seed=0, train_unembed=False),
    LoraConfig(rank=20, seed=1, train_unembed=False),
    LoraConfig(rank=4, seed=2, train_unembed=False),
    LoraConfig(rank=33, seed=3, train_mlp=False, train_unembed=False),
    LoraConfig(rank=1, seed=4),
)
RUNS = ((0, 3), (1, 20), (2, 1), (3, 17), (0, 5), (4, 9))
"""Adapter and rows; the first adapter comes twice."""
FIRST_ROW, N_ROWS = 2, 60
SITES = [
    pytest.param((0, "qkv"), id="all adapters, three parts"),
    pytest.param((1, "down"), id="most adapters", marks=pytest.mark.slow),
    pytest.param(UNEMBED, id="one adapter"),
]


def batch(spec: ModelSpec, dtype: torch.dtype, device: str) -> tuple[list[Adapter], list[RowRun]]:
    pool = AdapterPool(spec, dtype=dtype, device=device)
    adapters = [pool.create(config) for config in CONFIGS]
    for i, adapter in enumerate(adapters):
        pool.before_change(adapter)
        noise = torch.randn(adapter.stack.layout.size, generator=torch.Generator().manual_seed(i)) * 0.1
        adapter.row("weights").copy_(noise)
        pool.after_change(adapter)
    runs, start = [], FIRST_ROW
    for number, rows in RUNS:
        runs.append(RowRun(adapters[number], start, rows))
        start += rows
    return adapters, runs


@pytest.mark.parametrize("name", SITES)
def test_mixed_adapters_forward_and_backward(
    random_model: Callable[..., Path], name: SiteName, device: str, dtype: torch.dtype, assert_close: Close
) -> None:
    from palestra.model.lora.tiles import TiledLora

    spec = ModelSpec.from_folder(random_model("qwen3"))
    plain_adapters, plain_runs = batch(spec, torch.float32, device)
    adapters, runs = batch(spec, dtype, device)
    plain, tiled = BucketedLora(plain_runs, device), TiledLora(runs, device)
    site = plain_adapters[-1].stack.layout.sites[name]
    n_out = sum(part.out_size for part in site.parts)
    x, dx = (torch.randn(N_ROWS, site.in_size, device=device, dtype=dtype) for _ in range(2))
    y, dy = (torch.randn(N_ROWS, n_out, device=device, dtype=dtype) for _ in range(2))
    expected_y, expected_dx, applied = y.float(), dx.float(), y.clone()
    expected_inner, inner = plain.inner(x.float(), name), tiled.inner(x, name)
    plain.add(expected_y, expected_inner, name)
    tiled.apply(applied, x, name)
    tiled.add(y, inner, name)
    assert torch.equal(applied, y), "with chunks computed apart and together"
    plain.backward(dy.float(), x.float(), expected_inner, expected_dx, name)
    tiled.backward(dy, x, inner, dx, name)
    assert_close(y, expected_y)
    assert_close(dx, expected_dx)
    for found, expected in zip(adapters, plain_adapters, strict=True):
        assert_close(found.row("grads"), expected.row("grads"))


def test_adapters_that_move_in_memory_are_found_again(
    random_model: Callable[..., Path], device: str, dtype: torch.dtype
) -> None:
    """Between forward and backward other tenants come, and the stack that holds all rows grows."""
    from palestra.model.lora.tiles import TiledLora

    spec, name = ModelSpec.from_folder(random_model("qwen3")), (0, "o")
    pool = AdapterPool(spec, dtype=dtype, device=device)
    adapter = pool.create(CONFIGS[0])
    tiled = TiledLora([RowRun(adapter, 0, 4)], device)
    site = adapter.stack.layout.sites[name]
    x = torch.randn(4, site.in_size, device=device, dtype=dtype)
    dy = torch.randn(4, spec.hidden_size, device=device, dtype=dtype)
    inner = tiled.inner(x, name)
    others = [pool.create(LoraConfig(rank=4, seed=9, train_unembed=False)) for _ in range(5)]
    tiled.backward(dy, x, inner, None, name)
    assert adapter.row("grads").abs().sum() > 0
    assert all(not other.row("grads").any() for other in others)
