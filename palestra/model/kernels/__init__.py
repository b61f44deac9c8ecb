"""Triton kernels for what the decoder does beside its matrix products, in half precision on a GPU.

A row's result depends on that row alone, never on how many rows are computed beside it or on the tile it falls into:
each sum has one fixed order. So the sampler and the trainer get the same bits. Importing this package is cheap; Triton
is imported with the first module that has kernels.

So no split-K, and no `tl.sum` over keys, whose order depends on the tile and the element type. A new kernel gets a
launch in `tests/model/kernels/compile_kernels.py`, which compiles all of them for Hopper without a card. Their tests
run on a CPU by Triton's interpreter, in float16: it multiplies bfloat16 wrongly, and knows no registers, spills and
shared memory.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

HALF = (torch.bfloat16, torch.float16)
ROOMY = 200 << 10
interpreted = False
"""Whether CPU tensors go through the kernels, too, by Triton's interpreter: for tests."""


def can_run(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether the kernels take tensors of this kind; otherwise the plain code does."""
    return dtype in HALF and can_run_on(device)


def can_run_on(device: torch.device | str) -> bool:
    """Whether there are kernels for the device at all; few of them take float32."""
    kind = torch.device(device).type
    return (kind == "cuda" or (interpreted and kind == "cpu")) and _has_triton()


@cache
def is_roomy(device: torch.device | str) -> bool:
    """Whether one program may have the 200 KB of shared memory that tiles of wide heads take: Hopper and Blackwell have
    them, Ampere and Ada do not. The interpreter has no limit."""
    if torch.device(device).type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= ROOMY


@cache
def is_hopper(device: torch.device | str) -> bool:
    """Whether tiles are multiplied as on Hopper, where their rounding was compared with cuBLASLt's. The interpreter
    counts as such a card."""
    return torch.device(device).type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
