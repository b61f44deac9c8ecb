"""Plans the tensors of a GGUF file: each is made of merged weights of a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.checkpoints.gguf.families import GgufFamily
from palestra.checkpoints.gguf.weight_names import WeightNames
from palestra.checkpoints.gguf.weight_parts import Change, weight_parts
from palestra.model.attention.rope import Rotary
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weight_files import HEADS, PREFIXES, WeightFiles
from palestra.model.lora.merged_export import MergedWeights

ROPE_FACTORS = "rope_freqs.weight"
_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_FLOAT32 = (".ffn_gate_inp.weight", ".ssm_conv1d.weight", ".ssm_norm.weight", ".ssm_a", ".ssm_d", ".bias")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    name: str
    """In the file."""
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Its numbers, as readers of the format use them."""

    @property
    def is_float32(self) -> bool:
        """Vectors, what state spaces and biases have, and what chooses experts keep their precision whatever matrices
        are written in."""
        return len(self.shape) == 1 or self.name.endswith(_FLOAT32)

    @property
    def is_of_experts(self) -> bool:
        return self.name.endswith("_exps.weight")


def plan_tensors(
    spec: ModelSpec, family: GgufFamily, files: WeightFiles, weights: MergedWeights
) -> Iterator[PlannedTensor]:
    names = WeightNames(family, spec.n_layers)
    if spec.rope.type in ("llama3", "proportional"):
        yield PlannedTensor(ROPE_FACTORS, (spec.rope.dim // 2,), lambda: _rope_factors(spec))
    if spec.rope.type == "longrope":
        for kind in ("long", "short"):
            factors = torch.tensor(spec.rope.parameters[f"{kind}_factor"], dtype=torch.float32)
            yield PlannedTensor(f"rope_factors_{kind}.weight", (len(factors),), lambda factors=factors: factors)
    for source in weights.names:
        if source in HEADS and spec.tie_embeddings and not weights.is_untied:
            continue  # a copy
        if source not in HEADS and not source.startswith(files.prefix):
            continue  # what reads pictures
        plain = "lm_head.weight" if source in HEADS else PREFIXES[0] + source.removeprefix(files.prefix)
        if found := _ONE_EXPERT.fullmatch(plain):
            if found[2] == "0":
                yield _stacked(names.of(f"{found[1]}.{found[3]}"), source, weights)
            continue
        for name, change in weight_parts(plain, spec, family):
            yield _changed(names.of(name), source, change, weights)


def _changed(name: str, source: str, change: Change, weights: MergedWeights) -> PlannedTensor:
    shape = tuple(change(torch.empty(weights.shape(source), device="meta")).shape)
    return PlannedTensor(name, shape, lambda: change(weights.tensor(source)))


def _stacked(name: str, first: str, weights: MergedWeights) -> PlannedTensor:
    """A matrix of all experts, of which files have one each."""
    sources = [first]
    while (following := first.replace(".experts.0.", f".experts.{len(sources)}.")) in weights:
        sources.append(following)
    shape = (len(sources), *weights.shape(first))
    return PlannedTensor(name, shape, lambda: torch.stack([weights.tensor(source).float() for source in sources]))


def _rope_factors(spec: ModelSpec) -> Tensor:
    """What llama3's scaling divides each frequency by; a number that leaves nothing of those that do not rotate."""
    exponents = torch.arange(0, spec.rope.dim, 2).float() / spec.rope.dim
    factors = spec.rope.theta**-exponents / Rotary.of(spec.rope).inverse_frequencies
    return factors.nan_to_num(posinf=1e30)
