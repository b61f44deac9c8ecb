"""RMSNorm and silu of a gate on what a recurrence returns: a delta net's norm is first, Mamba's gate is.

A program computes whole heads (or groups of them), so that its sums have one order.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function


@triton.jit
def _gated_norm_kernel(
    X, GATE, WEIGHT, OUT, GRAD, D_GATE, eps, N_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Forward: out = norm(x) * silu(gate). With GRAD: out and D_GATE are the gradients of x and gate for it."""
    head, i = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    real = (head < N_HEADS)[:, None] & (i < D)[None]
    place = (tl.program_id(0).to(tl.int64) * N_HEADS + head[:, None]) * D + i[None]
    x = tl.load(X + place, mask=real, other=0.0)
    gate = tl.load(GATE + place, mask=real, other=0.0).to(tl.float32)
    w = tl.load(WEIGHT + i, mask=i < D, other=0.0).to(tl.float32)[None]
    rstd = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    unit, share = x * rstd, 1.0 / (1.0 + tl.exp(-gate))
    if GRAD is None:
        tl.store(OUT + place, (unit * w * (gate * share)).to(OUT.dtype.element_ty), mask=real)
    else:
        g = tl.load(GRAD + place, mask=real, other=0.0).to(tl.float32)
        d_gate = g * unit * w * share * (1.0 + gate * (1.0 - share))
        tl.store(D_GATE + place, d_gate.to(D_GATE.dtype.element_ty), mask=real)
        g = g * w * (gate * share)
        tl.store(OUT + place, (g - unit * (tl.sum(g * unit, 1) / D)[:, None]) * rstd, mask=real)


@triton.jit
def _norm_gated_kernel(
    X, GATE, WEIGHT, OUT, GRAD, D_GATE, eps, N_GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Forward: out = norm(x * silu(gate)), each group by itself. With GRAD: as in `_gated_norm_kernel`."""
    group, i = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    real, in_weight = (group < N_GROUPS)[:, None] & (i < D)[None], group[:, None] * D + i[None]
    place = tl.program_id(0).to(tl.int64) * N_GROUPS * D + in_weight
    x = tl.load(X + place, mask=real, other=0.0)
    gate = tl.load(GATE + place, mask=real, other=0.0).to(tl.float32)
    w = tl.load(WEIGHT + in_weight, mask=real, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    gated = x * (gate * share)
    rstd = tl.rsqrt(tl.sum(gated * gated, 1) / D + eps)[:, None]
    unit = gated * rstd
    if GRAD is None:
        tl.store(OUT + place, (unit * w).to(OUT.dtype.element_ty), mask=real)
    else:
        g = tl.load(GRAD + place, mask=real, other=0.0).to(tl.float32) * w
        g = (g - unit * (tl.sum(g * unit, 1) / D)[:, None]) * rstd
        d_gate = g * x * share * (1.0 + gate * (1.0 - share))
        tl.store(D_GATE + place, d_gate.to(D_GATE.dtype.element_ty), mask=real)
        tl.store(OUT + place, g * (gate * share), mask=real)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: float32 [tokens, heads, dim]; gate and the result: [tokens, heads * dim]; weight: [dim]."""
    return _apply(_gated_norm_kernel, x, gate, weight, eps)


def norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: float32 [tokens, groups, dim]; gate and the result: [tokens, groups * dim]; weight: [groups, dim]."""
    return _apply(_norm_gated_kernel, x, gate, weight, eps)


def _apply(kernel: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, gate = x.contiguous(), gate.contiguous()
    if torch.is_grad_enabled() and x.requires_grad:
        return _GatedNorm.apply(kernel, x, gate, weight, eps)
    out = torch.empty_like(gate)
    _launch(kernel, x, gate, weight, eps, out)
    return out


def _launch(
    kernel: Any,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    grad: Tensor | None = None,
    d_gate: Tensor | None = None,
) -> None:
    tokens, heads, dim = x.shape
    block_d = triton.next_power_of_2(dim)
    block_h = max(1, 2048 // block_d)
    if tokens:
        kernel[(tokens, triton.cdiv(heads, block_h))](
            *(x, gate, weight, out, grad, d_gate, eps, heads, dim), BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4
        )


class _GatedNorm(Function):
    @staticmethod
    def forward(ctx: Any, kernel: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.kernel, ctx.eps = kernel, eps
        out = torch.empty_like(gate)
        _launch(kernel, x, gate, weight, eps, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, gate, weight = ctx.saved_tensors
        d_x, d_gate = torch.empty_like(x), torch.empty_like(gate)
        _launch(ctx.kernel, x, gate, weight, ctx.eps, d_x, grads[0].contiguous(), d_gate)
        return None, d_x, d_gate, None, None
