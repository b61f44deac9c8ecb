"""Which tensors a GGUF file has, and how each is made of the merged weights of a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.checkpoints import CheckpointError
from palestra.checkpoints.gguf.families import GgufFamily
from palestra.checkpoints.gguf.weight_names import is_paired, paired, tensor_names
from palestra.model.attention.rope import Rotary
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weight_files import HEADS, PREFIXES, WeightFiles
from palestra.model.lora.merged_export import MergedWeights

ROPE_FACTORS = "rope_freqs.weight"
_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_ALL_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_HALVES = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    name: str
    """In the file."""
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Its numbers, as readers of the format use them."""

    @property
    def is_float32(self) -> bool:
        """Vectors, and what chooses experts, keep their precision whatever matrices are written in."""
        return len(self.shape) == 1 or ".ffn_gate_inp." in self.name


def plan_tensors(
    spec: ModelSpec, family: GgufFamily, files: WeightFiles, weights: MergedWeights
) -> Iterator[PlannedTensor]:
    names = tensor_names(family, spec.n_layers)

    def named(plain: str) -> str:
        name = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise CheckpointError(f"GGUF has no name for {plain} in a model of {family.architecture}")
        return name

    if spec.rope.type == "llama3":
        yield PlannedTensor(ROPE_FACTORS, (spec.rope.dim // 2,), lambda: _rope_factors(spec))
    for source in weights.names:
        if source in HEADS and spec.tie_embeddings and not weights.is_untied:
            continue  # a copy
        if source not in HEADS and not source.startswith(files.prefix):
            continue  # what reads pictures
        plain = "lm_head.weight" if source in HEADS else PREFIXES[0] + source.removeprefix(files.prefix)
        if found := _ONE_EXPERT.fullmatch(plain):
            if found[2] == "0":
                yield _stacked(f"{named(f'{found[1]}.{found[3]}')}.weight", source, weights)
        elif (found := _ALL_EXPERTS.fullmatch(plain)) is None:
            yield PlannedTensor(
                named(plain), weights.shape(source), lambda source=source: _arranged(source, weights, spec, family)
            )
        elif found[2] == "down_proj":
            name = f"{named(plain)}.weight"
            yield PlannedTensor(name, weights.shape(source), lambda source=source: weights.tensor(source))
        else:
            for half, leaf in enumerate(_HALVES):
                yield _half(f"{named(f'{found[1]}.{leaf}')}.weight", source, half, weights)


def _stacked(name: str, first: str, weights: MergedWeights) -> PlannedTensor:
    """A matrix of all experts, of which files have one each."""
    sources = [first]
    while (following := first.replace(".experts.0.", f".experts.{len(sources)}.")) in weights:
        sources.append(following)
    shape = (len(sources), *weights.shape(first))
    return PlannedTensor(name, shape, lambda: torch.stack([weights.tensor(source).float() for source in sources]))


def _half(name: str, source: str, half: int, weights: MergedWeights) -> PlannedTensor:
    """Gates or ups of all experts, which are rows of one matrix."""
    n_experts, rows, inputs = weights.shape(source)

    def read() -> Tensor:
        return weights.tensor(source).chunk(2, dim=1)[half]

    return PlannedTensor(name, (n_experts, rows // 2, inputs), read)


def _arranged(source: str, weights: MergedWeights, spec: ModelSpec, family: GgufFamily) -> Tensor:
    weight, module = weights.tensor(source), source.rpartition(".")[0]
    if is_paired(module, family):
        return paired(weight, module, spec)
    if spec.has_offset_norms and source.endswith("norm.weight"):
        return weight.float() + 1
    return weight


def _rope_factors(spec: ModelSpec) -> Tensor:
    """What llama3's scaling divides each frequency by."""
    exponents = torch.arange(0, spec.rope.dim, 2).float() / spec.rope.dim
    return spec.rope.theta**-exponents / Rotary.of(spec.rope).inverse_frequencies
