"""Weights that a checkpoint keeps in 4 or 8 bits, and the plain tensors they stand for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from typing import Literal

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of four bits: a sign, two bits of exponent, one of mantissa."""
MX_GROUP, MX_BIAS = 32, 127
FP8_BLOCK = 128
INT4_CODES = 8  # in a word of 32 bits
BLOCK_SCALES, BLOCK_STATES = ".absmax", (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
BLOCK_EXTRAS = (BLOCK_SCALES, ".quant_map", ".nested_absmax", ".nested_quant_map", *BLOCK_STATES)
"""What bitsandbytes stores beside a weight: see `bitsandbytes_files`."""
CHUNK_BYTES = 1 << 22  # packed bytes that are unpacked at once: what is made of them on the way is 6 times as large

Shape = Sequence[int]
Packing = Literal["mxfp4", "fp8", "int4", "bnb4"]
PACKED_TYPES: dict[Packing, torch.dtype] = {
    "mxfp4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.int32,
    "bnb4": torch.uint8,
}
"""What the codes are stored as."""


class PackedFileError(ValueError):
    """The tensors of a packed weight do not fit each other."""


@dataclass(frozen=True, slots=True)
class PackedNames:
    """The two tensors that stand for one weight."""

    packing: Packing
    codes: str
    scales: str


def packed_names(name: str, names: Collection[str]) -> PackedNames | None:
    """Returns how the weight `name` is packed in files with these names; None where it is plain, or not there at
    all."""
    if f"{name}_scale_inv" in names:
        return PackedNames("fp8", name, f"{name}_scale_inv")
    if f"{name}_packed" in names:
        return PackedNames("int4", f"{name}_packed", f"{name}_scale")
    if f"{name}{BLOCK_SCALES}" in names:
        return PackedNames("bnb4", name, f"{name}{BLOCK_SCALES}")
    if name not in names and (f"{name}_blocks" in names or f"{name}_scales" in names):
        return PackedNames("mxfp4", f"{name}_blocks", f"{name}_scales")
    return None


def plain_name(name: str, names: Collection[str]) -> str | None:
    """The weight that a stored tensor holds the numbers of; None for those that hold scales and shapes."""
    if any(name.endswith(ending) and name.removesuffix(ending) in names for ending in BLOCK_EXTRAS):
        return None
    for suffix, other in (("_scale_inv", ""), ("_scales", "_blocks"), ("_scale", "_packed"), ("_shape", "_packed")):
        if name.endswith(suffix) and name.removesuffix(suffix) + other in names:
            return None
    for suffix, other in (("_blocks", "_scales"), ("_packed", "_scale")):
        if name.endswith(suffix) and name.removesuffix(suffix) + other in names:
            return name.removesuffix(suffix)
    return name


def plain_shape(packing: Packing, codes: Shape, scales: Shape) -> tuple[int, ...]:
    """The shape of the weight; raises PackedFileError where codes and scales do not fit each other."""
    if packing == "fp8":
        grid = [*codes[:-2], *(ceil(n / FP8_BLOCK) for n in codes[-2:])]
        if list(scales) != grid and any(n != 1 for n in scales):
            raise PackedFileError(f"scales have shape {list(scales)}, weights of {list(codes)} need {grid}")
        return tuple(codes)
    if packing == "int4":
        *rows, words = codes
        inputs = words * INT4_CODES
        if list(scales[:-1]) != rows or not scales[-1] or inputs % scales[-1]:
            raise PackedFileError(f"scales have shape {list(scales)}, which does not divide {[*rows, inputs]} weights")
        return (*rows, inputs)
    if len(codes) < 3 or codes[-1] != MX_GROUP // 2:
        raise PackedFileError(f"blocks have shape {list(codes)}, not [..., outputs, inputs / 32, 16]")
    if list(scales) != list(codes[:-1]):
        raise PackedFileError(f"scales have shape {list(scales)}, blocks of {list(codes)} need {list(codes[:-1])}")
    return (*codes[:-3], codes[-2] * MX_GROUP, codes[-3])


def unpack(packing: Packing, codes: Tensor, scales: Tensor) -> Tensor:
    """The weight, in a type that holds every digit: bfloat16 for MXFP4, float32 for FP8 and four-bit integers.

    MXFP4 comes as [..., inputs, outputs], a view: so the unpacked files of the same models have it.
    """
    if packing == "fp8":
        return unpack_fp8(codes, scales)
    if packing == "int4":
        return unpack_int4(codes, scales)
    return unpack_mxfp4(codes, scales).transpose(-1, -2)


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[..., outputs, inputs / 32, 16] bytes, low nibble first, and an exponent for each 32: [..., outputs, inputs]."""
    pairs = torch.tensor([(low, high) for high, low in product(E2M1, E2M1)], dtype=torch.bfloat16, device=blocks.device)
    flat, exponents = blocks.flatten(0, -2), scales.flatten().to(torch.int32) - MX_BIAS
    out = torch.empty(len(flat), MX_GROUP, dtype=torch.bfloat16, device=blocks.device)
    step = CHUNK_BYTES // (MX_GROUP // 2)
    for start in range(0, len(flat), step):
        rows = slice(start, start + step)
        values = pairs[flat[rows].to(torch.int32)].flatten(1)
        torch.ldexp(values, exponents[rows, None], out=out[rows])
    return out.view(*blocks.shape[:-2], -1)


def mxfp4_scales(exponents: Tensor) -> Tensor:
    """The powers of two that the exponents stand for."""
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.to(torch.int32) - MX_BIAS)


def unpack_fp8(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """e4m3 times the scale of its block of 128x128, or the one scale there is: float32."""
    wide, scale = weight.float(), scale_inv.float()
    if scale.numel() == 1:
        return wide.mul_(scale.reshape(()))
    rows, columns = weight.shape[-2:]
    by_row = scale.repeat_interleave(FP8_BLOCK, -1)[..., :columns]
    for n, start in enumerate(range(0, rows, FP8_BLOCK)):
        wide[..., start : start + FP8_BLOCK, :] *= by_row[..., n : n + 1, :]
    return wide


def int4_codes(words: Tensor) -> Tensor:
    """Words of 32 bits, [..., outputs, inputs / 8], as bytes, [..., outputs, inputs / 2], low half first."""
    return words.view(torch.uint8)


def unpack_int4(words: Tensor, scales: Tensor) -> Tensor:
    """Eight codes from 0 to 15 in a word, which stand for -8 to 7, times the scale of their group: float32."""
    codes = int4_codes(words)
    wide = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float().sub_(8)
    groups = wide.unflatten(-1, (scales.shape[-1], -1))
    return groups.mul_(scales.float().unsqueeze(-1)).flatten(-2)


def fp8_group_scales(scale_inv: Tensor, rows: int, columns: int, group: int) -> Tensor:
    """The same scales for each row and group of columns, where groups divide blocks: [rows, columns / group]."""
    if scale_inv.numel() == 1:
        return scale_inv.float().reshape(1, 1).expand(rows, columns // group).contiguous()
    by_row = scale_inv.float().repeat_interleave(FP8_BLOCK, 0)[:rows]
    return by_row.repeat_interleave(FP8_BLOCK // group, 1)[:, : columns // group].contiguous()
