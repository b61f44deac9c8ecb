"""Products with few outputs, as a router's or a delta net's gates.

One program for all terms of a sum would leave most of the card idle, so a product is sums over chunks of the width,
which the kernel behind it adds in order: the bits of a row do not depend on the rows beside it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 16
CHUNK = 512  # terms of a sum that are added without a break


@triton.jit
def _chunk_sums_kernel(
    X, WEIGHT, SUMS, rows, K, N, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """SUMS[chunk] = X WEIGHT^T over the columns of a chunk (program axis 2): [rows, N]."""
    r, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    k, chunk = tl.arange(0, BK), tl.program_id(2)
    is_row, is_output = (r < rows)[:, None], (n < N)[:, None]
    x_row, w_row = X + r.to(tl.int64)[:, None] * x_stride + k[None], WEIGHT + n[:, None] * K + k[None]
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, K), BK):
        in_k = (start + k < K)[None]
        x = tl.load(x_row + start, mask=is_row & in_k, other=0.0)
        w = tl.load(w_row + start, mask=is_output & in_k, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc)
    place = SUMS + (chunk * rows + r).to(tl.int64)[:, None] * N + n[None]
    tl.store(place, acc, mask=is_row & (n < N)[None])


def chunk_sums(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T over each chunk of the width: [chunks, rows, outputs], float32. x: [rows, width]."""
    x, (rows, width), n = x.contiguous(), x.shape, len(weight)
    chunks, columns = triton.cdiv(width, CHUNK), min(128, max(16, triton.next_power_of_2(n)))
    sums = torch.empty(chunks, rows, n, dtype=torch.float32, device=x.device)
    if rows:
        _chunk_sums_kernel[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(n, columns), chunks)](
            *(x, weight, sums, rows, width, n, x.stride(0)),
            BM=TILE_ROWS,
            BN=columns,
            BK=64,
            CHUNK=CHUNK,
            num_warps=4,
            num_stages=4,
        )
    return sums
