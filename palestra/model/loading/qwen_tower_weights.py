"""The weights of the vision tower of Qwen3-VL and Qwen3.5."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from palestra.model.loading.qwen_tower_spec import QwenTowerSpec
from palestra.model.loading.tower_files import Affine, TowerFiles
from palestra.model.loading.tower_spec import CHANNELS

PREFIXES = ("model.visual.", "visual.")
FIRST = "patch_embed.proj.weight"


@dataclass(frozen=True, slots=True)
class QwenTowerLayer:
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
class QwenTowerWeights:
    patches: Affine
    """From the pixels of a patch, all frames, to its row."""
    positions: Tensor
    """[grid_side ** 2, hidden]"""
    layers: list[QwenTowerLayer]
    merger: MergerWeights
    deepstack: list[MergerWeights]


class QwenTowerReader:
    def __init__(self, files: TowerFiles, spec: QwenTowerSpec):
        self.files, self.spec = files, spec

    def tower(self) -> QwenTowerWeights:
        spec, hidden = self.spec, self.spec.hidden_size
        kernel = self.files.get(FIRST, hidden, CHANNELS, spec.frames, spec.patch, spec.patch)
        return QwenTowerWeights(
            patches=Affine(kernel.flatten(1), self.files.get("patch_embed.proj.bias", hidden)),
            positions=self.files.get("pos_embed.weight", spec.grid_side**2, hidden),
            layers=[self.layer(f"blocks.{n}") for n in range(spec.n_layers)],
            merger=self.merger("merger", normalises_merged=False),
            deepstack=[
                self.merger(f"deepstack_merger_list.{n}", normalises_merged=True)
                for n in range(len(spec.deepstack_layers))
            ],
        )

    def layer(self, name: str) -> QwenTowerLayer:
        hidden, inner = self.spec.hidden_size, self.spec.inner_size
        return QwenTowerLayer(
            norm1=self.files.affine(f"{name}.norm1", hidden),
            qkv=self.files.affine(f"{name}.attn.qkv", 3 * hidden, hidden),
            proj=self.files.affine(f"{name}.attn.proj", hidden, hidden),
            norm2=self.files.affine(f"{name}.norm2", hidden),
            fc1=self.files.affine(f"{name}.mlp.linear_fc1", inner, hidden),
            fc2=self.files.affine(f"{name}.mlp.linear_fc2", hidden, inner),
        )

    def merger(self, name: str, *, normalises_merged: bool) -> MergerWeights:
        hidden, merged = self.spec.hidden_size, self.spec.hidden_size * self.spec.merge**2
        return MergerWeights(
            norm=self.files.affine(f"{name}.norm", merged if normalises_merged else hidden),
            fc1=self.files.affine(f"{name}.linear_fc1", merged, merged),
            fc2=self.files.affine(f"{name}.linear_fc2", self.spec.out_size, merged),
            normalises_merged=normalises_merged,
        )
