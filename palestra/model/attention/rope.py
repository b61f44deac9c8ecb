"""Rotary positions: frequencies for each kind of scaling, and the rotation itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.model.loading.layer_spec import RopeSpec


@dataclass(frozen=True, slots=True)
class Angles:
    """What positions do to queries and keys."""

    turn: tuple[Tensor, Tensor]
    """cos and sin for both halves of a head, the first half's sin negated: [tokens, 1, rotated dimensions]."""
    query_scale: Tensor | None = None
    """What multiplies queries: [tokens, 1, 1]."""


@dataclass(frozen=True, slots=True)
class Rotary:
    inverse_frequencies: Tensor
    """One for each pair of rotated dimensions, float32."""
    attention_scale: float = 1.0
    """yarn and longrope multiply cos and sin by this."""
    is_wide: bool = False
    """cos and sin are float32, whatever the model's type."""
    query_beta: float = 0.0
    query_length: int = 1
    """Queries are multiplied by 1 + beta ln(1 + position // length)."""
    axes: Tensor | None = None
    """Whether each pair turns by time, height or width (0, 1, 2); None: positions are one number."""

    @classmethod
    def of(cls, rope: RopeSpec, device: torch.device | str = "cpu") -> Rotary:
        frequencies, scale = _SCALINGS[rope.type](rope, rope.dim)
        length = rope.parameters.get("original_max_position_embeddings", 1)
        axes = None if rope.sections is None else _axes(rope.sections, len(frequencies)).to(device)
        return cls(frequencies.to(device), scale, rope.is_wide, rope.query_beta, length, axes)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """`positions`: [tokens], or [tokens, 3] with time, height and width where the batch has pictures; in families
        whose positions are one number all three are equal."""
        if positions.ndim == 1:
            angles = positions.to(torch.float32)[:, None] * self.inverse_frequencies
        else:
            axes = positions[:, :1] if self.axes is None else positions.index_select(1, self.axes)
            angles = axes.to(torch.float32) * self.inverse_frequencies
        cos, sin = angles.cos() * self.attention_scale, angles.sin() * self.attention_scale
        both = torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]
        turn = both if self.is_wide else (both[0].to(dtype), both[1].to(dtype))
        return Angles(turn, self._query_scale(positions).to(dtype) if self.query_beta else None)

    def _query_scale(self, positions: Tensor) -> Tensor:
        return (1 + self.query_beta * torch.log1p((positions // self.query_length).float()))[:, None, None]


def _axes(sections: tuple[int, int, int], pairs: int) -> Tensor:
    """Time, height and width by turns, as long as each lasts; time has what is left."""
    axes = torch.zeros(pairs, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of each head of x, [tokens, heads, head_dim], by `Rotary.angles`."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def _plain(rope: RopeSpec, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    return 1.0 / rope.theta**exponents


def _default(rope: RopeSpec, dim: int) -> tuple[Tensor, float]:
    return _plain(rope, dim), 1.0


def _linear(rope: RopeSpec, dim: int) -> tuple[Tensor, float]:
    return _plain(rope, dim) / rope.parameters["factor"], 1.0


def _proportional(rope: RopeSpec, dim: int) -> tuple[Tensor, float]:
    """The first frequencies of a whole head, and none for the rest of it."""
    p = rope.parameters
    turned = int(p.get("partial_rotary_factor", 1.0) * dim // 2)
    frequencies = _plain(rope, dim) / p.get("factor", 1.0)
    return torch.cat([frequencies[:turned], torch.zeros(dim // 2 - turned)]), 1.0


def _llama3(rope: RopeSpec, dim: int) -> tuple[Tensor, float]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    p = rope.parameters
    low, high, context = p["low_freq_factor"], p["high_freq_factor"], p["original_max_position_embeddings"]
    plain = _plain(rope, dim)
    wavelength = 2 * math.pi / plain
    kept = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / p["factor"] + kept * plain, 1.0


def _longrope(rope: RopeSpec, dim: int) -> tuple[Tensor, float]:
    """Uses the factors of sequences up to the original length; longer ones are not served, see `RopeSpec`."""
    p = rope.parameters
    scale = p.get("attention_factor")
    if scale is None:
        grown = math.log(max(p["factor"], 1.0)) / math.log(p["original_max_position_embeddings"])
        scale = math.sqrt(1 + grown)
    return _plain(rope, dim) / torch.tensor(p["short_factor"], dtype=torch.float32), float(scale)


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


_SCALINGS = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
