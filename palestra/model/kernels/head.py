"""Log-probabilities and entropies of logits, and the gradient of logits, in one pass each.

A program reads a row of logits once, in blocks of the vocabulary from left to right: one order of adding, whatever
rows stand beside it.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VOCAB_BLOCK = 4096


@triton.jit
def _log_sum_exp_kernel(LOGITS, TEMPERATURES, SUMS, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * stride
    temperature = tl.load(TEMPERATURES + tl.program_id(0)) if TEMPERATURES is not None else 1.0
    largest, total = -float("inf"), 0.0
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(LOGITS + row + i, mask=i < n, other=-float("inf")).to(tl.float32)
        if TEMPERATURES is not None:
            x = tl.div_rn(x, temperature)
        top = tl.maximum(largest, tl.max(x))
        base = tl.where(top == -float("inf"), 0.0, top)
        total = tl.fma(total, tl.exp(largest - base), tl.sum(tl.exp(x - base)))
        largest = top
    tl.store(SUMS + tl.program_id(0), largest + tl.log(total))


@triton.jit
def _entropies_kernel(LOGITS, SUMS, ENTROPIES, n, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * stride
    log_sum, total = tl.load(SUMS + tl.program_id(0)), 0.0
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        logp = tl.load(LOGITS + row + i, mask=i < n, other=-float("inf")).to(tl.float32) - log_sum
        p = tl.exp(logp)
        total -= tl.sum(p * tl.where(p > 0.0, logp, 0.0))
    tl.store(ENTROPIES + tl.program_id(0), total)


@triton.jit
def _logits_gradient_kernel(LOGITS, SUMS, TARGETS, GRADS, n, stride, N_TARGETS: tl.constexpr, BLOCK: tl.constexpr):
    """Overwrites a block of logits with grad * (one-hot - p), summed over the targets of the row."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(LOGITS + row * stride + i, mask=i < n, other=-float("inf"))
    p = tl.exp(x.to(tl.float32) - tl.load(SUMS + row))
    d = tl.zeros((BLOCK,), tl.float32)
    for k in range(N_TARGETS):
        is_target = i == tl.load(TARGETS + row * N_TARGETS + k)
        d += tl.load(GRADS + row * N_TARGETS + k) * (tl.where(is_target, 1.0, 0.0) - p)
    tl.store(LOGITS + row * stride + i, d.to(x.dtype), mask=i < n)


def log_sum_exp(logits: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """float32 [rows], of logits divided by their row's temperature (float32 [rows]); 1 leaves the bits as they are."""
    rows, n = logits.shape
    sums = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _log_sum_exp_kernel[(rows,)](logits, temperatures, sums, n, logits.stride(0), BLOCK=VOCAB_BLOCK, num_warps=8)
    return sums


def entropies(logits: Tensor, sums: Tensor) -> Tensor:
    """float32 [rows], in nats; `sums` are what `log_sum_exp` returns for them."""
    rows, n = logits.shape
    found = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _entropies_kernel[(rows,)](logits, sums, found, n, logits.stride(0), BLOCK=VOCAB_BLOCK, num_warps=8)
    return found


def logits_gradient_(logits: Tensor, sums: Tensor, targets: Tensor, grads: Tensor) -> Tensor:
    """d loss / d logits in place of the logits, from d loss / d log-probability of [rows, K] targets."""
    rows, n = logits.shape
    if rows:
        _logits_gradient_kernel[(rows, triton.cdiv(n, VOCAB_BLOCK))](
            *(logits, sums, targets.contiguous(), grads.contiguous(), n, logits.stride(0)),
            N_TARGETS=targets.shape[1],
            BLOCK=VOCAB_BLOCK,
            num_warps=8,
        )
    return logits
