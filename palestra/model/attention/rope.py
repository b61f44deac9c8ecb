"""Rotary positions: frequencies for each kind of scaling, and the rotation itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.model.loading.layer_spec import RopeSpec
from palestra.model.loading.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Rotary:
    inverse_frequencies: Tensor
    """One for each pair of rotated dimensions, float32."""
    attention_scale: float
    """yarn multiplies cos and sin by this."""

    @classmethod
    def of(cls, spec: ModelSpec, device: torch.device | str = "cpu") -> Rotary:
        frequencies, scale = _SCALINGS[spec.rope.type](spec.rope, spec.rope.dim)
        return cls(frequencies.to(device), scale)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for both halves of a head, the first half's sin negated: [tokens, 1, rotated dimensions]."""
        angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies
        cos, sin = angles.cos() * self.attention_scale, angles.sin() * self.attention_scale
        return torch.cat([cos, cos], -1).to(dtype)[:, None], torch.cat([-sin, sin], -1).to(dtype)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head of x, [tokens, heads, head_dim], by `Rotary.angles`."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def _plain(rope: RopeSpec, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    return 1.0 / rope.theta**exponents


def _default(rope: RopeSpec, dim: int) -> tuple[Tensor, float]:
    return _plain(rope, dim), 1.0


def _linear(rope: RopeSpec, dim: int) -> tuple[Tensor, float]:
    return _plain(rope, dim) / rope.parameters["factor"], 1.0


def _llama3(rope: RopeSpec, dim: int) -> tuple[Tensor, float]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    p = rope.parameters
    low, high, context = p["low_freq_factor"], p["high_freq_factor"], p["original_max_position_embeddings"]
    plain = _plain(rope, dim)
    wavelength = 2 * math.pi / plain
    kept = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / p["factor"] + kept * plain, 1.0


def _yarn(rope: RopeSpec, dim: int) -> tuple[Tensor, float]:
    """Interpolates slow dimensions, keeps fast ones, ramps between; see the YaRN paper, section 3.2."""
    p = rope.parameters
    factor, context = p["factor"], p["original_max_position_embeddings"]

    def dimension_of(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(p.get("beta_fast") or 32), dimension_of(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    plain = _plain(rope, dim)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_attention_scale(p)


def _yarn_attention_scale(p: dict) -> float:
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if p["factor"] <= 1 else 0.1 * weight * math.log(p["factor"]) + 1.0

    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
    return mscale(1.0)


_SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
