"""The gated delta rule, S <- e^g S + k (beta (v - (e^g S)^T k))^T, in its two forms, and the convolution before it.

Chunks of 64 positions are computed by products, one chunk of every sequence at a time; single positions by a step.
Chunks lie on a grid of absolute positions, so a row's numbers do not depend on how a sequence was cut. In training
only the states between chunks are kept: the backward pass computes a chunk again. States and sums are float32.
Owns: this arithmetic. Never touches: where states are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import silu

from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.transfers import to_device

CHUNK = 64


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


def delta_rule(
    qkv: Tensor, beta: Tensor, decay: Tensor, layout: ChunkLayout, spec: DeltaNetSpec, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """[tokens, value heads, value dim] and the last state of each sequence, [n, value heads, key dim, value dim].
    `state`: what each begins with, zero by default. Gradients flow where sequences begin with zero."""
    if torch.is_grad_enabled() and qkv.requires_grad:
        return _DeltaRule.apply(qkv, beta, decay, layout, spec)
    out, last, _ = _run(qkv, beta, decay, layout, spec, state)
    return out, last


def _run(
    qkv: Tensor, beta: Tensor, decay: Tensor, layout: ChunkLayout, spec: DeltaNetSpec, state: Tensor | None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Also the states that each wave began with."""
    rows = [layout.spread(x) for x in (qkv, beta, decay)]
    if state is None:
        now = qkv.new_zeros(layout.waves[0], *spec.state_shape, dtype=torch.float32)
    else:
        now = state.index_select(0, layout.order)
    outputs, before, last = [], [], torch.empty_like(now)
    for i, n in enumerate(layout.waves):
        last[n : len(now)] = now[n:]
        before.append(now[:n])
        qkv_i, beta_i, decay_i = (x[layout.wave(i)] for x in rows)
        out, now = _chunk(qkv_i, beta_i, decay_i, before[-1], spec)
        outputs.append(out)
    last[: len(now)] = now
    return layout.gather(torch.cat(outputs)), last.index_select(0, layout.rank), before


class _DeltaRule(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, beta: Tensor, decay: Tensor, layout: ChunkLayout, spec: DeltaNetSpec
    ) -> tuple[Tensor, Tensor]:
        out, last, before = _run(qkv, beta, decay, layout, spec, None)
        ctx.save_for_backward(qkv, beta, decay, *before)
        ctx.layout, ctx.spec = layout, spec
        ctx.mark_non_differentiable(last)
        return out, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        layout: ChunkLayout = ctx.layout
        qkv, beta, decay, *before = ctx.saved_tensors
        rows, d_out = [layout.spread(x) for x in (qkv, beta, decay)], layout.spread(grads[0])
        d_rows = [torch.empty_like(x) for x in rows]
        d_state = before[0].new_zeros(0, *ctx.spec.state_shape)
        for i in reversed(range(len(layout.waves))):
            wave = layout.wave(i)
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (*(x[wave] for x in rows), before[i])]
                out, state = _chunk(leaves[0], leaves[1], leaves[2], leaves[3], ctx.spec)
            d_last = torch.zeros_like(state)
            d_last[: len(d_state)] = d_state
            *found, d_state = torch.autograd.grad((out, state), leaves, (d_out[wave], d_last))
            for whole, part in zip(d_rows, found, strict=True):
                whole[wave] = part
        return *(layout.gather(x) for x in d_rows), None, None


def _chunk(qkv: Tensor, beta: Tensor, decay: Tensor, state: Tensor, spec: DeltaNetSpec) -> tuple[Tensor, Tensor]:
    """One chunk each of n sequences: [n, 64, value heads, value dim], and their states after it."""
    q, k, v = _heads(qkv, spec)
    share = (spec.n_key_heads, spec.n_value_heads // spec.n_key_heads)
    q, k = (x.transpose(1, 2).unsqueeze(2) for x in (q, k))  # [n, key heads, 1, 64, dim]
    v, beta, decay, state = (
        x.unflatten(1, share)
        for x in (v.transpose(1, 2), beta.transpose(1, 2).unsqueeze(-1), decay.transpose(1, 2), state)
    )
    total = decay.cumsum(-1)
    grown = total.exp().unsqueeze(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    inner = ((k @ k.mT) * between * beta).tril(-1)
    values = torch.cat([(v * beta).expand(*v.shape), k * (beta * grown)], -1)
    solved = torch.linalg.solve_triangular(inner, values, upper=False, unitriangular=True)
    u, w = solved.split([spec.value_dim, spec.key_dim], -1)
    change = u - w @ state
    out = (q * grown) @ state + ((q @ k.mT) * between) @ change
    left = (total[..., -1:] - total).exp().unsqueeze(-1)
    state = grown[..., -1:, :] * state + (k * left).mT @ change
    return out.flatten(1, 2).transpose(1, 2), state.flatten(1, 2)


def delta_step(qkv: Tensor, beta: Tensor, decay: Tensor, state: Tensor, spec: DeltaNetSpec) -> tuple[Tensor, Tensor]:
    """One position each of n sequences: [n, value heads, value dim], and their states after it."""
    q, k, v = _heads(qkv, spec)
    q, k = (x.repeat_interleave(spec.n_value_heads // spec.n_key_heads, 1).unsqueeze(-1) for x in (q, k))
    state = state * decay.exp()[..., None, None]
    change = beta.unsqueeze(-1) * (v - (state * k).sum(-2))
    state = state + k * change.unsqueeze(-2)
    return (state * q).sum(-2), state


def _heads(qkv: Tensor, spec: DeltaNetSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of length 1 (queries scaled), and values, in float32: […, heads, dim]."""
    q, k, v = qkv.float().split([spec.key_size, spec.key_size, spec.value_size], -1)
    q, k = (x.unflatten(-1, (spec.n_key_heads, spec.key_dim)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return q * spec.key_dim**-0.5, k, v.unflatten(-1, (spec.n_value_heads, spec.value_dim))


class ConvLayout:
    """Packed sequences with a few rows of history before each of them."""

    def __init__(self, lengths: Sequence[int], history: int, device: torch.device | str):
        self.history, self.size = history, sum(lengths) + history * len(lengths)
        begins = np.cumsum([0, *(n + history for n in lengths)])
        rows = [np.arange(begin + history, begin + history + n) for begin, n in zip(begins, lengths, strict=False)]
        self.place = to_device(np.concatenate(rows), device)
        self.before = to_device((begins[:-1, None] + np.arange(history)).ravel(), device)
        self.after = to_device((begins[1:, None] - history + np.arange(history)).ravel(), device)


def causal_conv(x: Tensor, weight: Tensor, layout: ConvLayout, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """silu of the causal convolution of each channel, and the inputs the next positions will see, [n, history,
    channels]. `weight`: [kernel, channels]; `state`: inputs before the first rows, zero by default."""
    rows = x.new_zeros(layout.size, x.shape[1], dtype=torch.float32)
    if state is not None:
        rows.index_copy_(0, layout.before, state.flatten(0, 1).float())
    rows = rows.index_copy(0, layout.place, x.float())
    n = layout.size - layout.history
    mixed = sum((rows[j : j + n] * weight[j] for j in range(1, len(weight))), rows[:n] * weight[0])
    out = mixed.index_select(0, layout.place - layout.history)
    after = rows.detach().index_select(0, layout.after).unflatten(0, (-1, layout.history))
    return silu(out).to(x.dtype), after.to(x.dtype)
