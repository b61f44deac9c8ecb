"""The forms in which frozen weights are kept in 8 or 4 bits: codes, and a scale for each group of inputs.

A weight is the level that its code names, times the scale of its group: in float32, rounded once to the model's type.

    weight [outputs, inputs]        weight[o, i] = levels[code of (o, i)] * scales[o, i // group]
    codes  [outputs, inputs]        in 8 bits; in 4 bits [outputs, inputs / 2], the first code of a byte in its low half
    scales [outputs, inputs / group], float32

A scale is chosen so that the largest weight of its group is (nearly) the largest level; a code is that of the nearest
level to weight / scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import Literal, get_args

import torch
from torch import Tensor

from palestra.model.loading.packed_files import E2M1

FormName = Literal["fp8", "int8", "int4", "nf4", "mxfp4"]
FORM_NAMES: tuple[FormName, ...] = get_args(FormName)
MIN_GROUP = 16  # with fewer inputs to a scale, the scales would take more than the codes
CHUNK_NUMBERS = 1 << 22  # of a weight, quantised at once: what is computed on the way is in float32
NF4_TAIL = 0.9677083  # of the normal distribution's mass, half lies beyond the outermost levels: QLoRA's choice


@dataclass(frozen=True, slots=True)
class Form:
    name: FormName
    bits: Literal[4, 8]
    group: int
    """Inputs that share a scale, where their number is a multiple of it."""

    def group_of(self, inputs: int) -> int:
        return gcd(inputs, self.group)

    def fits(self, inputs: int) -> bool:
        return self.group_of(inputs) >= MIN_GROUP

    def size_bytes(self, outputs: int, inputs: int) -> int:
        return outputs * inputs * self.bits // 8 + outputs * inputs // self.group_of(inputs) * 4


FORMS = {
    form.name: form
    for form in (
        Form("fp8", 8, 128),
        Form("int8", 8, 128),
        Form("int4", 4, 64),
        Form("nf4", 4, 64),
        Form("mxfp4", 4, 32),
    )
}
CODE_TYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"fp8": 448.0, "int8": 127.0}


def packed_shapes(form: Form, outputs: int, inputs: int) -> tuple[tuple[torch.Size, torch.Size], torch.dtype]:
    """Shapes of codes and scales, and the type of codes."""
    codes = torch.Size((outputs, inputs * form.bits // 8))
    return (codes, torch.Size((outputs, inputs // form.group_of(inputs)))), CODE_TYPES.get(form.name, torch.uint8)


@cache
def levels(name: FormName) -> Tensor:
    """The number that each code stands for: 256 of them, or 16."""
    match name:
        case "fp8" | "int8":
            return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(CODE_TYPES[name]).float()
        case "int4":
            return torch.arange(-8.0, 8.0)
        case "nf4":
            return _nf4_levels()
        case "mxfp4":
            return torch.tensor(E2M1)


def _nf4_levels() -> Tensor:
    """Quantiles of the normal distribution: eight above zero, seven below, and zero."""
    above, below = (torch.special.ndtri(torch.linspace(NF4_TAIL, 0.5, n, dtype=torch.float64))[:-1] for n in (9, 8))
    return (torch.cat([-below, torch.zeros(1), above.flip(0)]) / above[0]).float()


def quantise(weight: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales of a weight [..., outputs, inputs]; two codes of 4 bits share a byte, the first the low
    half."""
    *rows, inputs = weight.shape
    group = form.group_of(inputs)
    groups = weight.reshape(-1, group)
    codes = torch.empty(len(groups), group * form.bits // 8, dtype=CODE_TYPES.get(form.name, torch.uint8))
    codes = codes.to(weight.device)
    scales = torch.empty(len(groups), dtype=torch.float32, device=weight.device)
    step = max(1, CHUNK_NUMBERS // group)
    for start in range(0, len(groups), step):
        part = slice(start, start + step)
        codes[part], scales[part] = _quantise_groups(groups[part].float(), form)
    return codes.view(*rows, -1), scales.view(*rows, -1)


def _quantise_groups(groups: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    peaks = groups.abs().amax(1)
    match form.name:
        case "fp8" | "int8":
            scales = peaks / LARGEST[form.name]
        case "int4":  # there is one level more below zero than above: it goes to the larger side
            scales = groups.gather(1, groups.abs().argmax(1, keepdim=True))[:, 0] / -8
        case "nf4":
            scales = peaks
        case "mxfp4":  # a power of two, so that the largest lies between the two largest levels or a bit beyond
            scales = torch.exp2(torch.floor(torch.log2(peaks)) - 2)
    relative = groups / torch.where(scales == 0, 1.0, scales)[:, None]
    match form.name:
        case "fp8":
            return relative.to(torch.float8_e4m3fn), scales
        case "int8":
            return relative.round_().to(torch.int8), scales
    low, high = _nearest(relative, form.name).view(len(groups), -1, 2).unbind(2)
    return low | (high << 4), scales


def _nearest(relative: Tensor, name: FormName) -> Tensor:
    """The code of the level that is nearest."""
    ordered, order = levels(name).to(relative.device).sort(stable=True)
    borders = (ordered[1:] + ordered[:-1]) / 2
    return order.to(torch.uint8)[torch.bucketize(relative, borders, out_int32=True)]
