"""The threshold of top-p without sorting the vocabulary and without asking the host.

A program bisects the order of float32 numbers for one row: the mass at or above a number only falls as the number
rises. Each pass adds the row's blocks from left to right. Owns: this kernel. Never touches: the draw itself.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VOCAB_BLOCK = 8192


@triton.jit
def _order(x):
    """An integer that is larger where the float is larger."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _nucleus_kernel(LOGITS, TOP_P, OUT, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top_p = tl.load(TOP_P + row)
    if top_p >= 1.0:
        tl.store(OUT + row, -float("inf"))
    else:
        i = tl.arange(0, BLOCK)
        largest = -float("inf")
        for start in range(0, n, BLOCK):
            x = tl.load(LOGITS + row * stride + start + i, mask=start + i < n, other=-float("inf"))
            largest = tl.maximum(largest, tl.max(x))
        total = 0.0
        for start in range(0, n, BLOCK):
            x = tl.load(LOGITS + row * stride + start + i, mask=start + i < n, other=-float("inf"))
            total += tl.sum(tl.exp(x - largest))
        low, high = _order(tl.full((), -float("inf"), tl.float32)), _order(largest) + 1
        while high - low > 1:
            middle = low + (high - low) // 2
            mass = 0.0
            for start in range(0, n, BLOCK):
                x = tl.load(LOGITS + row * stride + start + i, mask=start + i < n, other=-float("inf"))
                mass += tl.sum(tl.where(_order(x) >= middle, tl.exp(x - largest), 0.0))
            is_enough = mass >= top_p * total
            low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        bits = low.to(tl.int32)
        tl.store(OUT + row, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


def nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit of the smallest set whose probability reaches top_p, [rows, 1]; -inf where top_p is 1 or
    more. Logits: float32 [rows, vocabulary], a finite one in each row."""
    rows, n = logits.shape
    out = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    if rows:
        _nucleus_kernel[(rows,)](logits, top_p.contiguous(), out, n, logits.stride(0), BLOCK=VOCAB_BLOCK, num_warps=8)
    return out
