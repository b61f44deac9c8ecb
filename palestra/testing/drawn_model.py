"""Random models whose weights are drawn where they are needed, one at a time: no file is read or written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from palestra.model import Decoder, Model, ModelSpec
from palestra.model.loading.weight_files import WeightFiles
from palestra.model.loading.weights import lay_out
from palestra.model.numerics import set_numerics
from palestra.model.quantised.forms import Form
from palestra.testing.random_config import PUBLISHED, SHAPES, Shape, random_config
from palestra.testing.random_model import draw, parameters_of


def draw_model(
    family: str,
    shape: str | Shape,
    dtype: str,
    device: str,
    overrides: dict[str, Any] | None = None,
    form: Form | None = None,
) -> Model:
    """`form`: of 8 or 4 bits, in which the weights of linear layers are kept. Numerics are exact on a GPU, as those of
    models from files."""
    config = random_config(family, shape if isinstance(shape, Shape) else SHAPES[shape], overrides=overrides) | {
        "dtype": dtype
    }
    spec, where = ModelSpec.from_config(config), torch.device(device)
    if where.type == "cuda":
        set_numerics("exact")
    weights = lay_out(RandomWeights(config, where), spec, getattr(torch, dtype), where, form)
    return Model(Path("memory"), spec, Decoder(spec, weights), form.name if form else None)


def draw_published(shape: str, dtype: str, device: str) -> Model:
    family, overrides = PUBLISHED[shape]
    return draw_model(family, shape, dtype, device, overrides)


class RandomWeights(WeightFiles):
    """The weights of a random model as if they stood in files."""

    def __init__(self, config: dict[str, Any], device: torch.device):
        self._parameters = {parameter.name: parameter for parameter in parameters_of(config)}
        self._device = device
        self.folder, self.file_of, self.progress = Path("memory"), dict.fromkeys(self._parameters, "memory"), None

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._parameters[name].shape

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        found = self._parameters[name]
        if shape is not None and found.shape != shape:
            raise ValueError(f"{name} has shape {found.shape}, not {shape}")
        return draw(found, 0, self._device)

    def read_into(self, name: str, place: Tensor) -> None:
        place.copy_(self.tensor(name, tuple(place.shape)))
