"""Weights in four bits as bitsandbytes stores them.

X.weight                                 uint8 [weights / 2, 1], the first code of a byte in its high half
X.weight.absmax                          what each block of weights is multiplied by: float32, or codes of 8 bits
X.weight.quant_map                       what each code stands for: float32 [16]
X.weight.quant_state.bitsandbytes__nf4   JSON as bytes: the weight's shape, the size of a block
X.weight.nested_absmax, nested_quant_map where absmax are codes: factors of blocks of these, and what they stand for
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from math import ceil, prod
from typing import Literal

import torch
from msgspec import Struct, ValidationError, convert
from torch import Tensor
from torch.nn.functional import pad

from palestra.model.loading.packed_files import BLOCK_SCALES, BLOCK_STATES, CHUNK_BYTES, PackedFileError, Shape

LEVELS, SCALE_LEVELS = 16, 256  # what codes of four bits, and of eight, stand for


class BlockState(Struct, frozen=True):
    """What the JSON beside a weight says."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: int
    shape: list[int]
    nested_blocksize: int | None = None
    nested_offset: float = 0.0


def state_name(name: str, names: Collection[str]) -> str:
    found = next((name + ending for ending in BLOCK_STATES if name + ending in names), None)
    if found is None:
        raise PackedFileError(f"{name}{BLOCK_STATES[0]} is missing")
    return found


def read_state(stored: Tensor, codes: int) -> BlockState:
    """Raises PackedFileError where it is no state, or none for so many bytes of codes."""
    try:
        state = convert(json.loads(stored.numpy().tobytes()), BlockState)
    except (ValueError, ValidationError) as error:
        raise PackedFileError(f"its quant_state cannot be read: {error}") from None
    if min(state.shape, default=1) < 1 or state.blocksize < 2 or state.blocksize % 2:
        raise PackedFileError(f"its quant_state has blocks of {state.blocksize} and shape {state.shape}")
    if ceil(prod(state.shape) / 2) != codes:
        raise PackedFileError(f"{codes} bytes in blocks of {state.blocksize} are no weight of {state.shape}")
    return state


def check_sizes(name: str, state: BlockState, shape: Callable[[str], Shape]) -> None:
    """Raises PackedFileError where what stands beside the codes has other sizes than they need. `shape`: that of a
    stored tensor."""
    blocks = ceil(prod(state.shape) / state.blocksize)
    needed = {BLOCK_SCALES: blocks, ".quant_map": LEVELS}
    if state.nested_blocksize is not None:
        if state.nested_blocksize < 1:
            raise PackedFileError(f"its quant_state has nested blocks of {state.nested_blocksize}")
        needed |= {".nested_absmax": ceil(blocks / state.nested_blocksize), ".nested_quant_map": SCALE_LEVELS}
    for ending, size in needed.items():
        if (found := prod(shape(f"{name}{ending}"))) != size:
            raise PackedFileError(f"{name}{ending} has {found} numbers, and needs {size}")


def unpack_blocks(name: str, state: BlockState, read: Callable[[str], Tensor]) -> Tensor:
    """The weight `name`, float32."""
    stored, half = read(name).flatten(), state.blocksize // 2
    codes = pad(stored, (0, -len(stored) % half)).view(-1, half)  # the last block need not be full
    scales = read(f"{name}{BLOCK_SCALES}")
    if state.nested_blocksize is not None:
        factors = read(f"{name}.nested_absmax").repeat_interleave(state.nested_blocksize)[: len(scales)]
        scales = read(f"{name}.nested_quant_map")[scales.to(torch.int32)] * factors + state.nested_offset
    levels = read(f"{name}.quant_map").float()
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)  # high half first
    out = torch.empty(len(codes), state.blocksize)
    step = max(1, CHUNK_BYTES // state.blocksize)
    for start in range(0, len(codes), step):
        rows = slice(start, start + step)
        torch.mul(pairs[codes[rows].to(torch.int32)].flatten(1), scales[rows, None].float(), out=out[rows])
    return out.flatten()[: prod(state.shape)].view(state.shape)
