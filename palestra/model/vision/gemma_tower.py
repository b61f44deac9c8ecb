"""The vision tower of Gemma 4: from a picture's pixels to rows of the text model's residual stream."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from palestra.model.attention.rope import rotate
from palestra.model.errors import DataError
from palestra.model.loading.gemma_tower_spec import GemmaTowerSpec
from palestra.model.loading.gemma_tower_weights import Clipped, GemmaTowerLayer, GemmaTowerWeights
from palestra.model.vision.features import Features, pixels_of
from palestra.types import Picture


class GemmaTower:
    def __init__(self, spec: GemmaTowerSpec, weights: GemmaTowerWeights):
        self.spec, self.weights = spec, weights
        self.device, self.dtype = weights.patches.device, weights.patches.dtype
        exponents = torch.arange(0, spec.head_dim // 2, 2, dtype=torch.float32) / (spec.head_dim // 2)
        self._frequencies = (1.0 / spec.rope_theta**exponents).to(self.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, picture: Picture) -> Features:
        """Raises DataError where the tower has no positions for so many patches."""
        spec, w = self.spec, self.weights
        rows, columns = picture.height // spec.patch, picture.width // spec.patch
        if max(rows, columns) > spec.table_size:
            raise DataError(
                f"picture {picture.digest[:12]} has {columns} x {rows} patches; the tower has positions for "
                f"{spec.table_size} along a side: send a smaller one"
            )
        down, right = (torch.from_numpy(axis.reshape(-1)).to(self.device) for axis in np.indices((rows, columns)))
        x = linear(self._patches(picture), w.patches)
        x = x + (w.positions[0].index_select(0, right) + w.positions[1].index_select(0, down))
        turn = self._turn(down, right)
        for layer in w.layers:
            x = self._layer(layer, x, turn)
        pooled = self._pooled(x, rows, columns)
        return Features(linear(self._normed(pooled, None), w.entry))

    def _patches(self, picture: Picture) -> Tensor:
        """The pixels of each patch, [patches, patch * patch * channels], between -1 and 1."""
        squares = (2 * (pixels_of(picture, self.device) / 255.0 - 0.5)).to(self.dtype)
        squares = squares.unflatten(1, (-1, self.spec.patch)).unflatten(0, (-1, self.spec.patch))
        return squares.permute(0, 2, 1, 3, 4).flatten(0, 1).flatten(1)

    def _turn(self, down: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin as `rotate` takes them, [patches, 1, 2, half a head]: the first half of a head turns by the
        column, the second by the row."""
        angles = torch.stack([axis.to(torch.float32)[:, None] * self._frequencies for axis in (right, down)], 1)
        cos, sin = angles[:, None].cos(), angles[:, None].sin()
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def _layer(self, w: GemmaTowerLayer, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        mixed = self._attended(w, self._normed(x, w.attention_norm), turn)
        x = x + self._normed(mixed, w.attention_out_norm)
        inner = self._normed(x, w.mlp_norm)
        inner = gelu(_clipped(inner, w.gate), approximate="tanh") * _clipped(inner, w.up)
        return x + self._normed(_clipped(inner, w.down), w.mlp_out_norm)

    def _attended(self, w: GemmaTowerLayer, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (_clipped(x, part).unflatten(1, (-1, self.spec.head_dim)) for part in (w.q, w.k, w.v))
        q, k, v = self._normed(q, w.q_norm), self._normed(k, w.k_norm), self._normed(v, None)
        q, k = (rotate(part.float().unflatten(2, (2, -1)), *turn).flatten(2).to(x.dtype) for part in (q, k))
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        mixed = scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True)
        return _clipped(mixed[0].transpose(0, 1).flatten(1), w.o)

    def _pooled(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """The mean of each square of patches, made larger."""
        spec, standard = self.spec, self.weights.standard
        squares = x.float().view(rows // spec.pool, spec.pool, columns // spec.pool, spec.pool, -1)
        pooled = squares.mean((1, 3)).flatten(0, 1).to(x.dtype).float() * spec.hidden_size**0.5
        if standard is not None:
            shift, scale = standard
            pooled = (pooled - shift.float()) * scale.float()
        return pooled.to(x.dtype)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        wide = x.float()
        wide = wide * (wide.pow(2).mean(-1, keepdim=True) + self.spec.norm_eps).pow(-0.5)
        return (wide if weight is None else wide * weight.float()).to(x.dtype)


def _clipped(x: Tensor, w: Clipped) -> Tensor:
    if w.bounds is None:
        return linear(x, w.weight)
    low_in, high_in, low_out, high_out = w.bounds
    return linear(x.clamp(low_in, high_in), w.weight).clamp(low_out, high_out)
