"""A delta net's gates: the decay and the write strength of each value head, of a product with few outputs."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from palestra.model.kernels.narrow import chunk_sums

LINEAR = 20.0  # above it softplus is its input, as in torch
SMALL = 0.01  # below it three terms of log(1 + e) are all that float32 has


@triton.jit
def _delta_gates_kernel(
    SUMS, NEG_A, DT_BIAS, LOGITS, WRITE, DECAY, D_WRITE, D_DECAY, D_LOGITS, rows, LINEAR: tl.constexpr,
    SMALL: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, N_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Forward: LOGITS [rows, 2 H] = SUMS in order, rounded; WRITE = sigmoid(first half), DECAY = a softplus(second half
    + bias). With D_LOGITS: its gradient."""
    row, h = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    real, first = h < H, tl.program_id(0).to(tl.int64) * 2 * H
    if D_LOGITS is None:
        b, a = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
        for chunk in range(N_CHUNKS):
            place = SUMS + (chunk * rows + row) * 2 * H + h
            b += tl.load(place, mask=real, other=0.0)
            a += tl.load(place + H, mask=real, other=0.0)
        b, a = b.to(LOGITS.dtype.element_ty), a.to(LOGITS.dtype.element_ty)
        tl.store(LOGITS + first + h, b, mask=real)
        tl.store(LOGITS + first + H + h, a, mask=real)
    else:
        b, a = tl.load(LOGITS + first + h, mask=real), tl.load(LOGITS + first + H + h, mask=real)
    write = 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))
    shifted = a.to(tl.float32) + tl.load(DT_BIAS + h, mask=real, other=0.0)
    neg_a = tl.load(NEG_A + h, mask=real, other=0.0)
    if D_LOGITS is None:
        e = tl.exp(shifted)
        few = tl.minimum(e, SMALL)  # 1 + e has few digits of it: heads that forget slowly
        soft = tl.where(e < SMALL, few * (1.0 - few * (0.5 - few / 3.0)), tl.log(1.0 + e))
        soft = tl.where(shifted > LINEAR, shifted, soft)
        tl.store(WRITE + row * H + h, write, mask=real)
        tl.store(DECAY + row * H + h, neg_a * soft, mask=real)
    else:
        d_b = tl.load(D_WRITE + row * H + h, mask=real, other=0.0) * write * (1.0 - write)
        slope = tl.where(shifted > LINEAR, 1.0, 1.0 / (1.0 + tl.exp(-shifted)))
        d_a = tl.load(D_DECAY + row * H + h, mask=real, other=0.0) * neg_a * slope
        tl.store(D_LOGITS + first + h, d_b.to(D_LOGITS.dtype.element_ty), mask=real)
        tl.store(D_LOGITS + first + H + h, d_a.to(D_LOGITS.dtype.element_ty), mask=real)


def delta_gates(x: Tensor, weight: Tensor, neg_a: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Write strength and decay, float32 [rows, heads] each; weight: [2 * heads, width], the strength's rows first."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _DeltaGates.apply(x, weight, neg_a, dt_bias)
    return _delta_gates(x, weight, neg_a, dt_bias)[1:]


def _delta_gates(x: Tensor, weight: Tensor, neg_a: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads = len(x), len(weight) // 2
    logits = torch.empty(rows, 2 * heads, dtype=x.dtype, device=x.device)
    write, decay = (torch.empty(rows, heads, dtype=torch.float32, device=x.device) for _ in range(2))
    if rows:
        sums = chunk_sums(x, weight)
        _delta_gates_kernel[(rows,)](
            *(sums, neg_a, dt_bias, logits, write, decay, None, None, None, rows),
            LINEAR=LINEAR,
            SMALL=SMALL,
            H=heads,
            BLOCK=triton.next_power_of_2(heads),
            N_CHUNKS=len(sums),
            num_warps=1,
        )
    return logits, write, decay


class _DeltaGates(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, neg_a: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        logits, write, decay = _delta_gates(x, weight, neg_a, dt_bias)
        ctx.save_for_backward(logits, weight, neg_a, dt_bias)
        return write, decay

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, weight, neg_a, dt_bias = ctx.saved_tensors
        rows, heads = len(logits), len(weight) // 2
        d_logits = torch.empty_like(logits)
        if rows:
            d_write, d_decay = (grad.contiguous() for grad in grads)
            _delta_gates_kernel[(rows,)](
                *(None, neg_a, dt_bias, logits, None, None, d_write, d_decay, d_logits, rows),
                LINEAR=LINEAR,
                SMALL=SMALL,
                H=heads,
                BLOCK=triton.next_power_of_2(heads),
                N_CHUNKS=0,
                num_warps=1,
            )
        return d_logits @ weight, None, None, None
