"""The block's elementwise pieces, each with its own backward.

Hand-written because the frozen base needs no weight gradients: less is saved, fewer kernels run.
Without gradients they are plain functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear, silu, softplus

from palestra.model import kernels
from palestra.model.attention.rope import rotate

Heads = tuple[int, int, int]
"""Heads of q, k and v."""


class AddRmsNorm(Protocol):
    def __call__(self, hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float, /) -> tuple[Tensor, Tensor]:
        """hidden + update, and its RMSNorm."""
        ...


class RotateHeads(Protocol):
    def __call__(
        self, qkv: Tensor, qk_norm: Tensor | None, angles: tuple[Tensor, Tensor], eps: float, heads: Heads, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [tokens, heads, dim] each: q and k normalised per head and rotated."""
        ...


class SwiGlu(Protocol):
    def __call__(self, gate_up: Tensor, /) -> Tensor:
        """silu(gate) * up of a fused [tokens, 2 * intermediate]."""
        ...


class GatedNorm(Protocol):
    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """RMSNorm of each head of x, float32 [tokens, heads, dim], times silu(gate): [tokens, heads * dim]."""
        ...


class DeltaGates(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, neg_a: Tensor, dt_bias: Tensor, /) -> tuple[Tensor, Tensor]:
        """Write strength and decay of a delta net's value heads, float32 [tokens, heads] each; weight: [2 * heads,
        width]."""
        ...


class NormGated(Protocol):
    def __call__(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, /) -> Tensor:
        """RMSNorm of each group of x * silu(gate): x is float32 [tokens, groups, dim], the result [tokens, groups *
        dim]."""
        ...


@dataclass(frozen=True, slots=True)
class BlockOps:
    """The elementwise pieces of a block for one kind of device."""

    add_rms_norm: AddRmsNorm
    rotate_heads: RotateHeads
    swiglu: SwiGlu
    gated_norm: GatedNorm
    delta_gates: DeltaGates
    norm_gated: NormGated

    @classmethod
    def of(cls, device: torch.device | str, dtype: torch.dtype) -> BlockOps:
        if kernels.can_run(device, dtype):
            from palestra.model.kernels import block
            from palestra.model.kernels import gated_norm as heads
            from palestra.model.kernels.delta_gates import delta_gates as gates

            return cls(block.add_rms_norm, block.rotate_heads, block.swiglu, heads.gated_norm, gates, heads.norm_gated)
        return cls(add_rms_norm, rotate_heads, swiglu, gated_norm, delta_gates, norm_gated)


def add_rms_norm(hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    summed = hidden if update is None else hidden + update
    return summed, rms_norm(summed, weight, eps)


def rotate_heads(
    qkv: Tensor, qk_norm: Tensor | None, angles: tuple[Tensor, Tensor], eps: float, heads: Heads
) -> tuple[Tensor, Tensor, Tensor]:
    n_q, n_k, _ = heads
    qkv = qkv.unflatten(-1, (sum(heads), -1))
    qk, v = qkv.split([n_q + n_k, heads[2]], dim=1)
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm, eps)
    q, k = apply_rope(qk, *angles).split([n_q, n_k], dim=1)
    return q, k, v


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        return _RmsNorm.apply(x, weight, eps)
    return _rms_norm(x, weight, eps)[0]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x if x.dtype == torch.float32 else x.float()
    rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    normed = wide * rstd
    if weight.dtype == torch.float32:  # wider than a half x: it multiplies before the rounding
        return normed.mul_(weight).to(x.dtype), rstd
    return normed.to(x.dtype).mul_(weight), rstd


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        g = (grads[0] * weight).float()
        inner = torch.linalg.vecdot(g, normed).unsqueeze_(-1).mul_(1 / x.shape[-1])
        return g.addcmul_(normed, inner, value=-1).mul_(rstd).to(x.dtype), None, None


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = rms_norm(x, weight, eps)
    return (normed * silu(gate.float()).view_as(normed)).flatten(1).to(gate.dtype)


def delta_gates(x: Tensor, weight: Tensor, neg_a: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    b, a = linear(x, weight).float().chunk(2, dim=-1)
    return torch.sigmoid(b), neg_a * softplus(a + dt_bias)


def norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    gated = x * silu(gate.float()).view_as(x)
    return rms_norm(gated, weight, eps).flatten(1).to(gate.dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first dimensions of each head, as many as there are angles."""
    if (n := cos.shape[-1]) == 0:
        return x
    if n < x.shape[-1]:
        return torch.cat([apply_rope(x[..., :n], cos, sin), x[..., n:]], -1)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rope.apply(x, cos, sin)
    return rotate(x, cos, sin)


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, -sin), None, None


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused [tokens, 2 * intermediate]."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _SwiGlu.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        d_gate, d_up = out.chunk(2, dim=-1)
        torch.mul(silu(gate), grads[0], out=d_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=d_gate)
        return out
