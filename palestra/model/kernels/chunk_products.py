"""Helpers of the kernels of recurrences in chunks: spans of rows, sums of decays, and products of float32's accuracy.

Products of two float32 operands are three passes of tf32 (`tf32x3`); where one operand is of the model's half type,
which tf32 holds exactly, two.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

VALUE_BLOCK = 32  # columns of a state in a program: a state's rows are then read in whole cache lines


@dataclass(frozen=True, slots=True)
class Spans:
    """Neighbouring rows of sequences."""

    table: Tensor
    """int32 [spans, 4]: first row, rows (0: nothing to do), first chunk, slot of the state (-1: none)."""
    chunks: Tensor | None = None
    """int32 [chunks, 2]: first row, rows (0: nothing to do). Gradients need them."""


def count_chunks(spans: Spans) -> int:
    assert spans.chunks is not None, "gradients need the chunks of spans"
    return len(spans.chunks)


@triton.jit
def gates(BETA, DECAY, row0, count, head, N_HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """A chunk's beta, the sums of its decays up to each row, and the sum of all."""
    r = tl.arange(0, CHUNK)
    place = (row0 + r).to(tl.int64) * N_HEADS + head
    beta = tl.load(BETA + place, mask=r < count, other=0.0)
    total = tl.cumsum(tl.load(DECAY + place, mask=r < count, other=0.0), 0)
    return beta, total, tl.sum(tl.where(r == CHUNK - 1, total, 0.0), 0)


@triton.jit
def product(a, b, onto=None):
    return tl.dot(a, b, onto, input_precision="tf32x3")


@triton.jit
def coarse(x):
    """Returns the part of a number that tf32 holds; the rest is the other half's."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def half_product(x, b):
    """Rows of the model's half type, which tf32 holds exactly, times float32: two passes are enough."""
    x, top = x.to(tl.float32), coarse(b)
    return tl.dot(x, top, tl.dot(x, b - top, input_precision="tf32"), input_precision="tf32")


@triton.jit
def product_half(a, x):
    x, top = x.to(tl.float32), coarse(a)
    return tl.dot(top, x, tl.dot(a - top, x, input_precision="tf32"), input_precision="tf32")
