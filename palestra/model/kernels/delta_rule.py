"""The gated delta rule by kernels: forward position by position, its gradient in chunks of 64.

Prompts, decoding and the trainer's forward pass run the same kernel, so that a sampled token has the trainer's bits. A
program has one head of one sequence and some of its value dimensions, in one warp, which sums without waiting for
others. Its tile depends on the model alone, and the kernel has one variant: a row's bits do not depend on what is
computed beside it, nor on where a sequence was cut.

The gradient is that of the chunked form, which is equal up to rounding: it takes the states between chunks, which the
forward pass has kept, and computes the rest again by products, three passes of tf32 (`tf32x3`) with float32's accuracy.
It has no atomics. Everything is float32.

A recurrent state must never advance twice: the scheduler rolls back a plan that is not committed.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from palestra.model.kernels.chunk_products import (
    VALUE_BLOCK,
    Spans,
    count_chunks,
    gates,
    half_product,
    product,
    product_half,
)
from palestra.model.loading.layer_spec import DeltaNetSpec
from palestra.model.mixers.chunked_scan import CHUNK


@triton.jit
def _head(X, rows, is_row, first, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a head as they are, and what gives them length 1."""
    d = tl.arange(0, BLOCK_D)[None]
    x = tl.load(X + rows[:, None] + first + d, mask=is_row[:, None] & (d < D), other=0.0)
    wide = x.to(tl.float32)
    return x, tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit
def _raw_gradient(X, rows, is_row, first, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Turns the gradient of rows of length 1 into that of the rows as they are."""
    x, unit = _head(X, rows, is_row, first, D, BLOCK_D)
    along = x.to(tl.float32) * unit[:, None]
    return ((d - along * tl.sum(along * d, 1)[:, None]) * unit[:, None]).to(X.dtype.element_ty)


@triton.jit
def _along(X, rows, is_row, first, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Products of rows of length 1 and their gradients."""
    x, unit = _head(X, rows, is_row, first, D, BLOCK_D)
    return unit * tl.sum(x.to(tl.float32) * d, 1)


@triton.jit
def _position(
    QKV, BETA, DECAY, row, head, i, j, stride, N_KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """A position's query, key and value as they are in memory, its beta and its decay."""
    row = row.to(tl.int64)
    x, gate = QKV + row * stride, row * (N_KEY_HEADS * SHARE) + head
    q = tl.load(x + head // SHARE * DK + i, mask=i < DK, other=0.0)
    k = tl.load(x + (N_KEY_HEADS + head // SHARE) * DK + i, mask=i < DK, other=0.0)
    v = tl.load(x + 2 * N_KEY_HEADS * DK + head * DV + j, mask=j < DV, other=0.0)
    return q, k, v, tl.load(BETA + gate), tl.load(DECAY + gate)


@triton.jit(do_not_specialize=["keep_at"])
def _steps_kernel(
    QKV, BETA, DECAY, STATES, OUT, BEFORE, SPANS, scale, stride, keep_at, N_KEY_HEADS: tl.constexpr,
    SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The positions of a span in order; each is loaded while the one before is computed. BEFORE takes the states that
    chunks begin with if `keep_at` is 0, none if it is -1. Where training and sampling differ there are conditions at
    run time, not variants: in another variant the compiler may lay out the tile, and so order its sums, otherwise."""
    head, span, N_HEADS = tl.program_id(1), tl.program_id(2), N_KEY_HEADS * SHARE
    first, count = tl.load(SPANS + span * 4), tl.load(SPANS + span * 4 + 1)
    if count > 0:
        i, j = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
        mask = (i < DK)[:, None] & (j < DV)[None]
        slot = tl.load(SPANS + span * 4 + 3).to(tl.int64)
        in_slot = (i < DK)[:, None] & (j < tl.where(slot >= 0, DV, 0))[None]
        state_place = STATES + (slot * N_HEADS + head) * DK * DV + i[:, None] * DV + j[None]
        state = tl.load(state_place, mask=in_slot, other=0.0)
        at = tl.load(SPANS + span * 4 + 2).to(tl.int64) * N_HEADS + head
        last = first + count - 1
        ahead = _position(QKV, BETA, DECAY, first, head, i, j, stride, N_KEY_HEADS, SHARE, DK, DV)
        for start in range(0, count, CHUNK):
            if keep_at == 0:
                tl.store(BEFORE + at * DK * DV + i[:, None] * DV + j[None], state, mask=mask)
                at += N_HEADS
            for n in range(start, tl.minimum(start + CHUNK, count)):
                q, k, v, beta, decay = ahead
                following = tl.minimum(first + n + 1, last)
                ahead = _position(QKV, BETA, DECAY, following, head, i, j, stride, N_KEY_HEADS, SHARE, DK, DV)
                q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
                q_unit = tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
                k_unit = tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
                state = state * tl.exp(decay)
                change = beta * (v - k_unit * tl.sum(state * k[:, None], 0))
                state = tl.fma(k[:, None], (k_unit * change)[None], state)
                out_place = OUT + ((first + n).to(tl.int64) * N_HEADS + head) * DV + j
                tl.store(out_place, q_unit * tl.sum(state * q[:, None], 0), mask=j < DV)
        tl.store(state_place, state, mask=in_slot)


@triton.jit
def _chunk_products_kernel(
    QKV, BETA, DECAY, CHUNKS, INVERSES, SCORES, scale, stride, N_KEY_HEADS: tl.constexpr, SHARE: tl.constexpr,
    DK: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Computes what turns a chunk's corrections, as they would be by the state alone, into those that know each
    other (the inverse of a unit triangle, row by row), and the decayed scores of its queries and keys."""
    head, chunk, N_HEADS = tl.program_id(0), tl.program_id(1), N_KEY_HEADS * SHARE
    row0, count = tl.load(CHUNKS + chunk * 2), tl.load(CHUNKS + chunk * 2 + 1)
    if count > 0:
        r = tl.arange(0, CHUNK)
        rows, is_row = (row0 + r).to(tl.int64) * stride, r < count
        q, q_unit = _head(QKV, rows, is_row, head // SHARE * DK, DK, BLOCK_K)
        k, k_unit = _head(QKV, rows, is_row, (N_KEY_HEADS + head // SHARE) * DK, DK, BLOCK_K)
        beta, total, _ = gates(BETA, DECAY, row0, count, head, N_HEADS, CHUNK)
        q_unit = q_unit * scale
        place = (chunk.to(tl.int64) * N_HEADS + head) * CHUNK * CHUNK + r[:, None] * CHUNK + r[None]
        is_seen = r[:, None] >= r[None]
        between = tl.exp(tl.where(is_seen, total[:, None] - total[None], 0.0))
        scores = tl.dot(q, tl.trans(k)) * (q_unit[:, None] * k_unit[None])
        tl.store(SCORES + place, tl.where(is_seen, scores * between, 0.0))
        # transposed, so that a row of the triangle is a column here, which multiplies rows of the inverse
        is_later = r[None] > r[:, None]
        between = tl.exp(tl.where(is_later, total[None] - total[:, None], 0.0))
        triangle = tl.dot(k, tl.trans(k)) * (k_unit[:, None] * (k_unit * beta)[None])
        triangle = tl.where(is_later, triangle * between, 0.0)
        inverse = tl.where(r[:, None] == r[None], 1.0, 0.0)
        for i in range(1, count):
            weights = tl.sum(tl.where(r[None] == i, triangle, 0.0), 1)
            inverse -= tl.where(r[:, None] == i, tl.sum(weights[:, None] * inverse, 0)[None], 0.0)
        tl.store(INVERSES + place, inverse)


@triton.jit
def _chunks_backward_kernel(
    QKV, BETA, DECAY, D_OUT, D_AFTER, D_CHANGE, SPANS, INVERSES, SCORES, scale, stride, N_KEY_HEADS: tl.constexpr,
    SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The chunks of a span from the last to the first. D_AFTER takes the gradient of the state after each chunk,
    D_CHANGE that of its corrections as they would be by the state alone: [rows, value heads, value dim]."""
    head, span, N_HEADS = tl.program_id(1), tl.program_id(2), N_KEY_HEADS * SHARE
    first, count = tl.load(SPANS + span * 4), tl.load(SPANS + span * 4 + 1)
    r, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    j = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = (j < DV)[None]
    n_chunks = tl.cdiv(count, CHUNK)
    at = (tl.load(SPANS + span * 4 + 2).to(tl.int64) + n_chunks - 1) * N_HEADS + head
    d_state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for back in range(n_chunks):
        start = (n_chunks - 1 - back) * CHUNK
        row0, live = first + start, tl.minimum(count - start, CHUNK)
        row, is_row = (row0 + r).to(tl.int64), r < live
        q, q_unit = _head(QKV, row * stride, is_row, head // SHARE * DK, DK, BLOCK_K)
        k, k_unit = _head(QKV, row * stride, is_row, (N_KEY_HEADS + head // SHARE) * DK, DK, BLOCK_K)
        beta, total, last = gates(BETA, DECAY, row0, live, head, N_HEADS, CHUNK)
        grown, left = tl.exp(total), tl.exp(last - total)
        square = at * CHUNK * CHUNK + r[:, None] * CHUNK + r[None]
        place, mask = (row[:, None] * N_HEADS + head) * DV + j[None], is_row[:, None] & is_value
        d_out = tl.load(D_OUT + place, mask=mask, other=0.0)
        d_after = D_AFTER + at * DK * DV + i[:, None] * DV + j[None]
        tl.store(d_after, d_state, mask=(i < DK)[:, None] & is_value)
        d_joint = product(tl.trans(tl.load(SCORES + square)), d_out)
        d_joint += (left * k_unit)[:, None] * half_product(k, d_state)
        d_change = product(tl.trans(tl.load(INVERSES + square)), d_joint)
        tl.store(D_CHANGE + place, d_change, mask=mask)
        d_state = tl.exp(last) * d_state + half_product(tl.trans(q), (grown * scale * q_unit)[:, None] * d_out)
        d_state -= half_product(tl.trans(k), (grown * beta * k_unit)[:, None] * d_change)
        at -= N_HEADS


@triton.jit
def _chunk_changes_kernel(
    QKV, BETA, DECAY, BEFORE, D_OUT, D_CHANGE, D_QKV, D_BETA, D_DECAY, CHANGES, CHUNKS, INVERSES, SCORES, scale, stride,
    N_KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A chunk of one value head: its corrections, the gradients of its values and betas, and of its scores and its
    triangle. These two take the places of SCORES and INVERSES, ready to be multiplied by keys and queries. D_DECAY
    takes what they add to the gradient of the sums of decays."""
    head, chunk, N_HEADS = tl.program_id(0), tl.program_id(1), N_KEY_HEADS * SHARE
    row0, count = tl.load(CHUNKS + chunk * 2), tl.load(CHUNKS + chunk * 2 + 1)
    r, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    row, is_row = (row0 + r).to(tl.int64), r < count
    q_first, k_first = head // SHARE * DK, (N_KEY_HEADS + head // SHARE) * DK
    beta, total, _ = gates(BETA, DECAY, row0, count, head, N_HEADS, CHUNK)
    grown = tl.exp(total)
    at = chunk.to(tl.int64) * N_HEADS + head
    square = at * CHUNK * CHUNK + r[:, None] * CHUNK + r[None]
    d_scores, d_triangle = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    d_beta, d_total = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
    for block in range(0, DV, BLOCK_V):
        j = block + tl.arange(0, BLOCK_V)
        is_value = (j < DV)[None]
        in_state = at * DK * DV + i[:, None] * DV + j[None]
        state = tl.load(BEFORE + in_state, mask=(i < DK)[:, None] & is_value, other=0.0)
        mask, value = is_row[:, None] & is_value, 2 * N_KEY_HEADS * DK + head * DV + j[None]
        place = (row[:, None] * N_HEADS + head) * DV + j[None]
        k, k_unit = _head(QKV, row * stride, is_row, k_first, DK, BLOCK_K)
        recalled = (grown * k_unit)[:, None] * half_product(k, state)
        v = tl.load(QKV + row[:, None] * stride + value, mask=mask, other=0.0).to(tl.float32)
        change = product(tl.load(INVERSES + square), beta[:, None] * (v - recalled))
        tl.store(CHANGES + place, change, mask=mask)
        d_change = tl.load(D_CHANGE + place, mask=mask, other=0.0)
        d_v = beta[:, None] * d_change
        tl.store(D_QKV + row[:, None] * stride + value, d_v.to(D_QKV.dtype.element_ty), mask=mask)
        d_beta += tl.sum((v - recalled) * d_change, 1)
        d_total -= tl.sum(recalled * d_v, 1)
        d_triangle -= product(d_change, tl.trans(change))
        d_scores += product(tl.load(D_OUT + place, mask=mask, other=0.0), tl.trans(change))
    q, q_unit = _head(QKV, row * stride, is_row, q_first, DK, BLOCK_K)
    k, k_unit = _head(QKV, row * stride, is_row, k_first, DK, BLOCK_K)
    is_seen, is_later = r[:, None] >= r[None], r[:, None] > r[None]
    between = tl.exp(tl.where(is_seen, total[:, None] - total[None], 0.0))
    d_scores = tl.where(is_seen, d_scores * between * scale, 0.0)
    moved = d_scores * (tl.dot(q, tl.trans(k)) * (q_unit[:, None] * k_unit[None]))
    d_total += tl.sum(moved, 1) - tl.sum(moved, 0)
    d_triangle = tl.where(is_later, d_triangle * between, 0.0)
    moved = d_triangle * (tl.dot(k, tl.trans(k)) * (k_unit[:, None] * k_unit[None]))
    d_beta += tl.sum(moved, 1)
    moved = moved * beta[:, None]
    d_total += tl.sum(moved, 1) - tl.sum(moved, 0)
    d_triangle = d_triangle * beta[:, None]
    tl.store(SCORES + square, d_scores)
    tl.store(INVERSES + square, d_triangle + tl.trans(d_triangle))
    gate = row * N_HEADS + head
    tl.store(D_BETA + gate, d_beta, mask=is_row)
    tl.store(D_DECAY + gate, d_total, mask=is_row)


@triton.jit
def _chunk_gradients_kernel(
    QKV, BETA, DECAY, BEFORE, D_OUT, D_AFTER, D_CHANGE, D_QKV, D_DECAY, CHANGES, CHUNKS, D_TRIANGLES, D_SCORES, scale,
    stride, N_KEY_HEADS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's queries and keys for one key head, and of the decays of the value heads that share it,
    one after another."""
    key_head, chunk, N_HEADS = tl.program_id(0), tl.program_id(1), N_KEY_HEADS * SHARE
    row0, count = tl.load(CHUNKS + chunk * 2), tl.load(CHUNKS + chunk * 2 + 1)
    r, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    row, is_row = (row0 + r).to(tl.int64), r < count
    q_first, k_first = key_head * DK, (N_KEY_HEADS + key_head) * DK
    d_q, d_k = tl.zeros((CHUNK, BLOCK_K), tl.float32), tl.zeros((CHUNK, BLOCK_K), tl.float32)
    for head in range(key_head * SHARE, key_head * SHARE + SHARE):
        beta, total, last = gates(BETA, DECAY, row0, count, head, N_HEADS, CHUNK)
        at, d_last = chunk.to(tl.int64) * N_HEADS + head, 0.0
        d_total = -_along(QKV, row * stride, is_row, q_first, d_q, DK, BLOCK_K)
        for block in range(0, DV, BLOCK_V):
            j = block + tl.arange(0, BLOCK_V)
            is_value = (j < DV)[None]
            in_state, in_states = at * DK * DV + i[:, None] * DV + j[None], (i < DK)[:, None] & is_value
            place, mask = (row[:, None] * N_HEADS + head) * DV + j[None], is_row[:, None] & is_value
            state = tl.trans(tl.load(BEFORE + in_state, mask=in_states, other=0.0))
            d_out = tl.load(D_OUT + place, mask=mask, other=0.0)
            d_q = product((tl.exp(total) * scale)[:, None] * d_out, state, d_q)
            d_change = tl.load(D_CHANGE + place, mask=mask, other=0.0)
            d_k = product((-tl.exp(total) * beta)[:, None] * d_change, state, d_k)
        d_total += _along(QKV, row * stride, is_row, q_first, d_q, DK, BLOCK_K)
        d_left = -_along(QKV, row * stride, is_row, k_first, d_k, DK, BLOCK_K)
        for block in range(0, DV, BLOCK_V):
            j = block + tl.arange(0, BLOCK_V)
            is_value = (j < DV)[None]
            in_state, in_states = at * DK * DV + i[:, None] * DV + j[None], (i < DK)[:, None] & is_value
            place, mask = (row[:, None] * N_HEADS + head) * DV + j[None], is_row[:, None] & is_value
            d_after = tl.load(D_AFTER + in_state, mask=in_states, other=0.0)
            d_last += tl.sum(tl.sum(tl.load(BEFORE + in_state, mask=in_states, other=0.0) * d_after, 1), 0)
            change = tl.load(CHANGES + place, mask=mask, other=0.0)
            d_k = product(tl.exp(last - total)[:, None] * change, tl.trans(d_after), d_k)
        d_left += _along(QKV, row * stride, is_row, k_first, d_k, DK, BLOCK_K)
        d_last = tl.exp(last) * d_last + tl.sum(d_left, 0)
        gate = row * N_HEADS + head
        d_total += tl.where(r == CHUNK - 1, d_last, 0.0) - d_left + tl.load(D_DECAY + gate, mask=is_row, other=0.0)
        tl.store(D_DECAY + gate, tl.cumsum(d_total, 0, reverse=True), mask=is_row)
        q, q_unit = _head(QKV, row * stride, is_row, q_first, DK, BLOCK_K)
        k, k_unit = _head(QKV, row * stride, is_row, k_first, DK, BLOCK_K)
        square = at * CHUNK * CHUNK + r[:, None] * CHUNK + r[None]
        d_scores = tl.load(D_SCORES + square)
        d_q += product_half(d_scores * k_unit[None], k)
        d_k += product_half(tl.trans(d_scores * q_unit[:, None]), q)
        d_k += product_half(tl.load(D_TRIANGLES + square) * k_unit[None], k)
    mask, out = is_row[:, None] & (i < DK)[None], D_QKV + row[:, None] * stride + i[None]
    tl.store(out + q_first, _raw_gradient(QKV, row * stride, is_row, q_first, d_q, DK, BLOCK_K), mask=mask)
    tl.store(out + k_first, _raw_gradient(QKV, row * stride, is_row, k_first, d_k, DK, BLOCK_K), mask=mask)


def delta_steps(
    qkv: Tensor,
    beta: Tensor,
    decay: Tensor,
    spans: Spans,
    spec: DeltaNetSpec,
    states: Tensor | None,
    out: Tensor,
    before: Tensor | None = None,
) -> None:
    """Advances the states of spans, float32 [slots, value heads, key dim, value dim], and writes their rows of `out`,
    float32 [rows, value heads, value dim]. A span whose slot is -1 begins with zeros, and its state is dropped.
    `before` takes the state that each chunk of 64 positions begins with. Rows of `qkv` are dense, gates are float32."""
    if len(spans.table):
        beta, decay = beta.contiguous(), decay.contiguous()
        _steps_kernel[(_value_blocks(spec), spec.n_value_heads, len(spans.table))](
            *(qkv, beta, decay, out if states is None else states, out, out if before is None else before),
            *(spans.table, spec.key_dim**-0.5, qkv.stride(0), -1 if before is None else 0),
            **_shape(spec),
            CHUNK=CHUNK,
            num_warps=1,
        )


def delta_rule(qkv: Tensor, beta: Tensor, decay: Tensor, spans: Spans, spec: DeltaNetSpec) -> Tensor:
    """float32 [rows, value heads, value dim] of sequences that all begin here, with gradients."""
    if torch.is_grad_enabled() and qkv.requires_grad:
        return _DeltaRule.apply(qkv, beta, decay, spans, spec)
    return _packed(qkv, beta, decay, spans, spec, None)


def _packed(
    qkv: Tensor, beta: Tensor, decay: Tensor, spans: Spans, spec: DeltaNetSpec, before: Tensor | None
) -> Tensor:
    out = torch.empty(len(qkv), spec.n_value_heads, spec.value_dim, dtype=torch.float32, device=qkv.device)
    delta_steps(qkv, beta, decay, spans, spec, None, out, before)
    return out


class _DeltaRule(Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, beta: Tensor, decay: Tensor, spans: Spans, spec: DeltaNetSpec) -> Tensor:
        before = torch.empty(count_chunks(spans), *spec.state_shape, dtype=torch.float32, device=qkv.device)
        qkv, beta, decay = (x.contiguous() for x in (qkv, beta, decay))
        ctx.save_for_backward(qkv, beta, decay, before)
        ctx.spans, ctx.spec = spans, spec
        return _packed(qkv, beta, decay, spans, spec, before)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        qkv, beta, decay, before = ctx.saved_tensors
        spans, spec, d_out = ctx.spans, ctx.spec, grads[0].contiguous()
        inverses, scores = _chunk_products(qkv, beta, decay, spans, spec)
        d_after, d_change = torch.empty_like(before), torch.empty_like(d_out)
        shape, numbers = {**_shape(spec), "CHUNK": CHUNK}, (spec.key_dim**-0.5, qkv.stride(0))
        _chunks_backward_kernel[(_value_blocks(spec), spec.n_value_heads, len(spans.table))](
            *(qkv, beta, decay, d_out, d_after, d_change, spans.table, inverses, scores, *numbers),
            **shape,
            num_warps=4,
            num_stages=1,
        )
        d_qkv, d_beta, d_decay = torch.empty_like(qkv), torch.empty_like(beta), torch.empty_like(decay)
        changes, squares = torch.empty_like(d_out), (spans.chunks, inverses, scores)
        _chunk_changes_kernel[(spec.n_value_heads, len(spans.chunks))](
            *(qkv, beta, decay, before, d_out, d_change, d_qkv, d_beta, d_decay, changes, *squares, *numbers),
            **shape,
            num_warps=4,
            num_stages=1,
        )
        _chunk_gradients_kernel[(spec.n_key_heads, len(spans.chunks))](
            *(qkv, beta, decay, before, d_out, d_after, d_change, d_qkv, d_decay, changes, *squares, *numbers),
            **shape,
            num_warps=8,
            num_stages=1,
        )
        return d_qkv, d_beta, d_decay, None, None


def _chunk_products(
    qkv: Tensor, beta: Tensor, decay: Tensor, spans: Spans, spec: DeltaNetSpec
) -> tuple[Tensor, Tensor]:
    n = count_chunks(spans)
    inverses, scores = torch.empty(2, n, spec.n_value_heads, CHUNK, CHUNK, dtype=torch.float32, device=qkv.device)
    shape = {name: size for name, size in _shape(spec).items() if name not in ("DV", "BLOCK_V")}
    _chunk_products_kernel[(spec.n_value_heads, n)](
        *(qkv, beta, decay, spans.chunks, inverses, scores, spec.key_dim**-0.5, qkv.stride(0)),
        **shape,
        CHUNK=CHUNK,
        num_warps=4,
        num_stages=1,
    )
    return inverses, scores


def _shape(spec: DeltaNetSpec) -> dict[str, int]:
    return {
        "N_KEY_HEADS": spec.n_key_heads,
        "SHARE": spec.n_value_heads // spec.n_key_heads,
        "DK": spec.key_dim,
        "DV": spec.value_dim,
        "BLOCK_K": max(16, triton.next_power_of_2(spec.key_dim)),
        "BLOCK_V": max(16, min(VALUE_BLOCK, triton.next_power_of_2(spec.value_dim))),
    }


def _value_blocks(spec: DeltaNetSpec) -> int:
    return triton.cdiv(spec.value_dim, _shape(spec)["BLOCK_V"])
