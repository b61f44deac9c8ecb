"""Chooses the matrix products of torch on a GPU, and so whether a row's result depends on the rows beside it.

Without split-K, cuBLASLt adds the terms of a product in one order whatever the number of rows. That is the default.
"""

from __future__ import annotations

from typing import Literal

import torch

Numerics = Literal["exact", "fast"]


def set_numerics(numerics: Numerics) -> None:
    """Sets numerics for the whole process, since torch has one such setting. "exact": a row's bits depend on that row
    alone. "fast": cuBLAS may split long sums as it likes."""
    is_exact = numerics == "exact"
    matmul = torch.backends.cuda.matmul
    torch.backends.cuda.preferred_blas_library("cublaslt" if is_exact else "default")
    # (may accumulate in the short type, may split K)
    matmul.allow_bf16_reduced_precision_reduction = (False, False) if is_exact else True
    matmul.allow_fp16_reduced_precision_reduction = (False, False) if is_exact else True
