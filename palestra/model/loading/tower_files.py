"""Tensors of a vision tower from a folder's files, in the model's type: never quantised, never trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.model.loading.weight_files import WeightFiles


@dataclass(frozen=True, slots=True)
class Affine:
    """Weight and bias of a linear layer, or of a layer norm."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class TowerFiles:
    files: WeightFiles
    prefix: str
    """What the names of the tower's tensors begin with."""
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def find(
        cls, files: WeightFiles, prefixes: Sequence[str], first: str, dtype: torch.dtype, device: torch.device
    ) -> TowerFiles | None:
        """`first`: the name of a tensor of every such tower. None where the files have none, as those of a text model
        that was cut out of one that sees."""
        found = next((prefix for prefix in prefixes if prefix + first in files), None)
        return None if found is None else cls(files, found, dtype, device)

    def get(self, name: str, *shape: int) -> Tensor:
        return self.files.tensor(self.prefix + name, shape).to(self.device, self.dtype)

    def affine(self, name: str, *shape: int) -> Affine:
        return Affine(self.get(f"{name}.weight", *shape), self.get(f"{name}.bias", shape[0]))
