"""Rows times a weight that is kept in 8 or 4 bits, which is never written out: a tile of it is made where it is used.

The numbers of a tile are those that `dequantise` would write, and the terms of a sum are added in the order of the
inputs, as cuBLASLt does without split-K: so a row has the bits that it has beside thousands of rows in training, where
the weight is written out. That holds on Hopper for tiles of 64 outputs and at least 16 rows, whose products are those
of a whole group of warps; smaller ones round otherwise.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.model import kernels
from palestra.model.kernels.dequantise import table_on
from palestra.model.quantised.forms import Form

MOST_ROWS = 64
"""With more rows, writing the weight out once costs less than making its tiles for each block of rows."""
MANY_OUTPUTS = 16384
"""So many outputs keep all of a card's multiprocessors busy, 64 at a time."""
TABLE, FLOAT8, INTEGER8, INTEGER4 = range(4)
KINDS = {"nf4": TABLE, "mxfp4": TABLE, "fp8": FLOAT8, "int8": INTEGER8, "int4": INTEGER4}


@triton.jit
def unpacked_tile(
    CODES, SCALES, levels, row, start, is_row, K,
    GROUP: tl.constexpr, KIND: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Inputs start to start + BK of some outputs: [BN, BK]. `row`: the outputs' rows, [BN]; `levels`: [16], looked up
    in registers: in a pipelined loop, loads that depend on loads would each be a copy to shared memory."""
    FOUR: tl.constexpr = (KIND == 0) or (KIND == 3)
    BYTES: tl.constexpr = BK // 2 if FOUR else BK
    PARTS: tl.constexpr = (BK + GROUP - 1) // GROUP
    WIDTH: tl.constexpr = BYTES // PARTS
    scale_place = SCALES + row[:, None] * (K // GROUP) + start // GROUP + tl.arange(0, PARTS)[None]
    scale = tl.load(scale_place, mask=is_row[:, None], other=0.0)[:, :, None]
    first = tl.multiple_of(start * BYTES // BK, BYTES)
    place = CODES + tl.multiple_of(row * (K * BYTES // BK), 16)[:, None] + first + tl.arange(0, BYTES)[None]
    code = tl.load(place, mask=is_row[:, None], other=0)
    if FOUR:
        wide = code.to(tl.int32)
        low, high = wide & 15, wide >> 4
        if KIND == 0:
            low = tl.reshape(tl.gather(levels, tl.reshape(low, (BYTES * BN,)), 0), (BN, PARTS, WIDTH)) * scale
            high = tl.reshape(tl.gather(levels, tl.reshape(high, (BYTES * BN,)), 0), (BN, PARTS, WIDTH)) * scale
        else:
            low = tl.reshape((low - 8).to(tl.float32), (BN, PARTS, WIDTH)) * scale
            high = tl.reshape((high - 8).to(tl.float32), (BN, PARTS, WIDTH)) * scale
        tile = tl.reshape(tl.join(low.to(DTYPE), high.to(DTYPE)), (BN, BK))
    else:
        if KIND == 1:
            level = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            level = code.to(tl.int8, bitcast=True).to(tl.float32)
        tile = tl.reshape(tl.reshape(level, (BN, PARTS, WIDTH)) * scale, (BN, BK)).to(DTYPE)
    return tile


@triton.jit
def _packed_linear_kernel(
    X, CODES, SCALES, LEVELS, BIAS, OUT, rows, N, K, x_stride,
    GROUP: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """OUT = X W^T + bias, a program for BM rows and BN outputs. It computes W X^T, so that the outputs, of which there
    are many, fill the matrix units, and their tile may stay in registers."""
    m, n, k = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    is_row, is_output, row = m < rows, n < N, n.to(tl.int64)
    levels = tl.load(LEVELS + tl.arange(0, 16))
    x_place = X + m.to(tl.int64)[None] * x_stride + k[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(x_place + start, mask=is_row[None], other=0.0)
        w = unpacked_tile(CODES, SCALES, levels, row, start, is_output, K, GROUP, KIND, BK, BN, X.dtype.element_ty)
        acc = tl.dot(w, x, acc)
    if HAS_BIAS:
        acc += tl.load(BIAS + n, mask=is_output, other=0.0).to(tl.float32)[:, None]
    place = OUT + m.to(tl.int64)[None] * N + n[:, None]
    tl.store(place, acc.to(OUT.dtype.element_ty), mask=is_row[None] & is_output[:, None])


def packed_linear(x: Tensor, codes: Tensor, scales: Tensor, form: Form, bias: Tensor | None) -> Tensor:
    """x W^T + bias for at most MOST_ROWS rows. codes: [outputs, bytes], scales: [outputs, groups]."""
    rows, width = x.shape
    n, group = len(codes), width // scales.shape[-1]
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows:
        tile = _tile_of(rows, n, form, x.device)
        tile["BK"] = min(tile["BK"], width & -width)
        _packed_linear_kernel[(triton.cdiv(n, tile["BN"]), triton.cdiv(rows, tile["BM"]))](
            *(x, codes.view(torch.uint8), scales, table_on(form, x.device), scales if bias is None else bias, out),
            *(rows, n, width, x.stride(0)),
            GROUP=group,
            KIND=KINDS[form.name],
            HAS_BIAS=bias is not None,
            **tile,
        )
    return out


def is_worth_it(rows: int, outputs: int, form: Form) -> bool:
    """Whether a product is faster this way. Looking codes up in a table takes so long that few programs at a time
    lose more by it than they save."""
    return rows <= MOST_ROWS and (KINDS[form.name] != TABLE or outputs >= MANY_OUTPUTS)


def _tile_of(rows: int, outputs: int, form: Form, device: torch.device) -> dict[str, int]:
    """Few programs read far ahead, since each has a multiprocessor to itself."""
    is_far = form.bits == 8 and outputs < MANY_OUTPUTS and rows <= 32
    stages = (3 if is_far or rows > 32 else 4) if kernels.is_roomy(device) else 2
    return {
        "BM": 32 if rows <= 32 else 64,
        "BN": 64,
        "BK": 256 if is_far else 128,
        "num_warps": 4,
        "num_stages": stages,
    }
