"""Which tensors a GGUF file has, and how each is made of the merged weights of a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from palestra.checkpoints.gguf.families import GgufFamily
from palestra.checkpoints.gguf.weight_names import WeightNames
from palestra.checkpoints.gguf.weight_order import column_order, row_order
from palestra.model.attention.rope import Rotary
from palestra.model.loading.spec import ModelSpec
from palestra.model.loading.weight_files import HEADS, PREFIXES, WeightFiles
from palestra.model.lora.merged_export import MergedWeights

ROPE_FACTORS = "rope_freqs.weight"
_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_ALL_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")
_HALVES = ("gate_proj", "up_proj")
_FLOAT32 = (".ffn_gate_inp.", ".ssm_conv1d.")
_Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    name: str
    """In the file."""
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Its numbers, as readers of the format use them."""

    @property
    def is_float32(self) -> bool:
        """Vectors, biases, convolutions and what chooses experts keep their precision whatever matrices are written
        in."""
        return len(self.shape) == 1 or self.name.endswith(".bias") or any(part in self.name for part in _FLOAT32)

    @property
    def is_of_experts(self) -> bool:
        return self.name.endswith("_exps.weight")


def plan_tensors(
    spec: ModelSpec, family: GgufFamily, files: WeightFiles, weights: MergedWeights
) -> Iterator[PlannedTensor]:
    names = WeightNames(family, spec.n_layers)
    if spec.rope.type in ("llama3", "proportional"):
        yield PlannedTensor(ROPE_FACTORS, (spec.rope.dim // 2,), lambda: _rope_factors(spec))
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
        for name, change in _parts(plain, spec, family):
            yield _changed(names.of(name), source, change, weights)


def _parts(plain: str, spec: ModelSpec, family: GgufFamily) -> Iterator[tuple[str, _Change]]:
    """The parameters that one of a Hugging Face folder becomes, and what is done to its numbers."""
    if (found := _ALL_EXPERTS.fullmatch(plain)) is None:
        yield plain, lambda weight: _arranged(plain, weight, spec, family)
        return
    if family.is_gemma4:
        yield plain, lambda stack: stack
        return
    turned = next(iter(spec.experts.values())).is_interleaved and found[3] is None  # the matrices are transposed
    if found[2] == "down_proj":
        yield plain, lambda stack: stack.mT if turned else stack
        return
    for half, leaf in enumerate(_HALVES):
        yield f"{found[1]}.{leaf}{found[3] or ''}", lambda stack, half=half: _half(stack, half, spec, turned=turned)


def _half(stack: Tensor, half: int, spec: ModelSpec, *, turned: bool) -> Tensor:
    """Gates or ups of all experts, which are rows of one matrix."""
    rows = stack.mT if turned else stack
    if next(iter(spec.experts.values())).is_interleaved:
        return rows[:, half::2]
    return rows.chunk(2, dim=1)[half]


def _changed(name: str, source: str, change: _Change, weights: MergedWeights) -> PlannedTensor:
    shape = tuple(change(torch.empty(weights.shape(source), device="meta")).shape)
    return PlannedTensor(name, shape, lambda: change(weights.tensor(source)))


def _stacked(name: str, first: str, weights: MergedWeights) -> PlannedTensor:
    """A matrix of all experts, of which files have one each."""
    sources = [first]
    while (following := first.replace(".experts.0.", f".experts.{len(sources)}.")) in weights:
        sources.append(following)
    shape = (len(sources), *weights.shape(first))
    return PlannedTensor(name, shape, lambda: torch.stack([weights.tensor(source).float() for source in sources]))


def _arranged(plain: str, weight: Tensor, spec: ModelSpec, family: GgufFamily) -> Tensor:
    module = plain.removesuffix(".weight").removesuffix(".bias")
    if (rows := row_order(module, spec, family)) is not None:
        weight = weight[rows]
    if (columns := column_order(module, spec)) is not None:
        weight = weight[:, columns]
    if plain.endswith(".A_log"):
        return -weight.float().exp()
    if plain.endswith(".conv1d.weight"):
        return weight.squeeze(1)
    if plain.endswith(".shared_expert_gate.weight"):
        return weight[0]
    if spec.has_offset_norms and plain.endswith("norm.weight") and not plain.endswith("linear_attn.norm.weight"):
        return weight.float() + 1
    return weight


def _rope_factors(spec: ModelSpec) -> Tensor:
    """What llama3's scaling divides each frequency by; a number that leaves nothing of those that do not rotate."""
    exponents = torch.arange(0, spec.rope.dim, 2).float() / spec.rope.dim
    factors = spec.rope.theta**-exponents / Rotary.of(spec.rope).inverse_frequencies
    return factors.nan_to_num(posinf=1e30)
