"""Attention by kernels agrees with the plain code, and a query's result does not depend on its tile or its pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from palestra.model.attention.branches import Branches
from palestra.model.attention.packed import PackedAttention
from palestra.model.loading.layer_spec import HeadShape
from palestra.model.training.prefix_trees import grow_trees
from tests.properties import examples

Close = Callable[[Tensor, Tensor], None]

SHAPES = [
    ([5, 66, 3], 4, 2, 16, None),
    pytest.param([67], 6, 2, 24, None, marks=pytest.mark.slow),
    ([90, 9], 2, 2, 16, 20),
    pytest.param([70, 9], 4, 2, 256, None, marks=pytest.mark.slow),
]


def spec_of(heads: int, kv_heads: int, dim: int, window: int | None = None, key_tail: int = 0) -> Any:
    return SimpleNamespace(heads=[HeadShape(heads, kv_heads, dim)], kv_sources={}, windows=[window], key_tail=key_tail)


@pytest.mark.parametrize("has_sinks", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "sinks"])
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "dim", "window"), SHAPES)
def test_packed_attention_and_its_gradients(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    has_sinks: bool,
    device: str,
    dtype: torch.dtype,
    assert_close: Close,
) -> None:
    from palestra.model.attention.tiled import TiledPackedAttention

    n = sum(lengths)
    inputs = [torch.randn(n, h, dim, device=device, dtype=dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)]
    wide = [x.detach().float().requires_grad_() for x in inputs]
    sinks = torch.randn(heads, device=device) if has_sinks else None
    found = TiledPackedAttention(lengths, spec_of(heads, kv_heads, dim, window), device)(0, *inputs, sinks)
    expected = PackedAttention(lengths, [window], device)(0, *wide, sinks)
    assert_close(found, expected)
    grad = torch.randn_like(found)
    d_found = torch.autograd.grad(found, inputs, grad)
    for a, b in zip(d_found, torch.autograd.grad(expected, wide, grad.float()), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "dim", "window"), SHAPES[-1:])
def test_wide_heads_fit_into_less_shared_memory(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    device: str,
    dtype: torch.dtype,
    assert_close: Close,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("palestra.model.kernels.is_roomy", lambda device: False)
    test_packed_attention_and_its_gradients(lengths, heads, kv_heads, dim, window, True, device, dtype, assert_close)


@pytest.mark.parametrize(
    ("lengths", "heads", "tail"),
    [([5, 70, 3], 6, 8), pytest.param([67], 64, 16, marks=pytest.mark.slow)],
    ids=["one group", "two groups"],
)
def test_rows_that_are_keys_and_values_and_their_gradients(
    lengths: list[int], heads: int, tail: int, device: str, dtype: torch.dtype, assert_close: Close
) -> None:
    from palestra.model.attention.tiled import TiledPackedAttention

    n, dim = sum(lengths), 32
    inputs = [torch.randn(n, h, dim + tail, device=device, dtype=dtype).requires_grad_() for h in (heads, 1)]
    wide = [x.detach().float().requires_grad_() for x in inputs]
    found = TiledPackedAttention(lengths, spec_of(heads, 1, dim + tail, key_tail=tail), device)(
        0, *inputs, inputs[1]
    ).view(n, heads, dim)
    expected = PackedAttention(lengths, [None], device)(0, *wide, wide[1]).view(n, heads, -1)[..., :dim]
    assert_close(found, expected)
    grad = torch.randn_like(found)
    d_found = torch.autograd.grad(found, inputs, grad)
    for a, b in zip(d_found, torch.autograd.grad(expected, wide, grad.float()), strict=True):
        assert_close(a, b)


def branched() -> tuple[list[int], Branches]:
    """A tree of five sequences that part at several places, and a sequence of its own."""
    first, second = list(range(70)), list(range(100, 120))
    turn = first + list(range(200, 215))
    made = [turn + [300] * 3, turn + [301] * 9, first[:40] + [302] * 30, first, [*first, 303], second]
    trees = grow_trees([SimpleNamespace(adapter=None, tokens=np.array(one), routing=None) for one in made])  # type: ignore[misc]
    branches = trees.branches()
    assert branches is not None
    return trees.lengths, branches


@pytest.mark.parametrize(
    ("kv_heads", "window", "has_sinks", "tail"),
    [
        pytest.param(2, None, True, 0, id="sinks"),
        pytest.param(2, 20, False, 0, id="window", marks=pytest.mark.slow),
        pytest.param(1, None, False, 8, id="latent"),
    ],
)
def test_rows_that_several_sequences_share(
    kv_heads: int,
    window: int | None,
    has_sinks: bool,
    tail: int,
    device: str,
    dtype: torch.dtype,
    assert_close: Close,
) -> None:
    """A sequence has the bits that it has without sharing; keys get what all who see them send back."""
    from palestra.model.attention.tiled import TiledPackedAttention

    (lengths, branches), heads, dim = branched(), 4, 16
    n, spec = sum(lengths), spec_of(heads, kv_heads, dim + tail, window, tail)
    inputs = [torch.randn(n, h, dim + tail, device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads)]
    if tail:
        inputs[2] = inputs[1]
    leaves = [x.requires_grad_() for x in inputs[: 2 if tail else 3]]
    wide = [x.detach().float().requires_grad_() for x in inputs[: len(leaves)]]
    sinks = torch.randn(heads, device=device) if has_sinks else None
    found = TiledPackedAttention(lengths, spec, device, branches)(0, *inputs, sinks)
    paths = torch.from_numpy(branches.paths).to(device)
    alone = TiledPackedAttention(branches.sequence_lengths, spec, device)(0, *(x[paths] for x in inputs), sinks)
    assert torch.equal(found[paths], alone)
    expected = PackedAttention(lengths, [window], device, branches=branches)(0, *wide, *wide[1:2] * bool(tail), sinks)
    expected = expected.view(n, heads, -1)[..., :dim].flatten(1)
    assert_close(found, expected)
    grad = torch.randn_like(found)
    d_found = torch.autograd.grad(found, leaves, grad)
    for a, b in zip(d_found, torch.autograd.grad(expected, wide, grad.float()), strict=True):
        assert_close(a, b)


def test_layers_with_other_heads_and_layers_that_read_their_keys(
    device: str, dtype: torch.dtype, assert_close: Close
) -> None:
    """As in Gemma 4: a window and narrow heads, then wide ones; two more layers read the keys of the first two."""
    from palestra.model.attention.tiled import TiledPackedAttention

    lengths, shapes, windows, sources = (
        [18, 3],
        [HeadShape(4, 2, 16), HeadShape(4, 1, 32)] * 2,
        [9, None] * 2,
        {2: 0, 3: 1},
    )
    spec: Any = SimpleNamespace(heads=shapes, kv_sources=sources, windows=windows, key_tail=0)
    ours, plain = TiledPackedAttention(lengths, spec, device), PackedAttention(lengths, windows, device, sources)
    leaves, outputs, truths = [], [], []
    for layer, shape in enumerate(shapes):
        heads = (shape.n_heads, *[shape.n_kv_heads] * (0 if layer in sources else 2))
        own = [torch.randn(sum(lengths), n, shape.head_dim, device=device, dtype=dtype).requires_grad_() for n in heads]
        wide = [x.detach().float().requires_grad_() for x in own]
        missing = [None] * (3 - len(heads))
        outputs.append(ours(layer, *own, *missing))
        truths.append(plain(layer, *wide, *missing))
        leaves += zip(own, wide, strict=True)
        assert_close(outputs[-1], truths[-1])
    grads = [torch.randn_like(out) for out in outputs]
    d_found = torch.autograd.grad(outputs, [own for own, _ in leaves], grads)
    d_truth = torch.autograd.grad(truths, [wide for _, wide in leaves], [grad.float() for grad in grads])
    for a, b in zip(d_found, d_truth, strict=True):
        assert_close(a, b)


@examples(4, deadline=None)
@example(length=530, group=1, window=None, page_size=16, dim=16, seed=1)
@example(length=70, group=3, window=40, page_size=4, dim=256, seed=0)
@given(
    length=st.integers(1, 600),
    group=st.sampled_from((1, 3, 4)),
    window=st.sampled_from((None, 40)),
    page_size=st.sampled_from((4, 16)),
    dim=st.sampled_from((16, 256)),
    seed=st.integers(0, 99),
)
def test_a_query_gets_the_same_bits_in_any_tile_and_from_pages(
    length: int, group: int, window: int | None, page_size: int, dim: int, seed: int
) -> None:
    from palestra.model.attention.tiled import cut_tiles
    from palestra.model.kernels.attention import KeySource, attend

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float16)
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (torch.randn(length, h, dim, device=device, generator=generator).to(dtype) for h in (group, 1, 1))
    packed, alone, paged = (torch.zeros(length, group * dim, device=device, dtype=dtype) for _ in range(3))
    keys, sinks = KeySource(k.stride(0), k.stride(1)), torch.randn(group, device=device) if seed % 2 else None
    attend(q, k, v, cut_tiles(np.array([(0, 0, length, 0)]), group, 64, device), keys, 1, window, packed, sinks=sinks)
    last, last_row = length - 1, np.array([(length - 1, length - 1, 1, 0)])
    attend(q, k, v, cut_tiles(last_row, group, 16, device), keys, 1, window, alone, sinks=sinks)
    n_pages = -(-length // page_size)
    pages = torch.randperm(n_pages + 3, generator=torch.Generator().manual_seed(seed))[:n_pages].int().to(device)
    slots = (
        pages.repeat_interleave(page_size) * page_size + torch.arange(n_pages * page_size, device=device) % page_size
    )
    cache = torch.full((2, 1, (n_pages + 3) * page_size, dim), torch.nan, device=device, dtype=dtype)
    cache[0, 0, slots[:length].long()], cache[1, 0, slots[:length].long()] = k[:, 0], v[:, 0]
    source = KeySource(dim, cache.stride(1), pages, page_size)
    attend(q, *cache, cut_tiles(last_row, group, 16, device), source, 1, window, paged, sinks=sinks)
    assert torch.equal(alone[last], packed[last])
    assert torch.equal(paged[last], packed[last])


@pytest.mark.usefixtures("with_kernels")
def test_keys_read_once_for_a_group_give_each_row_its_own_bits(
    random_model: Callable[..., Path], device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five rows: three share two splits, two more share one of those, and one has nothing in common."""
    from palestra.model.attention import tiled as tiled_attention
    from palestra.model.attention.kv_cache import KVCache
    from palestra.model.kernels import attention
    from palestra.model.loading.spec import ModelSpec
    from palestra.model.sampling.sequences import Sequence, SequenceChunk, StepPlan

    for module in (attention, tiled_attention):
        monkeypatch.setattr(module, "KEY_SPLIT", 64)
    spec, size = ModelSpec.from_folder(random_model("qwen3")), 16
    cache = KVCache(spec, 64, size, dtype=dtype, device=torch.device(device))
    for layer in (0, 1):
        for side in cache.by_head(layer):
            side.normal_()
    first, second, third = list(range(4)), list(range(4, 8)), list(range(8, 12))
    pages = [
        [*first, *second, 20],
        [*first, *second, 21],
        [*first, *second, 22, 23],
        [*first, *third, 24],
        [*first, *third, 25],
        list(range(30, 40)),
    ]
    lengths = (130, 143, 150, 129, 140, 155)
    seqs = [
        Sequence(i, 0, [1] * (n + 1), n, 200, pages=p, computed=n)
        for i, (p, n) in enumerate(zip(pages, lengths, strict=True))
    ]
    plan = StepPlan(decode=seqs, rows=[SequenceChunk(s, s.computed, s.computed + 1) for s in seqs])
    attend = tiled_attention.TiledPagedAttention.of(cache, plan)
    planned = attend.tiles[spec.heads[1]]
    assert planned.shared is not None
    assert planned.shared.by_row[:, 1].tolist() == [2, 2, 2, 2, 2, 0]
    q, k, v = (
        torch.randn(6, h, spec.head_dim, device=device).to(dtype) for h in (spec.n_heads, *[spec.n_kv_heads] * 2)
    )
    sinks = torch.randn(spec.n_heads, device=device)
    together = attend(1, q, k, v, sinks)
    attend.tiles = {spec.heads[1]: replace(planned, shared=None)}
    assert torch.equal(attend(1, q, k, v, sinks), together)
