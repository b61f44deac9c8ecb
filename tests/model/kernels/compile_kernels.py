"""Compiles every Triton kernel for Hopper, on a machine without a GPU: run by `test_compiles` as a process of its own.

    python -m tests.model.kernels.compile_kernels [words in the names of launches …]

Triton's interpreter accepts what its compiler refuses, so kernels that only pass the interpreter's tests may not run on
a card. Here the launches of `palestra/model/kernels` are called with tensors in the shapes of published models, and
compiled in place of being run: by Triton's own way from a launch's arguments to machine code. Prints a line of JSON for
each kernel of each launch, with the shared memory that a program needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import getmembers
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface

from palestra.model import kernels
from palestra.model.attention.branches import Branches
from palestra.model.loading.layer_spec import HeadShape

HALF, WIDE = torch.bfloat16, torch.float32
ROWS, VOCABULARY = 100, 151936
shared_bytes: dict[str, int] = {}
"""By the kernel's name, of the variant of the present launch that needs most."""


class Hopper:
    """As much of a driver as a launch asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(kernel: KernelInterface, grid: Any) -> Callable[..., None]:
    def launch(*args: Any, **options: Any) -> None:
        name, found = kernel.fn.__name__, kernel.run(*args, grid=grid, warmup=True, **options)
        assert found.asm["cubin"], f"{name} has no machine code"
        shared_bytes[name] = max(found.metadata.shared, shared_bytes.get(name, 0))

    return launch


def kernel_names() -> set[str]:
    """All that a launch may name, of all modules."""
    names = set()
    for module in iter_modules(kernels.__path__, f"{kernels.__name__}."):
        members = getmembers(import_module(module.name), lambda member: isinstance(member, JITFunction))
        names |= {name for name, _ in members if name.endswith("_kernel")}
    return names


def numbers(*shape: int, dtype: torch.dtype = HALF, grad: bool = False) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=grad)


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.zeros_like(out) for out in outputs])


def train_attention(
    heads: int, kv_heads: int, dim: int, tail: int = 0, window: int | None = None, has_sinks: bool = False
) -> None:
    from palestra.model.attention.tiled import TiledPackedAttention

    spec: Any = SimpleNamespace(
        heads=[HeadShape(heads, kv_heads, dim + tail)], kv_sources={}, windows=[window], key_tail=tail
    )
    q, k, v = (numbers(ROWS, n, dim + tail, grad=True) for n in (heads, kv_heads, kv_heads))
    sinks = numbers(heads, dtype=WIDE) if has_sinks else None
    backward(TiledPackedAttention([ROWS - 9, 9], spec, "cpu")(0, q, k, v, sinks))
    rows = np.arange(ROWS)
    alone = Branches(rows, np.full(ROWS, ROWS), rows, [ROWS], [(0, 0, ROWS, 0)])
    backward(TiledPackedAttention([ROWS], spec, "cpu", alone)(0, q, k, v, sinks))


def sample_attention(
    heads: int, kv_heads: int, dim: int, tail: int = 0, window: int | None = None, has_sinks: bool = False
) -> None:
    """Single queries, those that share splits of keys with others, and prompts."""
    from palestra.model.attention import tiled
    from palestra.model.kernels.attention import KeySource, Tiles, attend, attend_once, write_pages

    shape = HeadShape(heads, kv_heads, dim + tail)
    group = tiled.head_group(shape, tail)
    q, k, pages = numbers(ROWS, heads, dim + tail), numbers(ROWS, kv_heads, dim + tail), integers(ROWS)
    stored = numbers(kv_heads, 64 * ROWS, dim + tail)
    values = stored[..., :dim]
    write_pages(k, None if tail else k, stored, stored, integers(ROWS, dtype=torch.int64))
    keys = KeySource(stored.stride(1), 0 if tail else stored.stride(0), pages, page_size=16)
    out, sinks = numbers(ROWS, heads * dim), numbers(heads, dtype=WIDE) if has_sinks else None
    queries, shared = tiled.tile_rows(tiled.PREFILL_ROWS, group) // group, None
    if window is None:
        results = tiled.SharedResults.of(2, shape, tail, q.device)
        shared = tiled.shared_splits(integers(2, 3), integers(2, queries), integers(ROWS, 2), group, results)
        attend_once(q, stored, values, keys, heads // group, shared)
    for rows in (tiled.DECODE_ROWS, tiled.PREFILL_ROWS):
        tiles = Tiles(integers(3, 4), tiled.tile_rows(rows, group))
        attend(q, stored, values, tiles, keys, heads // group, window, out, shared=shared, sinks=sinks)
        shared = None


def block() -> None:
    from palestra.model.kernels.block import add_rms_norm, rotate_heads, swiglu

    for weight in (numbers(4096), numbers(4096, dtype=WIDE)):
        hidden, update = numbers(ROWS, 4096, grad=True), numbers(ROWS, 4096, grad=True)
        backward(*add_rms_norm(hidden, update, weight, 1e-6))
        backward(*add_rms_norm(hidden, None, weight, 1e-6))
    heads, angles = (32, 8, 8), (numbers(ROWS, 128), numbers(ROWS, 128))
    for norm in (None, numbers(40, 128), numbers(40, 128, dtype=WIDE)):
        backward(*rotate_heads(numbers(ROWS, 48 * 128, grad=True), norm, angles, 1e-6, heads))
    backward(swiglu(numbers(ROWS, 2 * 12288, grad=True)))


def head() -> None:
    from palestra.model.kernels.draw import draw_tokens, nucleus
    from palestra.model.kernels.head import entropies, log_sum_exp, logits_gradient_

    logits, row = numbers(ROWS, VOCABULARY), numbers(ROWS, dtype=WIDE)
    for temperatures in (None, row):
        log_sum_exp(logits, temperatures)
    for n in (1, 3):
        logits_gradient_(logits, row, integers(ROWS, n, dtype=torch.int64), numbers(ROWS, n, dtype=WIDE))
    entropies(logits, row)
    draw_tokens(logits, row, integers(ROWS, 2))
    nucleus(logits.float(), row)


def lora(rank: int, n_rows: int) -> None:
    from palestra.model.kernels.lora import TILE_ROWS, GradientSums, LoraTiles, SiteShape

    offsets, addresses = integers(1, 400, dtype=torch.int64), integers(3, dtype=torch.int64)
    owners, tile_rows = integers(n_rows), TILE_ROWS[0 if n_rows <= 1024 else 1]
    tiles = LoraTiles(integers(3, 4), numbers(3, dtype=WIDE), addresses, offsets, owners, tile_rows, rank)
    sums = GradientSums(integers(3, 4), integers(3, 4), numbers(3, dtype=WIDE), addresses, offsets, rank)
    for sizes in ((4096,), (12288, 12288), (4096, 1024, 1024)):
        site, x, y = SiteShape(0, 4096, sizes), numbers(n_rows, 4096), numbers(n_rows, sum(sizes))
        tiles.apply(y, x, site)
        t, dt = tiles.shrink(x, site), tiles.shrink_gradient(y, site)
        tiles.expand(y, t, site)
        tiles.expand_gradient(x, dt, site)
        sums.add(t, dt, x, y, site)


def experts(n_rows: int, n_experts: int, per_token: int, width: int, size: int, **options: Any) -> None:
    """Routing, and products with and without biases and adapters of both layouts."""
    from palestra.model.kernels.experts import Inner, PairProducts, add_gated, sum_pairs, weigh_gradient
    from palestra.model.kernels.lora import TILE_ROWS, LoraTiles, SiteShape
    from palestra.model.kernels.routing import choose, sort_pairs
    from palestra.model.loading.layer_spec import ExpertsSpec

    spec = ExpertsSpec(n_experts, per_token, size, normalises=True, **options)
    x, bias = numbers(n_rows, width), numbers(n_experts, dtype=WIDE)
    for slots, added in ((None, None), (integers(n_rows, dtype=torch.int64), bias)):
        _, weights, chosen = choose(x, numbers(n_experts, width), added, spec, slots=slots)
    pairs, wide = sort_pairs(chosen, n_experts), torch.int64
    tables = integers(3, 4), numbers(3, dtype=WIDE), integers(3, dtype=wide), integers(1, 400, dtype=wide)
    tiles = LoraTiles(*tables, integers(n_rows), TILE_ROWS[0], 32)
    up, down = SiteShape(0, width, (size, size)), SiteShape(4, size, (width,))
    gate_up, back = numbers(n_experts, 2 * size, width), numbers(n_experts, width, size)
    for lora in (None, tiles):
        products, t, u = PairProducts(pairs, lora), None, None
        if lora is not None:
            t = Inner(lora.shrink_chunks(x, up), products.shrink(x, up, of_rows=True))
        for added in (None, numbers(n_experts, 2 * size)):
            activated = products.product(x, gate_up, added, up, t, of_rows=True)[:, :size].contiguous()
        if lora is not None:
            u = Inner(None, products.shrink(activated, down, of_rows=False))
        out = products.product(activated, back, None, down, u, of_rows=False)
        y = sum_pairs(out, pairs.places, weights)
        weigh_gradient(activated, activated, pairs.order, weights)
        add_gated(y, y, x, numbers(1, width))


def optimizer() -> None:
    from palestra.model.kernels.adamw import N_PLACES, N_SETTINGS, adamw_rows

    adamw_rows(integers(3, N_PLACES, dtype=torch.int64), numbers(3, N_SETTINGS, dtype=WIDE), 100_000)


def dequantise() -> None:
    from palestra.model.kernels.dequantise import dequantise
    from palestra.model.kernels.packed_linear import packed_linear
    from palestra.model.quantised.forms import FORMS, packed_shapes

    for form in FORMS.values():
        (codes, scales), dtype = packed_shapes(form, 256, 4096)
        packed = torch.zeros(codes, dtype=dtype), numbers(*scales, dtype=WIDE), form
        dequantise(*packed, numbers(256, 4096))
        for rows in (1, 64):
            packed_linear(numbers(rows, 4096), *packed, numbers(256))


def spans_of(lengths: list[int]) -> tuple[Tensor, Any]:
    from palestra.model.kernels.chunk_products import Spans
    from palestra.model.mixers.kernel_recurrence import SpanArrays

    arrays = SpanArrays.of(lengths, [-1] * len(lengths))
    return torch.from_numpy(arrays.rows), Spans(torch.from_numpy(arrays.table), torch.from_numpy(arrays.chunks))


def convolution(channels: int) -> None:
    from palestra.model.kernels.causal_conv import causal_conv, keep_inputs

    rows, spans = spans_of([70, 30])
    weight, states = numbers(4, channels, dtype=WIDE), numbers(5, 3, channels)
    for bias in (None, weight[0]):
        backward(causal_conv(numbers(ROWS, channels, grad=True), weight, rows, bias=bias))
        for are_alone in (True, False):
            causal_conv(numbers(ROWS, channels), weight, rows, states, bias, are_alone=are_alone)
    keep_inputs(numbers(ROWS, channels), spans.table, states)


def delta_net() -> None:
    """Qwen3.5-4B's."""
    from palestra.model.kernels.delta_gates import delta_gates
    from palestra.model.kernels.delta_rule import delta_rule, delta_steps
    from palestra.model.kernels.gated_norm import gated_norm
    from palestra.model.loading.layer_spec import DeltaNetSpec

    spec = DeltaNetSpec(n_key_heads=16, n_value_heads=32, key_dim=128, value_dim=128, conv_kernel=4)
    _, spans = spans_of([70, 30])
    states = numbers(5, *spec.state_shape, dtype=WIDE)
    gates = [numbers(ROWS, spec.n_value_heads, dtype=WIDE, grad=True) for _ in range(2)]
    qkv, gate = numbers(ROWS, spec.conv_size, grad=True), numbers(ROWS, spec.value_size, grad=True)
    out = delta_rule(qkv, gates[0], gates[1], spans, spec)
    backward(gated_norm(out, gate, numbers(spec.value_dim, dtype=WIDE), 1e-6))
    heads = numbers(spec.n_value_heads, dtype=WIDE)
    backward(*delta_gates(numbers(ROWS, 4096, grad=True), numbers(2 * len(heads), 4096), heads, heads))
    with torch.no_grad():
        delta_steps(qkv, gates[0], gates[1], spans, spec, states, out)
        gated_norm(out, gate, numbers(spec.value_dim, dtype=WIDE), 1e-6)


def mamba() -> None:
    """Nemotron 3 Nano's."""
    from palestra.model.kernels.gated_norm import norm_gated
    from palestra.model.kernels.state_space import state_space, state_space_steps
    from palestra.model.loading.layer_spec import MambaSpec

    spec = MambaSpec(n_heads=64, head_dim=64, n_groups=8, state_size=128, conv_kernel=4)
    _, spans = spans_of([70, 30])
    states, weight = numbers(5, *spec.state_shape, dtype=WIDE), numbers(spec.n_groups, 512, dtype=WIDE)
    gates = [numbers(ROWS, spec.n_heads, dtype=WIDE, grad=True) for _ in range(2)]
    xbc, gate = numbers(ROWS, spec.conv_size, grad=True), numbers(ROWS, spec.inner_size, grad=True)
    out = state_space(xbc, gates[0], gates[1], spans, spec)
    backward(norm_gated(out.view(ROWS, spec.n_groups, -1), gate, weight, 1e-5))
    with torch.no_grad():
        state_space_steps(xbc, gates[0], gates[1], spans, spec, states, out)
        norm_gated(out.view(ROWS, spec.n_groups, -1), gate, weight, 1e-5)


ATTENTION: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {"heads": 32, "kv_heads": 8, "dim": 128},
    "gpt-oss": {"heads": 64, "kv_heads": 8, "dim": 64, "window": 128, "has_sinks": True},
    "Qwen3.5-4B": {"heads": 16, "kv_heads": 4, "dim": 256},
    "Gemma 4 31B": {"heads": 32, "kv_heads": 4, "dim": 512},
    "GLM-4.7-Flash": {"heads": 20, "kv_heads": 1, "dim": 512, "tail": 64},
    "DeepSeek-V3": {"heads": 128, "kv_heads": 1, "dim": 512, "tail": 64},
}
LAUNCHES: dict[str, Callable[[], None]] = {
    **{f"{name}: train attention": partial(train_attention, **shape) for name, shape in ATTENTION.items()},
    **{f"{name}: sample attention": partial(sample_attention, **shape) for name, shape in ATTENTION.items()},
    "block": block,
    "head": head,
    "LoRA of a few rows": partial(lora, 16, 100),
    "LoRA of many rows": partial(lora, 32, 2000),
    "Qwen3-30B-A3B: experts of few rows": partial(experts, 64, 128, 8, 2048, 768),
    "Qwen3-30B-A3B: experts of many rows": partial(experts, 8192, 128, 8, 2048, 768),
    "gpt-oss: experts": partial(experts, 256, 32, 4, 2880, 2880),
    "DeepSeek-V3: experts": partial(experts, 256, 256, 8, 7168, 2048, router="sigmoid", groups=(8, 4)),
    "optimizer": optimizer,
    "dequantise": dequantise,
    "Qwen3.5-4B: convolution": partial(convolution, 8192),
    "Qwen3.5-4B: delta net": delta_net,
    "Nemotron 3 Nano: Mamba": mamba,
}


def main(words: list[str]) -> None:
    driver.set_active(Hopper())
    JITFunction.__getitem__ = compile_only
    found = set()
    for name, launch in LAUNCHES.items():
        if all(word in name for word in words):
            shared_bytes.clear()
            launch()
            for kernel, size in shared_bytes.items():
                print(json.dumps({"launch": name, "kernel": kernel, "shared_bytes": size}), flush=True)
            found |= shared_bytes.keys()
    if not words and (missing := kernel_names() - found):
        sys.exit(f"no launch compiles {', '.join(sorted(missing))}: add one to {__file__}")


if __name__ == "__main__":
    main(sys.argv[1:])
