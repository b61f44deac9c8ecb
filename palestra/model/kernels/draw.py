"""Drawing tokens without a pass of torch over the vocabulary for each rule, and without asking the host.

`draw_tokens` finds the token at which the cumulative probability passes a number, in vocabulary order: blocks of the
vocabulary are summed apart, then the block is found, then the token inside it. `nucleus` finds the threshold of top-p
without sorting: a program bisects the order of float32 numbers, since the mass at or above a number only falls as the
number rises. A row's result depends on that row alone.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

DRAW_BLOCK = 1024
NUCLEUS_BLOCK = 8192


@triton.jit
def _probabilities(LOGITS, SUMS, TEMPERATURES, row, i, n, stride):
    x = tl.load(LOGITS + row * stride + i, mask=i < n, other=-float("inf")).to(tl.float32)
    return tl.exp(tl.div_rn(x, tl.load(TEMPERATURES + row)) - tl.load(SUMS + row))


@triton.jit
def _block_mass_kernel(LOGITS, SUMS, TEMPERATURES, MASS, n, stride, n_blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    p = _probabilities(LOGITS, SUMS, TEMPERATURES, row, block * BLOCK + tl.arange(0, BLOCK), n, stride)
    tl.store(MASS + row * n_blocks + block, tl.sum(p))


@triton.jit
def _pick_kernel(
    LOGITS, SUMS, TEMPERATURES, MASS, U, TOKENS, n, stride, n_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    row, b, j = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    mass = tl.load(MASS + row * n_blocks + b, mask=b < n_blocks, other=0.0).to(tl.float64)
    ends = tl.cumsum(mass, 0)
    target = tl.load(U + row) * tl.sum(mass)
    last = tl.max(tl.where(mass > 0.0, b, 0))
    block = tl.minimum(tl.sum((ends <= target).to(tl.int32)), last)
    rest = tl.maximum(target - tl.sum(tl.where(b < block, mass, 0.0)), 0.0)
    p = _probabilities(LOGITS, SUMS, TEMPERATURES, row, block * BLOCK + j, n, stride)
    inside = tl.cumsum(p.to(tl.float64), 0)
    # The block's own running sum may round to less than its share of the total: stay within what can be drawn.
    place = tl.minimum(tl.sum((inside <= rest).to(tl.int32)), tl.max(tl.where(p > 0.0, j, 0)))
    tl.store(TOKENS + row, (block * BLOCK + place).to(tl.int64))


def draw_tokens(logits: Tensor, sums: Tensor, temperatures: Tensor, u: Tensor) -> Tensor:
    """int64 [rows]: by softmax(logits / temperature), whose log-sum-exp is `sums`, and u (float64) in [0, 1)."""
    rows, n = logits.shape
    n_blocks = triton.cdiv(n, DRAW_BLOCK)
    mass = torch.empty(rows, n_blocks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _block_mass_kernel[(rows, n_blocks)](
            *(logits, sums, temperatures, mass, n, logits.stride(0), n_blocks), BLOCK=DRAW_BLOCK, num_warps=4
        )
        _pick_kernel[(rows,)](
            *(logits, sums, temperatures, mass, u, tokens, n, logits.stride(0), n_blocks),
            BLOCK=DRAW_BLOCK,
            BLOCKS=triton.next_power_of_2(n_blocks),
            num_warps=4,
        )
    return tokens


@triton.jit
def _order(x):
    """An integer that is larger where the float is larger."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _nucleus_kernel(LOGITS, TOP_P, OUT, n, stride, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    top_p = tl.load(TOP_P + row)
    if top_p >= 1.0:
        tl.store(OUT + row, -float("inf"))
    else:
        largest, total = -float("inf"), 0.0
        for start in range(0, n, BLOCK):
            x = tl.load(LOGITS + row * stride + start + i, mask=start + i < n, other=-float("inf"))
            largest = tl.maximum(largest, tl.max(x))
        for start in range(0, n, BLOCK):
            x = tl.load(LOGITS + row * stride + start + i, mask=start + i < n, other=-float("inf"))
            total += tl.sum(tl.exp(x - largest))
        low, high = _order(tl.full((), -float("inf"), tl.float32)), _order(largest) + 1
        while high - low > 1:  # `low` has enough at or above it, `high` has not
            step = tl.maximum((high - low) // 4, 1)
            first = low + step
            second, third = tl.minimum(low + 2 * step, high - 1), tl.minimum(low + 3 * step, high - 1)
            mass1, mass2, mass3 = 0.0, 0.0, 0.0
            for start in range(0, n, BLOCK):
                x = tl.load(LOGITS + row * stride + start + i, mask=start + i < n, other=-float("inf"))
                order, p = _order(x), tl.exp(x - largest)
                mass1 += tl.sum(tl.where(order >= first, p, 0.0))
                mass2 += tl.sum(tl.where(order >= second, p, 0.0))
                mass3 += tl.sum(tl.where(order >= third, p, 0.0))
            enough = top_p * total
            # A NaN is never enough, so that the range shrinks and the loop ends on any row.
            is1 = mass1 >= enough
            is2 = is1 & (mass2 >= enough)
            is3 = is2 & (mass3 >= enough)
            upper = tl.where(is3, high, tl.where(is2, third, tl.where(is1, second, first)))
            low = tl.where(is3, third, tl.where(is2, second, tl.where(is1, first, low)))
            high = tl.minimum(high, upper)
        bits = low.to(tl.int32)
        tl.store(OUT + row, (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


def nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit of the smallest set whose probability reaches top_p, [rows, 1]; -inf where top_p is 1 or
    more. Logits: float32 [rows, vocabulary], a finite one in each row."""
    rows, n = logits.shape
    out = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    if rows:
        _nucleus_kernel[(rows,)](logits, top_p.contiguous(), out, n, logits.stride(0), BLOCK=NUCLEUS_BLOCK, num_warps=8)
    return out
