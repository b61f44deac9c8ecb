"""Triton kernels for what the decoder does beside its matrix products, in half precision on a GPU.

A row's result depends on that row alone, never on how many rows are computed beside it or on the tile it falls into:
each sum has one fixed order. So the sampler and the trainer get the same bits. Importing this package is cheap; Triton
is imported with the first module that has kernels. With TRITON_INTERPRET=1 the same kernels run on a CPU, for tests.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

HALF = (torch.bfloat16, torch.float16)


def can_run(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether the kernels take tensors of this kind; otherwise the plain code does."""
    return _on_device(torch.device(device).type) and dtype in HALF


@cache
def _on_device(kind: str) -> bool:
    has_triton = find_spec("triton") is not None
    return has_triton and (kind == "cuda" or (kind == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"))
