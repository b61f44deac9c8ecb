"""AdamW on rows of many adapters in one launch, each with settings of its own."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
N_PLACES, N_SETTINGS = 5, 8


@triton.jit
def _adamw_kernel(PLACES, SETTINGS, N_PLACES: tl.constexpr, N_SETTINGS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    places, settings = PLACES + row * N_PLACES, SETTINGS + row * N_SETTINGS
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = i < tl.load(places)
    WEIGHTS = tl.load(places + 1).to(tl.pointer_type(tl.float32))
    GRADS = tl.load(places + 2).to(tl.pointer_type(tl.float32))
    MEANS = tl.load(places + 3).to(tl.pointer_type(tl.float32))
    SQUARES = tl.load(places + 4).to(tl.pointer_type(tl.float32))
    weight, grad = tl.load(WEIGHTS + i, mask=real, other=0.0), tl.load(GRADS + i, mask=real, other=0.0)
    mean, square = tl.load(MEANS + i, mask=real, other=0.0), tl.load(SQUARES + i, mask=real, other=0.0)
    grad = grad * tl.load(settings)
    mean += (grad - mean) * tl.load(settings + 1)
    square = square * tl.load(settings + 2) + grad * grad * tl.load(settings + 3)
    weight -= weight * tl.load(settings + 4)
    size = tl.sqrt_rn(square) / tl.load(settings + 6) + tl.load(settings + 7)
    tl.store(WEIGHTS + i, weight - tl.load(settings + 5) * mean / size, mask=real)
    tl.store(MEANS + i, mean, mask=real)
    tl.store(SQUARES + i, square, mask=real)


def adamw_rows(places: Tensor, settings: Tensor, longest: int) -> None:
    """`places`: int64 [rows, 5], the length of a row and the addresses of its weights, gradient and moments (float32).
    `settings`: float32 [rows, 8], what multiplies the gradient, 1 - beta1, beta2, 1 - beta2, decay, step size, the root
    of the second bias correction, epsilon."""
    _adamw_kernel[(triton.cdiv(longest, BLOCK), len(places))](
        places, settings, N_PLACES=N_PLACES, N_SETTINGS=N_SETTINGS, BLOCK=BLOCK, num_warps=8
    )
