"""The causal convolution before a recurrence, with silu: over packed rows, and on from the inputs that a state holds.

Each number is a sum of a few products in one order, so a row's bits depend on its own sequence alone.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

CHANNELS = 1024


@triton.jit
def _input(X, STATES, row, offset, slot, back, c, n, KERNEL: tl.constexpr):
    """The input `back` positions before a row that is `offset` rows behind the beginning of its span."""
    x = tl.load(X + (row - back) * n + c, mask=c < tl.where(offset >= back, n, 0), other=0.0)
    if STATES is not None:
        place = STATES + (slot * (KERNEL - 1) + KERNEL - 1 + offset - back) * n + c
        x += tl.load(place, mask=c < tl.where(offset < back, n, 0), other=0.0)
    return x


@triton.jit
def _begin(BIAS, c, n, BLOCK: tl.constexpr):
    """Returns what the sum of a row begins with."""
    if BIAS is not None:
        return tl.load(BIAS + c, mask=c < n, other=0.0)
    return tl.zeros((BLOCK,), tl.float32)


@triton.jit
def _conv_kernel(
    X, WEIGHT, BIAS, STATES, OUT, ROWS, n, WRITES: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr
):
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset, slot = tl.load(ROWS + row * 3), tl.load(ROWS + row * 3 + 2).to(tl.int64)
    if offset >= 0:
        mixed = _begin(BIAS, c, n, BLOCK)
        for tap in tl.static_range(KERNEL):
            x = _input(X, STATES, row, offset, slot, KERNEL - 1 - tap, c, n, KERNEL)
            mixed = tl.fma(x.to(tl.float32), tl.load(WEIGHT + tap * n + c, mask=c < n, other=0.0), mixed)
            if WRITES and tap > 0:
                tl.debug_barrier()  # everyone has read what this takes the place of
                tl.store(STATES + (slot * (KERNEL - 1) + tap - 1) * n + c, x, mask=c < n)
        out = mixed / (1.0 + tl.exp(-mixed))
        tl.store(OUT + row * n + c, out.to(OUT.dtype.element_ty), mask=c < n)


@triton.jit
def _keep_inputs_kernel(X, STATES, SPANS, n, KERNEL: tl.constexpr, BLOCK: tl.constexpr):
    span, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, count = tl.load(SPANS + span * 4).to(tl.int64), tl.load(SPANS + span * 4 + 1)
    slot = tl.load(SPANS + span * 4 + 3).to(tl.int64)
    if count > 0:
        for kept in tl.static_range(KERNEL - 1):  # from the oldest on: what is still needed is not overwritten
            x = _input(X, STATES, first + count, count, slot, KERNEL - 1 - kept, c, n, KERNEL)
            tl.debug_barrier()
            tl.store(STATES + (slot * (KERNEL - 1) + kept) * n + c, x, mask=c < n)


@triton.jit
def _conv_backward_kernel(X, WEIGHT, BIAS, GRAD, OUT, ROWS, n, KERNEL: tl.constexpr, BLOCK: tl.constexpr):
    """Computes the gradient of a row's input from the next rows of the span, whose sums are computed again."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    offset, after = tl.load(ROWS + row * 3), tl.load(ROWS + row * 3 + 1)
    d = tl.zeros((BLOCK,), tl.float32)
    for ahead in tl.static_range(KERNEL):
        here = tl.where(ahead <= after, n, 0)
        mixed = _begin(BIAS, c, n, BLOCK)
        for tap in tl.static_range(KERNEL):
            back = KERNEL - 1 - tap
            at = X + (row + ahead - back) * n + c
            x = tl.load(at, mask=c < tl.where(offset + ahead >= back, here, 0), other=0.0)
            mixed = tl.fma(x.to(tl.float32), tl.load(WEIGHT + tap * n + c, mask=c < n, other=0.0), mixed)
        share = 1.0 / (1.0 + tl.exp(-mixed))
        g = tl.load(GRAD + (row + ahead) * n + c, mask=c < here, other=0.0).to(tl.float32)
        g = g * share * (1.0 + mixed * (1.0 - share))
        d = tl.fma(g, tl.load(WEIGHT + (KERNEL - 1 - ahead) * n + c, mask=c < n, other=0.0), d)
    tl.store(OUT + row * n + c, d.to(OUT.dtype.element_ty), mask=c < n)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    rows: Tensor,
    states: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    are_alone: bool = False,
) -> Tensor:
    """silu of the causal convolution of each channel, [rows, channels]; weight and bias are float32. `rows`: int32
    [rows, 3] of a row's place in its span (-1: nothing to do), how many rows of the span follow, the slot of its state.
    `states`: the inputs before each span, [slots, history, channels]; zeros by default. `are_alone`: each span is one
    row, and its state moves on, too; otherwise see `keep_inputs`. Gradients flow where there are no states."""
    x = x.contiguous()
    if states is None and torch.is_grad_enabled() and x.requires_grad:
        return _CausalConv.apply(x, weight, bias, rows)
    return _conv(x, weight, bias, rows, states, are_alone)


def keep_inputs(x: Tensor, spans: Tensor, states: Tensor) -> None:
    """Lets each state hold the last inputs of its span (see `Spans`), after `causal_conv` has read it."""
    x, n = x.contiguous(), x.shape[1]
    if len(spans):
        kernel = states.shape[1] + 1
        _keep_inputs_kernel[(len(spans), triton.cdiv(n, CHANNELS))](
            x, states, spans, n, KERNEL=kernel, BLOCK=CHANNELS, num_warps=4
        )


def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, states: Tensor | None, are_alone: bool
) -> Tensor:
    out, n = torch.empty_like(x), x.shape[1]
    if len(x):
        _conv_kernel[(len(x), triton.cdiv(n, CHANNELS))](
            *(x, weight, bias, states, out, rows, n, are_alone), KERNEL=len(weight), BLOCK=CHANNELS, num_warps=4
        )
    return out


class _CausalConv(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias, rows)
        return _conv(x, weight, bias, rows, None, are_alone=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias, rows = ctx.saved_tensors
        out, n = torch.empty_like(x), x.shape[1]
        _conv_backward_kernel[(len(x), triton.cdiv(n, CHANNELS))](
            *(x, weight, bias, grads[0].contiguous(), out, rows, n), KERNEL=len(weight), BLOCK=CHANNELS, num_warps=4
        )
        return out, None, None, None
