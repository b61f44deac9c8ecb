"""A recurrence over packed sequences, a chunk of 64 positions of every sequence at a time.

The i-th chunks of all sequences that have one are a wave, and are computed at once: [waves[i], 64, …], with the states
[waves[i], *state_shape] that the wave before has left. Sequences with the most chunks come first in each wave, so that
these are its first states. Rows behind the end of a sequence are zeros, which change no state.

rows       a: 150, b: 40, c: 70          chunks     a0 c0 b0 | a1 c1 | a2          waves      3 2 1

Chunks lie on a grid of absolute positions, so a row's numbers do not depend on how a sequence was cut. In training
only the states between chunks are kept: the backward pass computes a chunk again. States and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from palestra.model.loading.layer_spec import RecurrenceSpec
from palestra.model.transfers import to_device

CHUNK = 64


class ComputeChunk(Protocol):
    def __call__(self, x: Tensor, beta: Tensor, decay: Tensor, state: Tensor, spec: Any, /) -> tuple[Tensor, Tensor]:
        """One chunk each of n sequences, [n, 64, …]: what it returns, [n, 64, heads, dim], and the states after it."""
        ...


class ChunkLayout:
    """Rows of packed sequences in chunks. First come the first chunks of all sequences, then the second ones, and so
    on: such a wave is computed at once. The longest sequences are first in each, so a wave continues the first
    states of the one before."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str):
        counts = np.array([-(-n // CHUNK) for n in lengths])
        order = np.argsort(-counts, kind="stable")
        rank = np.empty(len(counts), np.int64)
        rank[order] = np.arange(len(counts))
        self.waves = [int((counts > i).sum()) for i in range(counts.max())]
        """How many sequences have an i-th chunk."""
        self.starts = np.concatenate([[0], np.cumsum(self.waves)]).tolist()
        """The first chunk of each wave; at the end the number of chunks."""
        first = np.array(self.starts)
        rows = [np.arange(n) for n in lengths]
        places = [(first[r // CHUNK] + rank[m]) * CHUNK + r % CHUNK for m, r in enumerate(rows)]
        self.place = to_device(np.concatenate(places), device)
        """Where each packed row stands in the chunks."""
        self.order, self.rank = to_device(order, device), to_device(rank, device)

    def spread(self, x: Tensor) -> Tensor:
        """[chunks, 64, …] of packed rows; zeros where a sequence has ended, which change no state."""
        rows = x.new_zeros(self.starts[-1] * CHUNK, *x.shape[1:])
        return rows.index_copy_(0, self.place, x).unflatten(0, (-1, CHUNK))

    def gather(self, chunks: Tensor) -> Tensor:
        return chunks.flatten(0, 1).index_select(0, self.place)

    def wave(self, i: int) -> slice:
        return slice(self.starts[i], self.starts[i + 1])


def chunked_scan(
    chunk: ComputeChunk,
    x: Tensor,
    beta: Tensor,
    decay: Tensor,
    layout: ChunkLayout,
    spec: RecurrenceSpec,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """[tokens, heads, dim] and the last state of each sequence, [n, *state_shape]. `state`: what each begins with, zero
    by default. Gradients flow where sequences begin with zero."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _ChunkedScan.apply(x, beta, decay, chunk, layout, spec)
    out, last, _ = _run(chunk, (x, beta, decay), layout, spec, state)
    return out, last


def _run(
    chunk: ComputeChunk,
    inputs: tuple[Tensor, Tensor, Tensor],
    layout: ChunkLayout,
    spec: RecurrenceSpec,
    state: Tensor | None,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Runs the scan; returns also the states that each wave began with."""
    rows = [layout.spread(x) for x in inputs]
    if state is None:
        now = inputs[0].new_zeros(layout.waves[0], *spec.state_shape, dtype=torch.float32)
    else:
        now = state.index_select(0, layout.order)
    outputs, before, last = [], [], torch.empty_like(now)
    for i, n in enumerate(layout.waves):
        last[n : len(now)] = now[n:]
        before.append(now[:n])
        x_i, beta_i, decay_i = (x[layout.wave(i)] for x in rows)
        out, now = chunk(x_i, beta_i, decay_i, before[-1], spec)
        outputs.append(out)
    last[: len(now)] = now
    return layout.gather(torch.cat(outputs)), last.index_select(0, layout.rank), before


class _ChunkedScan(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        beta: Tensor,
        decay: Tensor,
        chunk: ComputeChunk,
        layout: ChunkLayout,
        spec: RecurrenceSpec,
    ) -> tuple[Tensor, Tensor]:
        out, last, before = _run(chunk, (x, beta, decay), layout, spec, None)
        ctx.save_for_backward(x, beta, decay, *before)
        ctx.chunk, ctx.layout, ctx.spec = chunk, layout, spec
        ctx.mark_non_differentiable(last)
        return out, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layout: ChunkLayout = ctx.layout
        x, beta, decay, *before = ctx.saved_tensors
        rows, d_out = [layout.spread(x) for x in (x, beta, decay)], layout.spread(grads[0])
        d_rows = [torch.empty_like(x) for x in rows]
        d_state = before[0].new_zeros(0, *ctx.spec.state_shape)
        for i in reversed(range(len(layout.waves))):
            wave = layout.wave(i)
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (*(x[wave] for x in rows), before[i])]
                out, state = ctx.chunk(leaves[0], leaves[1], leaves[2], leaves[3], ctx.spec)
            d_last = torch.zeros_like(state)
            d_last[: len(d_state)] = d_state
            *found, d_state = torch.autograd.grad((out, state), leaves, (d_out[wave], d_last))
            for whole, part in zip(d_rows, found, strict=True):
                whole[wave] = part
        return *(layout.gather(x) for x in d_rows), None, None, None
