"""The elementwise pieces of a decoder block: residual + RMSNorm, per-head norm + rotary positions, SwiGLU.

Each is one launch forward and one backward. A program computes whole rows (or heads), so that its sums have one order.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

SWIGLU_BLOCK = 1024


# Residual + RMSNorm


@triton.jit
def _add_rms_norm_kernel(hidden, update, weight, summed, normed, n, eps, HAS_UPDATE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * n
    i = tl.arange(0, BLOCK)
    real = i < n
    x = tl.load(hidden + row + i, mask=real, other=0.0)
    if HAS_UPDATE:
        x = (x.to(tl.float32) + tl.load(update + row + i, mask=real, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(summed + row + i, x, mask=real)
    wide = x.to(tl.float32)
    y = wide * tl.rsqrt(tl.sum(wide * wide) / n + eps)
    if weight.dtype.element_ty != tl.float32:  # a wider weight multiplies before the rounding
        y = y.to(x.dtype).to(tl.float32)
    w = tl.load(weight + i, mask=real, other=0.0).to(tl.float32)
    tl.store(normed + row + i, (y * w).to(x.dtype), mask=real)


@triton.jit
def _add_rms_norm_backward_kernel(
    summed, weight, d_normed, d_summed, out, n, eps, HAS_SUM: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * n
    i = tl.arange(0, BLOCK)
    real = i < n
    wide = tl.load(summed + row + i, mask=real, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide) / n + eps)
    unit = wide * rstd
    g = tl.load(d_normed + row + i, mask=real, other=0.0).to(tl.float32)
    g = g * tl.load(weight + i, mask=real, other=0.0).to(tl.float32)
    d = (g - unit * (tl.sum(g * unit) / n)) * rstd
    if HAS_SUM:
        d += tl.load(d_summed + row + i, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row + i, d.to(out.dtype.element_ty), mask=real)


def add_rms_norm(hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """hidden + update, and its RMSNorm. Both [tokens, n]."""
    needs_grad = hidden.requires_grad or (update is not None and update.requires_grad)
    if torch.is_grad_enabled() and needs_grad:
        return _AddRmsNorm.apply(hidden, update, weight, eps)
    return _add_rms_norm(hidden, update, weight, eps)


def _add_rms_norm(hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    hidden = hidden.contiguous()
    rows, n = hidden.shape
    normed = torch.empty_like(hidden)
    summed = hidden if update is None else torch.empty_like(hidden)
    added = hidden if update is None else update.contiguous()
    if rows:
        _add_rms_norm_kernel[(rows,)](
            *(hidden, added, weight, summed, normed, n, eps, update is not None),
            BLOCK=triton.next_power_of_2(n),
            num_warps=_row_warps(n),
        )
    return summed, normed


class _AddRmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        summed, normed = _add_rms_norm(hidden, update, weight, eps)
        ctx.save_for_backward(summed, weight)
        ctx.eps, ctx.has_update = eps, update is not None
        return (summed.view_as(summed) if update is None else summed), normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        d_summed, d_normed = grads
        summed, weight = ctx.saved_tensors
        if d_normed is None:
            return d_summed, d_summed if ctx.has_update else None, None, None
        rows, n = summed.shape
        out = torch.empty_like(summed)
        has_sum = d_summed is not None
        if rows:
            _add_rms_norm_backward_kernel[(rows,)](
                *(summed, weight, d_normed.contiguous(), d_summed.contiguous() if has_sum else out, out, n, ctx.eps),
                HAS_SUM=has_sum,
                BLOCK=triton.next_power_of_2(n),
                num_warps=_row_warps(n),
            )
        return out, out if ctx.has_update else None, None, None


def _row_warps(n: int) -> int:
    return 4 if n <= 2048 else 8 if n <= 8192 else 16


# Per-head norm + rotary positions


@triton.jit
def _rotate_heads_kernel(
    qkv, weight, cos, sin, out, eps, D: tl.constexpr, TURNED: tl.constexpr, N_ROTATED: tl.constexpr,
    N_HEADS: tl.constexpr, HAS_NORM: tl.constexpr, BACKWARD: tl.constexpr, grad, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Forward: out = rotate(norm(qkv)). Backward: out = the gradient of qkv for `grad`. v's heads are copied. Of a
    head the first TURNED dimensions are rotated."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    i = tl.arange(0, BLOCK_D)
    partner = tl.where(i < TURNED // 2, i + TURNED // 2, tl.where(i < TURNED, i - TURNED // 2, i))
    real = (head[:, None] < N_HEADS) & (i < D)[None]
    place = token * N_HEADS * D + head[:, None] * D
    is_rotated = (head < N_ROTATED)[:, None]
    c = tl.load(cos + token * TURNED + i, mask=i < TURNED, other=1.0).to(tl.float32)[None]
    s = tl.load(sin + token * TURNED + i, mask=i < TURNED, other=0.0).to(tl.float32)[None]
    x = tl.load(qkv + place + i[None], mask=real, other=0.0)
    wide = x.to(tl.float32)
    if HAS_NORM:
        normed_heads = real & is_rotated
        rstd = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        w = tl.load(weight + head[:, None] * D + i[None], mask=normed_heads, other=0.0).to(tl.float32)
    if BACKWARD:
        g = tl.load(grad + place + i[None], mask=real, other=0.0)
        g_partner = tl.load(grad + place + partner[None], mask=real, other=0.0).to(tl.float32)
        d = g.to(tl.float32) * c - g_partner * s
        if HAS_NORM:
            d = d * w
            unit = wide * rstd
            d = (d - unit * (tl.sum(d * unit, 1) / D)[:, None]) * rstd
        tl.store(out + place + i[None], tl.where(is_rotated, d.to(x.dtype), g), mask=real)
    else:
        x_partner = tl.load(qkv + place + partner[None], mask=real, other=0.0)
        y, y_partner = wide, x_partner.to(tl.float32)
        if HAS_NORM:
            w_partner = tl.load(weight + head[:, None] * D + partner[None], mask=normed_heads, other=0.0)
            y, y_partner = y * rstd, y_partner * rstd
            if weight.dtype.element_ty != tl.float32:
                y, y_partner = y.to(x.dtype).to(tl.float32), y_partner.to(x.dtype).to(tl.float32)
            y = (y * w).to(x.dtype).to(tl.float32)
            y_partner = (y_partner * w_partner.to(tl.float32)).to(x.dtype).to(tl.float32)
        rotated = (y * c + y_partner * s).to(x.dtype)
        tl.store(out + place + i[None], tl.where(is_rotated, rotated, x), mask=real)


def rotate_heads(
    qkv: Tensor, qk_norm: Tensor | None, angles: tuple[Tensor, Tensor], eps: float, heads: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of fused projections, [tokens, heads, dim] each: q and k normalised per head and rotated."""
    if torch.is_grad_enabled() and qkv.requires_grad:
        out = _RotateHeads.apply(qkv, qk_norm, *angles, eps, heads)
    else:
        out = _rotate_heads(qkv, qk_norm, *angles, eps, heads)
    q, k, v = out.unflatten(-1, (sum(heads), -1)).split(list(heads), dim=1)
    return q, k, v


def _rotate_heads(
    qkv: Tensor,
    qk_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    heads: tuple[int, int, int],
    grad: Tensor | None = None,
) -> Tensor:
    qkv = qkv.contiguous()
    tokens, n_heads = len(qkv), sum(heads)
    dim = qkv.shape[1] // n_heads
    block_d = triton.next_power_of_2(dim)
    block_h = max(1, 2048 // block_d)
    out = torch.empty_like(qkv)
    if tokens:
        _rotate_heads_kernel[(tokens, triton.cdiv(n_heads, block_h))](
            *(qkv, qkv if qk_norm is None else qk_norm, cos, sin, out, eps, dim, cos.shape[-1]),
            *(heads[0] + heads[1], n_heads),
            HAS_NORM=qk_norm is not None,
            BACKWARD=grad is not None,
            grad=out if grad is None else grad.contiguous(),
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=4,
        )
    return out


class _RotateHeads(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, qk_norm: Tensor | None, cos: Tensor, sin: Tensor, eps: float, heads: Any) -> Any:
        ctx.save_for_backward(qkv, qk_norm, cos, sin)
        ctx.eps, ctx.heads = eps, heads
        return _rotate_heads(qkv, qk_norm, cos, sin, eps, heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        qkv, qk_norm, cos, sin = ctx.saved_tensors
        return _rotate_heads(qkv, qk_norm, cos, sin, ctx.eps, ctx.heads, grads[0]), None, None, None, None, None


# SwiGLU


@triton.jit
def _swiglu_kernel(gate_up, out, n, grad, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    """Forward: out = silu(gate) * up. Backward: out = the gradient of gate_up for `grad`."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = i < n
    x = tl.load(gate_up + row * 2 * n + i, mask=real, other=0.0)
    up = tl.load(gate_up + row * 2 * n + n + i, mask=real, other=0.0).to(tl.float32)
    gate = x.to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * share
    if BACKWARD:
        g = tl.load(grad + row * n + i, mask=real, other=0.0).to(tl.float32)
        d_gate = g * up * (share + silu * (1.0 - share))
        tl.store(out + row * 2 * n + i, d_gate.to(x.dtype), mask=real)
        tl.store(out + row * 2 * n + n + i, (g * silu.to(x.dtype).to(tl.float32)).to(x.dtype), mask=real)
    else:
        tl.store(out + row * n + i, (silu.to(x.dtype).to(tl.float32) * up).to(x.dtype), mask=real)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused [tokens, 2 * intermediate]."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SwiGlu.apply(gate_up)
    return _swiglu(gate_up, None)


def _swiglu(gate_up: Tensor, grad: Tensor | None) -> Tensor:
    gate_up = gate_up.contiguous()
    rows, n = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, n) if grad is None else torch.empty_like(gate_up)
    if rows:
        _swiglu_kernel[(rows, triton.cdiv(n, SWIGLU_BLOCK))](
            *(gate_up, out, n, out if grad is None else grad.contiguous(), grad is not None),
            BLOCK=SWIGLU_BLOCK,
            num_warps=4,
        )
    return out


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _swiglu(ctx.saved_tensors[0], grads[0])
