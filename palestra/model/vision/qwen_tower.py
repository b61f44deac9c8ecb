"""The vision tower of Qwen3-VL and Qwen3.5: from a picture's pixels to rows of the text model's residual stream."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from palestra.model.attention.rope import rotate
from palestra.model.loading.qwen_tower_spec import QwenTowerSpec
from palestra.model.loading.qwen_tower_weights import MergerWeights, QwenTowerLayer, QwenTowerWeights
from palestra.model.loading.tower_files import Affine
from palestra.model.vision.features import Features, pixels_of
from palestra.types import Picture

NORM_EPS = 1e-6


class QwenTower:
    def __init__(self, spec: QwenTowerSpec, weights: QwenTowerWeights):
        self.spec, self.weights = spec, weights
        self.device, self.dtype = weights.positions.device, weights.positions.dtype
        exponents = torch.arange(0, spec.head_dim // 2, 2, dtype=torch.float32) / (spec.head_dim // 2)
        self._frequencies = (1.0 / spec.rope_theta**exponents).to(self.device)

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, picture: Picture) -> Features:
        spec, w = self.spec, self.weights
        rows, columns = picture.height // spec.patch, picture.width // spec.patch
        x = _affine(self._patches(picture), w.patches)
        down, right = (_blocked(axis, spec.merge) for axis in np.indices((rows, columns)))
        x = x + self._positions(down, right, rows, columns)
        turn = self._turn(down, right)
        deepstack: dict[int, Tensor] = {}
        for n, layer in enumerate(w.layers):
            x = self._layer(layer, x, turn)
            if n in spec.deepstack_layers:
                place = spec.deepstack_layers.index(n)
                deepstack[place] = self._merged(w.deepstack[place], x)
        return Features(self._merged(w.merger, x), tuple(deepstack[place] for place in sorted(deepstack)))

    def _patches(self, picture: Picture) -> Tensor:
        """The pixels of each patch, [patches, channels * frames * patch * patch]; those that become one position stand
        beside each other."""
        spec = self.spec
        colours = pixels_of(picture, self.device) / 255.0
        mean, std = (torch.tensor(x, dtype=torch.float32, device=self.device) for x in (spec.mean, spec.std))
        squares = ((colours - mean) / std).to(self.dtype)
        squares = squares.unflatten(1, (-1, spec.merge, spec.patch)).unflatten(0, (-1, spec.merge, spec.patch))
        # rows, merge, patch, columns, merge, patch, channels
        squares = squares.permute(0, 3, 1, 4, 6, 2, 5).flatten(0, 3)
        return squares[:, :, None].expand(-1, -1, spec.frames, -1, -1).flatten(1)

    def _positions(self, down: np.ndarray, right: np.ndarray, rows: int, columns: int) -> Tensor:
        """The learned positions, interpolated between the four that are next to each patch."""
        side = self.spec.grid_side
        found: Tensor | None = None
        for y, of_y in _taps(down, rows, side):
            for x, of_x in _taps(right, columns, side):
                index, weight = (torch.from_numpy(part).to(self.device) for part in (y * side + x, of_y * of_x))
                part = self.weights.positions.index_select(0, index) * weight[:, None]
                found = part if found is None else found + part
        assert found is not None
        return found.to(self.dtype)

    def _turn(self, down: np.ndarray, right: np.ndarray) -> tuple[Tensor, Tensor]:
        """cos and sin as `rotate` takes them: a quarter of a head turns by the row, a quarter by the column."""
        axes = [torch.from_numpy(axis).to(self.device, torch.float32)[:, None] for axis in (down, right)]
        angles = torch.cat([axis * self._frequencies for axis in axes], -1)[:, None]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)

    def _layer(self, w: QwenTowerLayer, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        qkv = _affine(_normed(x, w.norm1), w.qkv).unflatten(1, (3, self.spec.n_heads, -1))
        q, k = (rotate(part.float(), *turn).to(x.dtype) for part in (qkv[:, 0], qkv[:, 1]))
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, qkv[:, 2]))
        mixed = scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        x = x + _affine(mixed, w.proj)
        inner = gelu(_affine(_normed(x, w.norm2), w.fc1), approximate="tanh")
        return x + _affine(inner, w.fc2)

    def _merged(self, w: MergerWeights, x: Tensor) -> Tensor:
        size = self.spec.hidden_size * self.spec.merge**2
        x = _normed(x.reshape(-1, size), w.norm) if w.normalises_merged else _normed(x, w.norm).reshape(-1, size)
        return _affine(gelu(_affine(x, w.fc1)), w.fc2)


def _affine(x: Tensor, w: Affine) -> Tensor:
    return linear(x, w.weight, w.bias)


def _normed(x: Tensor, w: Affine) -> Tensor:
    return layer_norm(x, (x.shape[-1],), w.weight, w.bias, NORM_EPS)


def _blocked(axis: np.ndarray, merge: int) -> np.ndarray:
    """[rows, columns] in the order of the patches: squares of `merge` by `merge` one after the other."""
    rows, columns = axis.shape
    squares = axis.reshape(rows // merge, merge, columns // merge, merge)
    return squares.transpose(0, 2, 1, 3).reshape(-1)


def _taps(index: np.ndarray, size: int, side: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The two learned positions beside each of `size` places on an axis, and how much of each it gets. The first and
    last places are the first and last positions."""
    place = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(place)
    part = place - low
    first = low.astype(np.int64)
    return [(first.clip(0, side - 1), 1 - part), ((first + 1).clip(0, side - 1), part)]
