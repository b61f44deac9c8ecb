"""Mamba-2's state space by kernels: forward position by position, its gradient in chunks of 64; see `delta_rule`.

A program has one head of one sequence and some of its dimensions. Everything is float32. The gradient takes the states
between chunks and computes the rest again; it has no atomics: heads that share B and C are summed by one program, in
order.
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
from palestra.model.loading.layer_spec import MambaSpec
from palestra.model.mixers.chunked_scan import CHUNK


@triton.jit
def _part(XBC, rows, is_row, first, size: tl.constexpr, BLOCK: tl.constexpr):
    """Loads some columns of a chunk's rows: [rows, BLOCK]."""
    i = tl.arange(0, BLOCK)[None]
    return tl.load(XBC + rows[:, None] + first + i, mask=is_row[:, None] & (i < size), other=0.0)


@triton.jit
def _decays(total, r):
    """Returns what is left of row j's input at row i, [i, j]; 0 where it is not seen."""
    is_seen = r[:, None] >= r[None]
    return tl.where(is_seen, tl.exp(tl.where(is_seen, total[:, None] - total[None], 0.0)), 0.0)


@triton.jit
def _position(
    XBC, DT, DECAY, row, head, i, j, stride, N_GROUPS: tl.constexpr, SHARE: tl.constexpr, DN: tl.constexpr,
    DP: tl.constexpr,
):  # fmt: skip
    """A position's x, B and C as they are in memory, its time step and its decay."""
    row = row.to(tl.int64)
    here, gate = XBC + row * stride, row * (N_GROUPS * SHARE) + head
    b_first = N_GROUPS * SHARE * DP + head // SHARE * DN
    x = tl.load(here + head * DP + j, mask=j < DP, other=0.0)
    b = tl.load(here + b_first + i, mask=i < DN, other=0.0)
    c = tl.load(here + b_first + N_GROUPS * DN + i, mask=i < DN, other=0.0)
    return x, b, c, tl.load(DT + gate), tl.load(DECAY + gate)


@triton.jit(do_not_specialize=["keep_at"])
def _state_space_steps_kernel(
    XBC, DT, DECAY, STATES, OUT, BEFORE, SPANS, stride, keep_at, N_GROUPS: tl.constexpr, SHARE: tl.constexpr,
    DN: tl.constexpr, DP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The positions of a span in order, as in `delta_rule`; in one variant, too."""
    head, span, N_HEADS = tl.program_id(1), tl.program_id(2), N_GROUPS * SHARE
    first, count = tl.load(SPANS + span * 4), tl.load(SPANS + span * 4 + 1)
    if count > 0:
        i, j = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
        mask = (i < DN)[:, None] & (j < DP)[None]
        slot = tl.load(SPANS + span * 4 + 3).to(tl.int64)
        in_slot = (i < DN)[:, None] & (j < tl.where(slot >= 0, DP, 0))[None]
        state_place = STATES + (slot * N_HEADS + head) * DN * DP + i[:, None] * DP + j[None]
        state = tl.load(state_place, mask=in_slot, other=0.0)
        at = tl.load(SPANS + span * 4 + 2).to(tl.int64) * N_HEADS + head
        last = first + count - 1
        ahead = _position(XBC, DT, DECAY, first, head, i, j, stride, N_GROUPS, SHARE, DN, DP)
        for start in range(0, count, CHUNK):
            if keep_at == 0:
                tl.store(BEFORE + at * DN * DP + i[:, None] * DP + j[None], state, mask=mask)
                at += N_HEADS
            for n in range(start, tl.minimum(start + CHUNK, count)):
                x, b, c, dt, decay = ahead
                following = tl.minimum(first + n + 1, last)
                ahead = _position(XBC, DT, DECAY, following, head, i, j, stride, N_GROUPS, SHARE, DN, DP)
                x, b, c = x.to(tl.float32) * dt, b.to(tl.float32), c.to(tl.float32)
                state = tl.fma(b[:, None], x[None], state * tl.exp(decay))
                out_place = OUT + ((first + n).to(tl.int64) * N_HEADS + head) * DP + j
                tl.store(out_place, tl.sum(state * c[:, None], 0), mask=j < DP)
        tl.store(state_place, state, mask=in_slot)


@triton.jit
def _state_space_backward_kernel(
    XBC, DECAY, D_OUT, D_AFTER, SPANS, stride, N_GROUPS: tl.constexpr, SHARE: tl.constexpr, DN: tl.constexpr,
    DP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The chunks of a span from the last to the first: D_AFTER takes the gradient of the state after each."""
    head, span, N_HEADS = tl.program_id(1), tl.program_id(2), N_GROUPS * SHARE
    first, count = tl.load(SPANS + span * 4), tl.load(SPANS + span * 4 + 1)
    r, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    j = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_head = (j < DP)[None]
    c_first = N_HEADS * DP + (N_GROUPS + head // SHARE) * DN
    chunks = tl.cdiv(count, CHUNK)
    at = (tl.load(SPANS + span * 4 + 2).to(tl.int64) + chunks - 1) * N_HEADS + head
    d_state = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    for back in range(chunks):
        start = (chunks - 1 - back) * CHUNK
        row0, live = first + start, tl.minimum(count - start, CHUNK)
        row, is_row = (row0 + r).to(tl.int64), r < live
        d_after = D_AFTER + at * DN * DP + i[:, None] * DP + j[None]
        tl.store(d_after, d_state, mask=(i < DN)[:, None] & in_head)
        _, total, last = gates(DECAY, DECAY, row0, live, head, N_HEADS, CHUNK)
        c = _part(XBC, row * stride, is_row, c_first, DN, BLOCK_N)
        place = (row[:, None] * N_HEADS + head) * DP + j[None]
        d_out = tl.load(D_OUT + place, mask=is_row[:, None] & in_head, other=0.0)
        d_state = tl.exp(last) * d_state + half_product(tl.trans(c), tl.exp(total)[:, None] * d_out)
        at -= N_HEADS


@triton.jit
def _state_space_gradients_kernel(
    XBC, DT, DECAY, BEFORE, D_OUT, D_AFTER, D_XBC, D_DT, D_DECAY, CHUNKS, stride, N_GROUPS: tl.constexpr,
    SHARE: tl.constexpr, DN: tl.constexpr, DP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Gradients of a chunk's inputs for one group and the heads that share its B and C, one after another."""
    group, chunk, N_HEADS = tl.program_id(0), tl.program_id(1), N_GROUPS * SHARE
    row0, count = tl.load(CHUNKS + chunk * 2), tl.load(CHUNKS + chunk * 2 + 1)
    r, i = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    row, is_row = (row0 + r).to(tl.int64), r < count
    b_first = N_HEADS * DP + group * DN
    c_first = b_first + N_GROUPS * DN
    d_b, d_c = tl.zeros((CHUNK, BLOCK_N), tl.float32), tl.zeros((CHUNK, BLOCK_N), tl.float32)
    for head in range(group * SHARE, group * SHARE + SHARE):
        dt, total, last = gates(DT, DECAY, row0, count, head, N_HEADS, CHUNK)
        grown, left = tl.exp(total), tl.exp(last - total)
        at = chunk.to(tl.int64) * N_HEADS + head
        d_scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        d_dt, d_total = tl.zeros((CHUNK,), tl.float32), tl.zeros((CHUNK,), tl.float32)
        d_left = tl.zeros((CHUNK,), tl.float32)
        d_last = 0.0
        for block in range(0, DP, BLOCK_P):
            j = block + tl.arange(0, BLOCK_P)
            in_head = (j < DP)[None]
            in_state = at * DN * DP + i[:, None] * DP + j[None]
            state_mask, mask = (i < DN)[:, None] & in_head, is_row[:, None] & in_head
            b = _part(XBC, row * stride, is_row, b_first, DN, BLOCK_N)
            c = _part(XBC, row * stride, is_row, c_first, DN, BLOCK_N)
            x = tl.load(XBC + row[:, None] * stride + head * DP + j[None], mask=mask, other=0.0)
            d_out = tl.load(D_OUT + (row[:, None] * N_HEADS + head) * DP + j[None], mask=mask, other=0.0)
            scores = tl.dot(c, tl.trans(b)) * _decays(total, r)
            d_after = tl.load(D_AFTER + in_state, mask=state_mask, other=0.0)
            d_x = product(tl.trans(scores), d_out) + left[:, None] * half_product(b, d_after)
            d_dt += tl.sum(d_x * x.to(tl.float32), 1)
            d_place = D_XBC + row[:, None] * stride + head * DP + j[None]
            tl.store(d_place, (dt[:, None] * d_x).to(D_XBC.dtype.element_ty), mask=mask)
            d_scores += product_half(d_out, tl.trans(x)) * dt[None]
            d_written = (left * dt)[:, None] * half_product(x, tl.trans(d_after))
            d_left += tl.sum(b.to(tl.float32) * d_written, 1)
            d_b += d_written
            state = tl.load(BEFORE + in_state, mask=state_mask, other=0.0)
            d_last += tl.sum(tl.sum(state * d_after, 1), 0)
            d_read = product(grown[:, None] * d_out, tl.trans(state))
            d_total += tl.sum(c.to(tl.float32) * d_read, 1)
            d_c += d_read
        b = _part(XBC, row * stride, is_row, b_first, DN, BLOCK_N)
        c = _part(XBC, row * stride, is_row, c_first, DN, BLOCK_N)
        d_scores = d_scores * _decays(total, r)
        d_c += product_half(d_scores, b)
        d_b += product_half(tl.trans(d_scores), c)
        moved = d_scores * tl.dot(c, tl.trans(b))
        d_total += tl.sum(moved, 1) - tl.sum(moved, 0)
        d_last = tl.exp(last) * d_last + tl.sum(d_left, 0)
        d_total += tl.where(r == CHUNK - 1, d_last, 0.0) - d_left
        gate = row * N_HEADS + head
        tl.store(D_DT + gate, d_dt, mask=is_row)
        tl.store(D_DECAY + gate, tl.cumsum(d_total, 0, reverse=True), mask=is_row)
    mask, out = is_row[:, None] & (i < DN)[None], D_XBC + row[:, None] * stride + i[None]
    tl.store(out + b_first, d_b.to(D_XBC.dtype.element_ty), mask=mask)
    tl.store(out + c_first, d_c.to(D_XBC.dtype.element_ty), mask=mask)


def state_space_steps(
    xbc: Tensor,
    dt: Tensor,
    decay: Tensor,
    spans: Spans,
    spec: MambaSpec,
    states: Tensor | None,
    out: Tensor,
    before: Tensor | None = None,
) -> None:
    """Advances the states of spans, float32 [slots, heads, state size, head dim], and writes their rows of `out`,
    float32 [rows, heads, head dim]. A span whose slot is -1 begins with zeros, and its state is dropped. `before` takes
    the state that each chunk of 64 positions begins with. Rows of `xbc` are dense, time steps and decays float32."""
    if len(spans.table):
        _state_space_steps_kernel[(_blocks(spec), spec.n_heads, len(spans.table))](
            *(xbc, dt.contiguous(), decay.contiguous(), out if states is None else states, out),
            *(out if before is None else before, spans.table, xbc.stride(0), -1 if before is None else 0),
            **_shape(spec),
            CHUNK=CHUNK,
            num_warps=1,
        )


def state_space(xbc: Tensor, dt: Tensor, decay: Tensor, spans: Spans, spec: MambaSpec) -> Tensor:
    """float32 [rows, heads, head dim] of sequences that all begin here, with gradients."""
    if torch.is_grad_enabled() and xbc.requires_grad:
        return _StateSpace.apply(xbc, dt, decay, spans, spec)
    return _packed(xbc, dt, decay, spans, spec, None)


def _packed(xbc: Tensor, dt: Tensor, decay: Tensor, spans: Spans, spec: MambaSpec, before: Tensor | None) -> Tensor:
    out = torch.empty(len(xbc), *spec.output_shape, dtype=torch.float32, device=xbc.device)
    state_space_steps(xbc, dt, decay, spans, spec, None, out, before)
    return out


class _StateSpace(Function):
    @staticmethod
    def forward(ctx: Any, xbc: Tensor, dt: Tensor, decay: Tensor, spans: Spans, spec: MambaSpec) -> Tensor:
        before = torch.empty(count_chunks(spans), *spec.state_shape, dtype=torch.float32, device=xbc.device)
        xbc, dt, decay = (x.contiguous() for x in (xbc, dt, decay))
        ctx.save_for_backward(xbc, dt, decay, before)
        ctx.spans, ctx.spec = spans, spec
        return _packed(xbc, dt, decay, spans, spec, before)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        xbc, dt, decay, before = ctx.saved_tensors
        spans, spec, d_out = ctx.spans, ctx.spec, grads[0].contiguous()
        d_after, shape = torch.empty_like(before), {**_shape(spec), "CHUNK": CHUNK}
        _state_space_backward_kernel[(_blocks(spec), spec.n_heads, len(spans.table))](
            *(xbc, decay, d_out, d_after, spans.table, xbc.stride(0)), **shape, num_warps=4, num_stages=1
        )
        d_xbc, d_dt, d_decay = torch.empty_like(xbc), torch.empty_like(dt), torch.empty_like(decay)
        _state_space_gradients_kernel[(spec.n_groups, len(spans.chunks))](
            *(xbc, dt, decay, before, d_out, d_after, d_xbc, d_dt, d_decay, spans.chunks, xbc.stride(0)),
            **shape,
            num_warps=8,
            num_stages=1,
        )
        return d_xbc, d_dt, d_decay, None, None


def _shape(spec: MambaSpec) -> dict[str, int]:
    return {
        "N_GROUPS": spec.n_groups,
        "SHARE": spec.n_heads // spec.n_groups,
        "DN": spec.state_size,
        "DP": spec.head_dim,
        "BLOCK_N": max(16, triton.next_power_of_2(spec.state_size)),
        "BLOCK_P": max(16, min(VALUE_BLOCK, triton.next_power_of_2(spec.head_dim))),
    }


def _blocks(spec: MambaSpec) -> int:
    return triton.cdiv(spec.head_dim, _shape(spec)["BLOCK_P"])
