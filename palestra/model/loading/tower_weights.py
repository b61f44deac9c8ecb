"""The weights of a vision tower, in their type: never quantised, never trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from palestra.model.loading.tower_spec import CHANNELS, TowerSpec
from palestra.model.loading.weight_files import WeightFiles

PREFIXES = ("model.visual.", "visual.")
"""What the names of a tower's tensors begin with."""
FIRST = "patch_embed.proj.weight"


@dataclass(frozen=True, slots=True)
class Affine:
    """Weight and bias of a linear layer, or of a layer norm."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True, slots=True)
class TowerLayerWeights:
    norm1: Affine
    qkv: Affine
    proj: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine


@dataclass(frozen=True, slots=True)
class MergerWeights:
    norm: Affine
    """Over a patch, or over all patches of a position (`normalises_merged`)."""
    fc1: Affine
    fc2: Affine
    normalises_merged: bool


@dataclass(frozen=True, slots=True)
class TowerWeights:
    patches: Affine
    """From the pixels of a patch, all frames, to its row."""
    positions: Tensor
    """[grid_side ** 2, hidden]"""
    layers: list[TowerLayerWeights]
    merger: MergerWeights
    deepstack: list[MergerWeights]


def read_tower(
    folder: str | Path, spec: TowerSpec, dtype: torch.dtype, device: torch.device | str
) -> TowerWeights | None:
    """Reads the tower. None where the files have none, as those of a text model that was cut out of one that sees."""
    with WeightFiles(Path(folder)) as files:
        prefix = next((prefix for prefix in PREFIXES if prefix + FIRST in files), None)
        return None if prefix is None else _Reader(files, spec, prefix, dtype, torch.device(device)).tower()


class _Reader:
    def __init__(self, files: WeightFiles, spec: TowerSpec, prefix: str, dtype: torch.dtype, device: torch.device):
        self.files, self.spec, self.prefix, self.dtype, self.device = files, spec, prefix, dtype, device

    def tower(self) -> TowerWeights:
        spec, hidden = self.spec, self.spec.hidden_size
        kernel = self.get(FIRST, hidden, CHANNELS, spec.frames, spec.patch, spec.patch)
        return TowerWeights(
            patches=Affine(kernel.flatten(1), self.get("patch_embed.proj.bias", hidden)),
            positions=self.get("pos_embed.weight", spec.grid_side**2, hidden),
            layers=[self.layer(f"blocks.{n}") for n in range(spec.n_layers)],
            merger=self.merger("merger", normalises_merged=False),
            deepstack=[
                self.merger(f"deepstack_merger_list.{n}", normalises_merged=True)
                for n in range(len(spec.deepstack_layers))
            ],
        )

    def layer(self, name: str) -> TowerLayerWeights:
        hidden, inner = self.spec.hidden_size, self.spec.inner_size
        return TowerLayerWeights(
            norm1=self.affine(f"{name}.norm1", hidden),
            qkv=self.affine(f"{name}.attn.qkv", 3 * hidden, hidden),
            proj=self.affine(f"{name}.attn.proj", hidden, hidden),
            norm2=self.affine(f"{name}.norm2", hidden),
            fc1=self.affine(f"{name}.mlp.linear_fc1", inner, hidden),
            fc2=self.affine(f"{name}.mlp.linear_fc2", hidden, inner),
        )

    def merger(self, name: str, *, normalises_merged: bool) -> MergerWeights:
        hidden, merged = self.spec.hidden_size, self.spec.hidden_size * self.spec.merge**2
        return MergerWeights(
            norm=self.affine(f"{name}.norm", merged if normalises_merged else hidden),
            fc1=self.affine(f"{name}.linear_fc1", merged, merged),
            fc2=self.affine(f"{name}.linear_fc2", self.spec.out_size, merged),
            normalises_merged=normalises_merged,
        )

    def affine(self, name: str, *shape: int) -> Affine:
        return Affine(self.get(f"{name}.weight", *shape), self.get(f"{name}.bias", shape[0]))

    def get(self, name: str, *shape: int) -> Tensor:
        return self.files.tensor(self.prefix + name, shape).to(self.device, self.dtype)
