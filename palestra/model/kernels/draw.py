"""Drawing tokens without a pass of torch over the vocabulary for each rule, and without asking the host.

`draw_tokens` draws by the largest of logits and noise: the best of each block of the vocabulary, then the best of
blocks. `nucleus` finds the threshold of top-p without sorting: a program bisects the order of float32 numbers, since
the mass at or above a number only falls as the number rises. A row's result depends on that row alone.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.model.draw_noise import FIRST_FACTOR, LARGEST, SECOND_FACTOR, TOKEN_STEP

STEP, FIRST, SECOND = tl.constexpr(TOKEN_STEP), tl.constexpr(FIRST_FACTOR), tl.constexpr(SECOND_FACTOR)
TOP = tl.constexpr(LARGEST)
DRAW_BLOCK = 1024
NUCLEUS_BLOCK = 8192


@triton.jit
def _log_exponentials(first, second, token):
    """`draw_noise.log_exponentials` of one row."""
    x = (token.to(tl.uint32) * STEP) ^ first.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * FIRST ^ second.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 15)) * SECOND
    x = x ^ (x >> 16)
    v = tl.minimum(((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * (1.0 / 2147483648.0), TOP)
    rest = 1.0 - v
    # log(1 - v) with all digits of a small v: what 1 - v was rounded by is left out of both parts.
    exponential = tl.where(rest == 1.0, v, v * tl.log(rest) / (rest - 1.0))
    return tl.log(exponential)


@triton.jit
def _best_of_block_kernel(
    LOGITS, TEMPERATURES, KEYS, SCORES, TOKENS, n, stride, n_blocks, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(LOGITS + row * stride + i, mask=i < n, other=-float("inf")).to(tl.float32)
    chance = _log_exponentials(tl.load(KEYS + 2 * row), tl.load(KEYS + 2 * row + 1), i)
    score = tl.div_rn(x, tl.load(TEMPERATURES + row)) - chance
    score = tl.where(score == score, score, -float("inf"))
    best, place = tl.max(score, 0, return_indices=True)
    tl.store(SCORES + row * n_blocks + block, best)
    tl.store(TOKENS + row * n_blocks + block, block * BLOCK + place)


@triton.jit
def _best_of_blocks_kernel(SCORES, TOKENS, DRAWN, n_blocks, BLOCKS: tl.constexpr):
    row, b = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    scores = tl.load(SCORES + row * n_blocks + b, mask=b < n_blocks, other=-float("inf"))
    tl.store(DRAWN + row, tl.load(TOKENS + row * n_blocks + tl.argmax(scores, 0)).to(tl.int64))


def draw_tokens(logits: Tensor, temperatures: Tensor, keys: Tensor) -> Tensor:
    """int64 [rows]: a draw from softmax(logits / temperature) by the noise of `keys` (int32 [rows, 2])."""
    rows, n = logits.shape
    n_blocks = triton.cdiv(n, DRAW_BLOCK)
    scores = torch.empty(rows, n_blocks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, n_blocks, dtype=torch.int32, device=logits.device)
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _best_of_block_kernel[(rows, n_blocks)](
            *(logits, temperatures, keys, scores, tokens, n, logits.stride(0), n_blocks), BLOCK=DRAW_BLOCK, num_warps=4
        )
        _best_of_blocks_kernel[(rows,)](
            *(scores, tokens, drawn, n_blocks), BLOCKS=triton.next_power_of_2(n_blocks), num_warps=4
        )
    return drawn


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
