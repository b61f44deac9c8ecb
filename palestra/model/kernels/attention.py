"""Causal attention in tiles of queries, over packed keys (training) or pages (sampling): one recurrence for both.

A tile holds neighbouring queries of one sequence with all heads of a group. It reads keys in blocks of 64 from
positions that are multiples of 64, in order, and joins runs of 512 keys with what came before. Every query thus adds
in the same order, whatever tile it is in: its result has the same bits in training, prefill and decoding.
Sums over keys are products with ones, because the order of `tl.sum` depends on the tile.
Where values are the first part of the keys (latent attention), a key is read once for both; what it has beyond that is
called its tail.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from palestra.model import kernels

KEY_BLOCK = 64
KEY_SPLIT = 512  # the join costs little at this length, and a long context has enough of them to be computed apart


@dataclass(frozen=True, slots=True)
class Launch:
    """What a head's width and a card leave open; results do not depend on it, gradients only in their last digits."""

    warps: int = 4
    """For 64 rows of a tile."""
    stages: int = 2
    few_warps: int = 2
    """For fewer rows."""
    few_stages: int = 2
    """With one stage, wide tiles are loaded through registers that they overflow: up to 15 times slower."""
    query_gradient: tuple[int, int] = (4, 2)
    """Warps and stages where the gradient of queries is computed, for 64 rows of a tile."""
    gradient_keys: int = KEY_BLOCK
    """Keys of a block in the gradient."""
    gradient_rows: int | None = None
    """Rows of a tile where the gradient of keys is computed; None: as in the other kernels."""
    gradient_stages: int = 2
    """In the same place."""

    @classmethod
    def of(cls, dim: int, device: torch.device | str) -> Launch:
        """Tiles of wide heads fill Hopper's 227 KB of shared memory; cards that have less take smaller ones."""
        if dim <= 128:
            return cls()
        if dim > 256:
            few = 2 if kernels.is_roomy(device) else 1
            return cls(8, 1, 4, few, (8, 1), gradient_keys=32, gradient_rows=32, gradient_stages=1)
        if kernels.is_roomy(device):
            return cls(4, 3, 4, 2, (8, 2), gradient_stages=1)
        return cls(4, 1, 2, 1, (4, 1), gradient_keys=32, gradient_rows=32, gradient_stages=1)

    def options(self, rows: int) -> dict[str, int]:
        """Of a launch whose tiles have so many rows."""
        if rows < 64:
            return {"num_warps": self.few_warps, "num_stages": self.few_stages}
        return {"num_warps": 8 if rows >= 128 else self.warps, "num_stages": self.stages}


@dataclass(frozen=True, slots=True)
class Tiles:
    """Neighbouring queries of one sequence, and where their keys are."""

    table: Tensor
    """int32 [tiles, 4]: first query row, its position, queries (0: nothing to do), key source. The key source is the
    row of the first key for packed keys, and the place of the first page's number for pages."""
    rows: int
    """Queries times heads of a group that a tile holds, padding included."""


@dataclass(frozen=True, slots=True)
class SharedSplits:
    """Whole splits of keys that several sequences share: read once for all of them. A split's part of a query's result
    does not depend on who computes it."""

    tiles: Tensor
    """int32 [tiles, 3]: number of the split, queries (0: nothing to do), place of the first page's number."""
    rows: Tensor
    """int32 [tiles, queries]: a query row for each place."""
    by_row: Tensor
    """int32 [query rows, 2]: where the row's first split is among all places of tiles (the next ones are a tile
    further each), and how many there are."""
    m: Tensor
    weight: Tensor
    acc: Tensor
    """Results, float32 [tiles * queries, heads], and [tiles * queries, heads, dim]."""

    tile_rows: int
    """Queries times heads of a group that a tile holds, padding included."""


@triton.jit
def _write_pages_kernel(
    K, V, KEYS, VALUES, SLOTS, k_stride, v_stride, head_stride, N_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None]
    mask, slot = (h < N_HEADS) & (d < D), tl.load(SLOTS + row)
    place = h.to(tl.int64) * head_stride + slot * D + d
    if slot >= 0:
        tl.store(KEYS + place, tl.load(K + row * k_stride + h * D + d, mask=mask), mask=mask)
        if V is not None:
            tl.store(VALUES + place, tl.load(V + row * v_stride + h * D + d, mask=mask), mask=mask)


def write_pages(k: Tensor, v: Tensor | None, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Puts rows of keys and values, [rows, kv heads, dim], into slots (int64, -1: nowhere) of pages, [kv heads,
    slots, dim] of equal strides; keys alone where values are part of them."""
    rows, heads, dim = k.shape
    if rows:
        _write_pages_kernel[(rows,)](
            *(k, v, keys, values, slots, k.stride(0), 0 if v is None else v.stride(0), keys.stride(0), heads, dim),
            BLOCK_H=triton.next_power_of_2(heads),
            BLOCK_D=triton.next_power_of_2(dim),
            num_warps=4,
        )


@dataclass(frozen=True, slots=True)
class KeySource:
    """How the kernels find key number i of a sequence."""

    row_stride: int
    head_stride: int
    """0: all heads have the same keys."""
    pages: Tensor | None = None
    """int32: page numbers of all sequences end to end; None for packed keys."""
    page_size: int = 1
    value_stride: int | None = None
    """Stride of the rows of values; None: that of the keys."""


@dataclass(frozen=True, slots=True)
class PackedTrees:
    """Packed rows that several sequences share: see `attention.branches`. All int32."""

    paths: Tensor
    positions: Tensor
    ends: Tensor


@triton.jit
def _key_places(source, key, live, PAGES, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr):
    if PAGED:
        page = tl.load(PAGES + source + key // PAGE_SIZE, mask=live, other=0)
        return page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
    return (source + key).to(tl.int64)


@triton.jit
def _tails(X, places, stride, is_there, D: tl.constexpr, TAIL: tl.constexpr, BLOCK_T: tl.constexpr):
    """Loads what rows have beyond their first D numbers; reads nothing where there is none."""
    t = tl.arange(0, BLOCK_T)
    mask = is_there[:, None] & (t < TAIL)[None]
    return tl.load(X + places[:, None] * stride + D + t[None], mask=mask, other=0.0)


@triton.jit
def _attend_to(
    q, q_tail, position, K, V, PAGES, source, start, stop, end, c, k_stride, v_stride, WINDOW: tl.constexpr,
    D: tl.constexpr, TAIL: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Keys from `start` to `stop`: the largest score, the sum of weights (16 equal columns), the weighted values."""
    d = tl.arange(0, BLOCK_D)
    ones = tl.full((BLOCK, 16), 1.0, tl.float32).to(q.dtype)
    m = tl.full((R,), -float("inf"), tl.float32)
    weight, acc = tl.zeros((R, 16), tl.float32), tl.zeros((R, BLOCK_D), tl.float32)
    for first in range(start, stop, BLOCK):
        key = first + tl.arange(0, BLOCK)
        live = key < end
        places = _key_places(source, key, live, PAGES, PAGE_SIZE, PAGED)
        kv_mask = live[:, None] & (d < D)[None]
        k = tl.load(K + places[:, None] * k_stride + d[None], mask=kv_mask, other=0.0)
        seen = key[None] <= position[:, None]
        if WINDOW > 0:
            seen &= key[None] > position[:, None] - WINDOW
        s = tl.dot(q, tl.trans(k))
        if TAIL > 0:
            s = tl.dot(q_tail, tl.trans(_tails(K, places, k_stride, live, D, TAIL, BLOCK_T)), s)
        s = tl.where(seen, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * c)
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(tl.fma(s, c, -base[:, None]))  # spelled out: how a product and a sum fuse is not left open
        fade = tl.exp2(m - base)
        v = k if TAIL > 0 else tl.load(V + places[:, None] * v_stride + d[None], mask=kv_mask, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
        weight = tl.dot(p.to(v.dtype), ones, weight * fade[:, None])
        m = m_new
    return m, weight, acc


@triton.jit
def _join(m_all, weight_all, acc_all, m, weight, acc):
    """Joins the result of earlier keys with that of one more split."""
    m_new = tl.maximum(m_all, m)
    base = tl.where(m_new == -float("inf"), 0.0, m_new)
    old, new = tl.exp2(m_all - base), tl.exp2(m - base)
    acc_all = tl.fma(acc_all, old[:, None], acc * new[:, None])
    weight_all = tl.fma(weight_all, old[:, None], weight * new[:, None])
    return m_new, weight_all, acc_all


@triton.jit
def _attend_once_kernel(
    Q, K, V, TILES, ROWS, M, WEIGHT, ACC, PAGES, scale, q_stride, k_stride, head_stride, n_heads, G: tl.constexpr,
    D: tl.constexpr, TAIL: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """One whole split of keys for queries of several sequences that share it."""
    tile, head = tl.program_id(0), tl.program_id(1)
    split, count, source = tl.load(TILES + tile * 3), tl.load(TILES + tile * 3 + 1), tl.load(TILES + tile * 3 + 2)
    if count > 0:
        r, d = tl.arange(0, R), tl.arange(0, BLOCK_D)
        token, query_head = r // G, head * G + r % G
        is_query = token < count
        row = tl.load(ROWS + tile * (R // G) + token, mask=is_query, other=0).to(tl.int64)
        mask, start = is_query[:, None] & (d < D)[None], split * SPLIT
        place = row * q_stride + query_head * (D + TAIL)
        q = tl.load(Q + place[:, None] + d[None], mask=mask, other=0.0)
        q_tail = q
        if TAIL > 0:
            q_tail = _tails(Q, place, 1, is_query, D, TAIL, BLOCK_T)
        keys, values = K + head.to(tl.int64) * head_stride, V + head.to(tl.int64) * head_stride
        stop = start + SPLIT
        m, weight, acc = _attend_to(
            q, q_tail, tl.zeros((R,), tl.int32) + stop, keys, values, PAGES, source, start, stop, stop,
            scale * 1.4426950408889634, k_stride, k_stride, 0, D, TAIL, R, BLOCK, BLOCK_D, BLOCK_T, PAGE_SIZE, True,
        )  # fmt: skip
        place = (tile * (R // G) + token).to(tl.int64) * n_heads + query_head
        tl.store(M + place, m, mask=is_query)
        tl.store(WEIGHT + place, tl.max(weight, 1), mask=is_query)
        tl.store(ACC + place[:, None] * D + d[None], acc, mask=mask)


@triton.jit
def _attend_kernel(
    Q, K, V, OUT, LSE, SINKS, TILES, PAGES, SHARED, SHARED_M, SHARED_WEIGHT, SHARED_ACC, scale, q_stride, out_stride,
    k_stride, k_head_stride, v_stride, v_head_stride, n_heads, WINDOW: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    TAIL: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGED: tl.constexpr, WITH_LSE: tl.constexpr,
    SHARED_STEP: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row0, pos0 = tl.load(TILES + tile * 4), tl.load(TILES + tile * 4 + 1)
    count, source = tl.load(TILES + tile * 4 + 2), tl.load(TILES + tile * 4 + 3)
    r, d = tl.arange(0, R), tl.arange(0, BLOCK_D)
    token, query_head = r // G, head * G + r % G
    is_query, position = token < count, pos0 + r // G
    row = (row0 + token).to(tl.int64)
    q_mask = is_query[:, None] & (d < D)[None]
    q_place = row * q_stride + query_head * (D + TAIL)
    q = tl.load(Q + q_place[:, None] + d[None], mask=q_mask, other=0.0)
    q_tail = q
    if TAIL > 0:
        q_tail = _tails(Q, q_place, 1, is_query, D, TAIL, BLOCK_T)
    end = pos0 + count
    first = 0
    if WINDOW > 0:
        first = tl.maximum(pos0 - WINDOW + 1, 0) // BLOCK * BLOCK
    m_all = tl.full((R,), -float("inf"), tl.float32)
    weight_all, acc_all = tl.zeros((R, 16), tl.float32), tl.zeros((R, BLOCK_D), tl.float32)
    if SHARED is not None:  # single queries: what was computed once for several sequences
        place = tl.load(SHARED + row0 * 2)
        for _ in range(tl.load(SHARED + row0 * 2 + 1)):
            at = place.to(tl.int64) * n_heads + query_head
            m = tl.load(SHARED_M + at, mask=is_query, other=-float("inf"))
            weight = tl.load(SHARED_WEIGHT + at, mask=is_query, other=0.0)
            acc = tl.load(SHARED_ACC + at[:, None] * D + d[None], mask=q_mask, other=0.0)
            m_all, weight_all, acc_all = _join(m_all, weight_all, acc_all, m, weight[:, None], acc)
            place, first = place + SHARED_STEP, first + SPLIT
    for split in range(first // SPLIT * SPLIT, end, SPLIT):
        m, weight, acc = _attend_to(
            q, q_tail, position, K + head.to(tl.int64) * k_head_stride, V + head.to(tl.int64) * v_head_stride, PAGES,
            source, tl.maximum(split, first), tl.minimum(split + SPLIT, end), end, scale * 1.4426950408889634,
            k_stride, v_stride, WINDOW, D, TAIL, R, BLOCK, BLOCK_D, BLOCK_T, PAGE_SIZE, PAGED,
        )  # fmt: skip
        m_all, weight_all, acc_all = _join(m_all, weight_all, acc_all, m, weight, acc)
    if SINKS is not None:  # one more key whose value is zero
        sink = tl.load(SINKS + query_head, mask=is_query, other=0.0) * 1.4426950408889634
        m_all, weight_all, acc_all = _join(
            m_all, weight_all, acc_all, sink, tl.full((R, 16), 1.0, tl.float32), tl.zeros((R, BLOCK_D), tl.float32)
        )
    total = tl.max(weight_all, 1)  # its 16 columns are equal
    total = tl.where(is_query, total, 1.0)
    out = (acc_all / total[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + row[:, None] * out_stride + query_head[:, None] * D + d[None], out, mask=q_mask)
    if WITH_LSE:
        tl.store(LSE + row * n_heads + query_head, m_all + tl.log2(total), mask=is_query)


@triton.jit
def _delta_kernel(
    OUT, DO, DELTA, out_stride, do_stride, N_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask, place = (h < N_HEADS)[:, None] & (d < D)[None], h[:, None] * D + d[None]
    o = tl.load(OUT + row * out_stride + place, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(DO + row * do_stride + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(DELTA + row * N_HEADS + h, tl.sum(o * g, 1), mask=h < N_HEADS)


@triton.jit
def _score_gradients(q, q_tail, k, k_tail, v, do, lse, delta, seen, c, TAIL: tl.constexpr):
    """p and ds of one block, both [queries, keys]."""
    s = tl.dot(q, tl.trans(k))
    if TAIL > 0:
        s = tl.dot(q_tail, tl.trans(k_tail), s)
    s = tl.where(seen, s * c, -float("inf"))
    p = tl.exp2(s - lse[:, None])
    return p, p * (tl.dot(do, tl.trans(v)) - delta[:, None])


@triton.jit
def _queries_gradient_kernel(
    Q, K, V, DO, LSE, DELTA, DQ, TILES, PATHS, scale, q_stride, k_stride, v_stride, do_stride, dq_stride, n_heads,
    head_stride, WINDOW: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TAIL: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    row0, pos0 = tl.load(TILES + tile * 4), tl.load(TILES + tile * 4 + 1)
    count, source = tl.load(TILES + tile * 4 + 2), tl.load(TILES + tile * 4 + 3)
    r, d = tl.arange(0, R), tl.arange(0, BLOCK_D)
    token, query_head = r // G, head * G + r % G
    is_query, position = token < count, pos0 + r // G
    row = (row0 + token).to(tl.int64)
    mask, q_column = is_query[:, None] & (d < D)[None], query_head * (D + TAIL)
    q = tl.load(Q + (row * q_stride + q_column)[:, None] + d[None], mask=mask, other=0.0)
    q_tail = q
    do = tl.load(DO + (row * do_stride + query_head * D)[:, None] + d[None], mask=mask, other=0.0)
    lse = tl.load(LSE + row * n_heads + query_head, mask=is_query, other=0.0)
    delta = tl.load(DELTA + row * n_heads + query_head, mask=is_query, other=0.0)
    dq = tl.zeros((R, BLOCK_D), tl.float32)
    if TAIL > 0:
        q_tail = _tails(Q, row * q_stride + q_column, 1, is_query, D, TAIL, BLOCK_T)
        dq_tail = tl.zeros((R, BLOCK_T), tl.float32)
    end = pos0 + count
    first = 0
    if WINDOW > 0:
        first = tl.maximum(pos0 - WINDOW + 1, 0) // BLOCK * BLOCK
    for start in range(first, end, BLOCK):
        key = start + tl.arange(0, BLOCK)
        place = _key_places(source, key, key < end, PATHS, 1, PATHS is not None)
        kv_mask = (key < end)[:, None] & (d < D)[None]
        k = tl.load(K + place[:, None] * k_stride + head * head_stride + d[None], mask=kv_mask, other=0.0)
        k_tail, v = k, k
        if TAIL > 0:
            k_tail = _tails(K, place, k_stride, key < end, D, TAIL, BLOCK_T)
        else:
            v = tl.load(V + place[:, None] * v_stride + head * head_stride + d[None], mask=kv_mask, other=0.0)
        seen = (key[None] <= position[:, None]) & is_query[:, None]
        if WINDOW > 0:
            seen &= key[None] > position[:, None] - WINDOW
        _, ds = _score_gradients(q, q_tail, k, k_tail, v, do, lse, delta, seen, scale * 1.4426950408889634, TAIL)
        dq = tl.dot(ds.to(k.dtype), k, dq)
        if TAIL > 0:
            dq_tail = tl.dot(ds.to(k.dtype), k_tail, dq_tail)
    dq_place = (row * dq_stride + q_column)[:, None]
    tl.store(DQ + dq_place + d[None], (dq * scale).to(DQ.dtype.element_ty), mask=mask)
    if TAIL > 0:
        t = tl.arange(0, BLOCK_T)
        tail_mask = is_query[:, None] & (t < TAIL)[None]
        tl.store(DQ + dq_place + D + t[None], (dq_tail * scale).to(DQ.dtype.element_ty), mask=tail_mask)


@triton.jit
def _keys_gradient_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV, BLOCKS, POSITIONS, ENDS, scale, q_stride, k_stride, v_stride, do_stride,
    dk_stride, dv_stride, n_heads, GROUPS: tl.constexpr, WINDOW: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    TAIL: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """`GROUPS` of G heads each have these keys. The rows behind a key see it: all of its sequence, or with `ENDS` those
    before its end."""
    block, head = tl.program_id(0), tl.program_id(1)
    start, position0 = tl.load(BLOCKS + block * 3), tl.load(BLOCKS + block * 3 + 1)
    stop = tl.load(BLOCKS + block * 3 + 2)
    d, r, TOKENS = tl.arange(0, BLOCK_D), tl.arange(0, R), R // G
    key = start + tl.arange(0, BLOCK)
    key_position = position0 + tl.arange(0, BLOCK)
    place, kv_mask = key.to(tl.int64), (key < stop)[:, None] & (d < D)[None]
    k = tl.load(K + place[:, None] * k_stride + head * D + d[None], mask=kv_mask, other=0.0)
    k_tail, v = k, k
    dk, dv = tl.zeros((BLOCK, BLOCK_D), tl.float32), tl.zeros((BLOCK, BLOCK_D), tl.float32)
    if TAIL > 0:
        k_tail = _tails(K, place, k_stride, key < stop, D, TAIL, BLOCK_T)
        dk_tail = tl.zeros((BLOCK, BLOCK_T), tl.float32)
    else:
        v = tl.load(V + place[:, None] * v_stride + head * D + d[None], mask=kv_mask, other=0.0)
    end = stop
    if ENDS is not None:
        end = tl.load(ENDS + start)  # that of a later key is no later
        key_end = tl.load(ENDS + key, mask=key < stop, other=0)
    last = end
    if WINDOW > 0 and ENDS is None:
        last = tl.minimum(end, start + BLOCK - 1 + WINDOW)
    for group in tl.static_range(GROUPS):
        query_head = (head * GROUPS + group) * G + r % G
        for first in range(start, last, TOKENS):
            query = first + r // G
            is_query = (query < end) & (r < TOKENS * G)
            row = query.to(tl.int64)
            mask, q_place = is_query[:, None] & (d < D)[None], row * q_stride + query_head * (D + TAIL)
            q = tl.load(Q + q_place[:, None] + d[None], mask=mask, other=0.0)
            q_tail = q
            if TAIL > 0:
                q_tail = _tails(Q, q_place, 1, is_query, D, TAIL, BLOCK_T)
            do = tl.load(DO + (row * do_stride + query_head * D)[:, None] + d[None], mask=mask, other=0.0)
            lse = tl.load(LSE + row * n_heads + query_head, mask=is_query, other=0.0)
            delta = tl.load(DELTA + row * n_heads + query_head, mask=is_query, other=0.0)
            seen = (key[None] <= query[:, None]) & is_query[:, None]
            if ENDS is not None:
                seen &= query[:, None] < key_end[None]
            if WINDOW > 0:
                position = position0 + query - start
                if ENDS is not None:
                    position = tl.load(POSITIONS + row, mask=is_query, other=0)
                seen &= key_position[None] > position[:, None] - WINDOW
            c = scale * 1.4426950408889634
            p, ds = _score_gradients(q, q_tail, k, k_tail, v, do, lse, delta, seen, c, TAIL)
            dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv)
            dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk)
            if TAIL > 0:
                dk_tail = tl.dot(tl.trans(ds.to(q.dtype)), q_tail, dk_tail)
    dk_place = (place * dk_stride + head * D)[:, None]
    if TAIL > 0:
        t = tl.arange(0, BLOCK_T)
        tail_mask = (key < stop)[:, None] & (t < TAIL)[None]
        tl.store(DK + dk_place + d[None], (dk * scale + dv).to(DK.dtype.element_ty), mask=kv_mask)
        tl.store(DK + dk_place + D + t[None], (dk_tail * scale).to(DK.dtype.element_ty), mask=tail_mask)
    else:
        tl.store(DK + dk_place + d[None], (dk * scale).to(DK.dtype.element_ty), mask=kv_mask)
        tl.store(DV + place[:, None] * dv_stride + head * D + d[None], dv.to(DV.dtype.element_ty), mask=kv_mask)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    keys: KeySource,
    kv_heads: int,
    window: int | None,
    out: Tensor,
    sums: Tensor | None = None,
    shared: SharedSplits | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Writes the rows of the tiles to `out`, [tokens, heads * dim], and the log2 of each query's sum of weights to
    `sums`, float32 [tokens, heads]. q: [tokens, heads, dim], its last two dimensions dense. `shared`: for tiles of
    single queries without a window. `sinks`: float32 [heads]. Where v is narrower than k, it is the first part of it,
    and `kv_heads` are groups of heads that share a tile."""
    (heads, width), dim = q.shape[1:], v.shape[-1]
    found = (None, None, None, None) if shared is None else (shared.by_row, shared.m, shared.weight, shared.acc)
    is_paged, launch = keys.pages is not None, Launch.of(dim, q.device)
    if len(tiles.table):
        _attend_kernel[(len(tiles.table), kv_heads)](
            *(q, k, v, out, out if sums is None else sums, sinks),
            *(tiles.table, keys.pages if is_paged else tiles.table),
            *(*found, width**-0.5, q.stride(0), out.stride(0), keys.row_stride, keys.head_stride),
            *(keys.row_stride if keys.value_stride is None else keys.value_stride, keys.head_stride),
            heads,
            WINDOW=window or 0,
            G=heads // kv_heads,
            **_widths(width, dim),
            R=tiles.rows,
            BLOCK=KEY_BLOCK,
            SPLIT=KEY_SPLIT,
            PAGE_SIZE=keys.page_size,
            PAGED=is_paged,
            WITH_LSE=sums is not None,
            SHARED_STEP=shared.rows.shape[1] if shared else 0,
            **launch.options(tiles.rows),
        )


def attend_once(q: Tensor, k: Tensor, v: Tensor, keys: KeySource, kv_heads: int, shared: SharedSplits) -> None:
    """Fills in what `attend` takes from `shared`."""
    (heads, width), dim = q.shape[1:], v.shape[-1]
    launch = Launch.of(dim, q.device)
    if len(shared.tiles):
        _attend_once_kernel[(len(shared.tiles), kv_heads)](
            *(q, k, v, shared.tiles, shared.rows, shared.m, shared.weight, shared.acc, keys.pages),
            *(width**-0.5, q.stride(0), keys.row_stride, keys.head_stride, heads),
            G=heads // kv_heads,
            **_widths(width, dim),
            R=shared.tile_rows,
            BLOCK=KEY_BLOCK,
            SPLIT=KEY_SPLIT,
            PAGE_SIZE=keys.page_size,
            **launch.options(shared.tile_rows),
        )


def _widths(width: int, dim: int) -> dict[str, int]:
    """The widths of values (`D`) and of what keys have beyond them (`TAIL`), and of the blocks that hold them."""
    tail = width - dim
    return {
        "D": dim,
        "TAIL": tail,
        "BLOCK_D": triton.next_power_of_2(dim),
        "BLOCK_T": max(16, triton.next_power_of_2(tail)) if tail else 16,
    }


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    tiles: Tiles,
    key_blocks: Tensor,
    kv_heads: int,
    window: int | None,
    sinks: Tensor | None = None,
    tail: int = 0,
    trees: PackedTrees | None = None,
) -> Tensor:
    """Attention with gradients over packed keys, [tokens, kv heads, dim]; `key_blocks` is what the gradient of the
    keys is computed in, blocks of `Launch.gradient_keys`: int32 [blocks, 3] of the row of the block's first key, its
    position, and where the rows of its sequence end. Sinks are not trained. Without v, values are the keys but for
    their `tail`. `trees`: of sequences that share rows; the key source of a tile is a place in its `paths` then."""
    if torch.is_grad_enabled() and q.requires_grad:
        return _AttendPacked.apply(q, k, v, tiles, key_blocks, kv_heads, window, sinks, tail, trees)
    values = k[..., :-tail] if v is None else v
    out = q.new_empty(len(q), q.shape[1] * values.shape[-1])
    attend(q, k, values, tiles, _packed_keys(k, v, trees), kv_heads, window, out, sinks=sinks)
    return out


def _packed_keys(k: Tensor, v: Tensor | None, trees: PackedTrees | None) -> KeySource:
    paths = None if trees is None else trees.paths
    return KeySource(
        k.stride(0), 0 if v is None else k.stride(1), paths, value_stride=(k if v is None else v).stride(0)
    )


class _AttendPacked(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        tiles: Tiles,
        key_blocks: Tensor,
        kv_heads: int,
        window: int | None,
        sinks: Tensor | None,
        tail: int,
        trees: PackedTrees | None,
    ) -> Tensor:
        values = k[..., :-tail] if v is None else v
        out = q.new_empty(len(q), q.shape[1] * values.shape[-1])
        sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        attend(q, k, values, tiles, _packed_keys(k, v, trees), kv_heads, window, out, sums, sinks=sinks)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.tiles, ctx.key_blocks, ctx.kv_heads, ctx.window, ctx.tail = tiles, key_blocks, kv_heads, window, tail
        ctx.trees = trees
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        d_out, (heads, width) = grads[0].contiguous(), q.shape[1:]
        trees = (None, None, None) if ctx.trees is None else (ctx.trees.paths, ctx.trees.positions, ctx.trees.ends)
        dim, n_keys = width - ctx.tail, k.shape[1]
        delta, dq, dk = torch.empty_like(sums), q.new_empty(q.shape), k.new_empty(k.shape)
        dv = None if v is None else v.new_empty(v.shape)
        values, d_values = (k, dk) if v is None or dv is None else (v, dv)
        widths = _widths(width, dim)
        block_h = max(1, 4096 // widths["BLOCK_D"])
        _delta_kernel[(len(q), triton.cdiv(heads, block_h))](
            *(out, d_out, delta, out.stride(0), d_out.stride(0), heads, dim, block_h, widths["BLOCK_D"]), num_warps=4
        )
        launch, group = Launch.of(dim, q.device), heads // ctx.kv_heads
        shape = {"WINDOW": ctx.window or 0, "G": group, "BLOCK": launch.gradient_keys, **widths}
        rows = max(launch.gradient_rows or ctx.tiles.rows, triton.next_power_of_2(group))
        _queries_gradient_kernel[(len(ctx.tiles.table), ctx.kv_heads)](
            *(q, k, values, d_out, sums, delta, dq, ctx.tiles.table, trees[0], width**-0.5),
            *(
                q.stride(0),
                k.stride(0),
                values.stride(0),
                d_out.stride(0),
                dq.stride(0),
                heads,
                0 if v is None else dim,
            ),
            **shape,
            R=ctx.tiles.rows,
            num_warps=8 if ctx.tiles.rows >= 128 else launch.query_gradient[0],
            num_stages=launch.query_gradient[1],
        )
        _keys_gradient_kernel[(len(ctx.key_blocks), n_keys)](
            *(q, k, values, d_out, sums, delta, dk, d_values, ctx.key_blocks, *trees[1:], width**-0.5),
            *(q.stride(0), k.stride(0), values.stride(0), d_out.stride(0), dk.stride(0), d_values.stride(0), heads),
            GROUPS=ctx.kv_heads // n_keys,
            **shape,
            R=rows,
            num_warps=8 if dim > 128 or rows >= 128 else 4,
            num_stages=launch.gradient_stages,
        )
        return dq, dk, dv, None, None, None, None, None, None, None
