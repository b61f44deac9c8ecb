"""Products of pairs that are sorted by expert, with what adapters add to them, and sums of a row's pairs.

`grouped_product` is rows times the matrices of their experts, and adds what adapters have for each expert inside of the
product; `grouped_shrink` is such rows times the A of their adapter and expert; `sum_pairs` weighs and sums what a row's
experts returned. A tile has pairs of one expert and of any adapters: it computes each adapter's part of all its pairs,
and every pair takes its own. Terms are added in the order of the inner dimension whatever the tile, so a pair's bits do
not depend on the others.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from palestra.model import kernels
from palestra.model.kernels.lora import DTYPES, RANK_BLOCK, LoraTiles, SiteShape
from palestra.model.kernels.routing import SortedPairs
from palestra.model.lora.layout import OWN_ENTRY

SUM_COLUMNS = 1024


@triton.jit
def _grouped_product_kernel(
    X, W, BIAS, OUT, ORDER, TILES, T, T_PAIRS, OWNERS, LORA, SCALES, BASES, OFFSETS,
    x_stride, w_expert, w_row, w_column, t_stride, t_chunk, p_stride, o_stride, n_owners, entry, b_entry, K, N,
    TOP: tl.constexpr, OF_ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr,
    HAS_ROWS: tl.constexpr, N_CHUNKS: tl.constexpr, N_PARTS: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """OUT[place, part * N …] = X W[expert, part * N …]^T + bias + the adapters'. X has a row for each row (OF_ROWS) or
    for each place. Adapters multiply what is in T for rows (HAS_ROWS), in chunks whose sum it is, or in T_PAIRS."""
    tile, part, block = tl.program_id(1), tl.program_id(0) % N_PARTS, tl.program_id(0) // N_PARTS
    expert = tl.load(TILES + tile * 3).to(tl.int64)
    if expert >= 0:
        first, count = tl.load(TILES + tile * 3 + 1), tl.load(TILES + tile * 3 + 2)
        m, n, k = tl.arange(0, BM), block * BN + tl.arange(0, BN), tl.arange(0, BK)
        is_pair, in_n, place = m < count, n < N, (first + m).to(tl.int64)
        row = tl.load(ORDER + place, mask=is_pair, other=0) // TOP
        column = part * N + n
        x_row = place
        if OF_ROWS:
            x_row = row.to(tl.int64)
        x_place = X + x_row[:, None] * x_stride + k[None]
        w_place = W + expert * w_expert + column.to(tl.int64)[None] * w_row + k[:, None] * w_column
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            if EVEN:
                x = tl.load(x_place + start, mask=is_pair[:, None], other=0.0)
                w = tl.load(w_place + start * w_column)
            else:
                in_k = start + k < K
                x = tl.load(x_place + start, mask=is_pair[:, None] & in_k[None], other=0.0)
                w = tl.load(w_place + start * w_column, mask=in_k[:, None] & in_n[None], other=0.0)
            acc = tl.dot(x, w, acc)
        if HAS_BIAS:
            acc += tl.load(BIAS + expert * (N_PARTS * N) + column, mask=in_n, other=0.0).to(tl.float32)[None]
        if HAS_LORA:
            owner = tl.load(OWNERS + row, mask=is_pair & (row < n_owners), other=-1)
            some = tl.max(owner, 0)
            while some >= 0:
                rank, layout = tl.load(LORA + some * 4 + 2), tl.load(LORA + some * 4 + 3)
                offset = tl.load(OFFSETS + layout * o_stride + b_entry + part)
                if offset >= 0:
                    B = tl.load(BASES + some).to(tl.pointer_type(DTYPE)) + offset + expert * rank * N
                    is_shared = False
                    if HAS_ROWS:
                        is_shared = tl.load(OFFSETS + layout * o_stride + entry) >= 0
                    own = tl.zeros((BM, BN), tl.float32)
                    for start in range(0, rank, BR):
                        j = start + tl.arange(0, BR)
                        in_t, t_column = is_pair[:, None] & (j < rank)[None], part * rank + j[None]
                        if is_shared:
                            t_row = T + row.to(tl.int64)[:, None] * t_stride + t_column
                            total = tl.load(t_row, mask=in_t, other=0.0).to(tl.float32)
                            for chunk in range(1, N_CHUNKS):
                                total += tl.load(t_row + chunk * t_chunk, mask=in_t, other=0.0).to(tl.float32)
                            t = total.to(DTYPE)
                        else:
                            t = tl.load(T_PAIRS + place[:, None] * p_stride + t_column, mask=in_t, other=0.0)
                        b_place = B + j.to(tl.int64)[:, None] * N + n[None]
                        b = tl.load(b_place, mask=(j < rank)[:, None] & in_n[None], other=0.0)
                        own = tl.dot(t, b, own)
                    acc = tl.where((owner == some)[:, None], tl.fma(own, tl.load(SCALES + some), acc), acc)
                some = tl.max(tl.where(owner < some, owner, -1), 0)
        out = OUT + place[:, None] * (N_PARTS * N) + column[None]
        tl.store(out, acc.to(OUT.dtype.element_ty), mask=is_pair[:, None] & in_n[None])


@triton.jit
def _grouped_shrink_kernel(
    X, T, ORDER, TILES, OWNERS, LORA, BASES, OFFSETS, x_stride, t_stride, o_stride, n_owners, entry, K,
    TOP: tl.constexpr, OF_ROWS: tl.constexpr, N_PARTS: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """T[place] = X A^T, with the A [parts * rank, K] of each pair's adapter and expert. The adapters of a tile are
    dealt to SHARES programs (axis 2) by their numbers."""
    tile, j = tl.program_id(1), tl.program_id(0) * BR + tl.arange(0, BR)
    expert = tl.load(TILES + tile * 3).to(tl.int64)
    if expert >= 0:
        first, count = tl.load(TILES + tile * 3 + 1), tl.load(TILES + tile * 3 + 2)
        m, k = tl.arange(0, BM), tl.arange(0, BK)
        is_pair, place = m < count, (first + m).to(tl.int64)
        row = tl.load(ORDER + place, mask=is_pair, other=0) // TOP
        x_row = place
        if OF_ROWS:
            x_row = row.to(tl.int64)
        x_place = X + x_row[:, None] * x_stride + k[None]
        owner = tl.load(OWNERS + row, mask=is_pair & (row < n_owners), other=-1)
        owner = tl.where(owner % SHARES == tl.program_id(2), owner, -1)
        found, is_mine = tl.zeros((BM, BR), tl.float32), owner < -1
        some = tl.max(owner, 0)
        while some >= 0:
            ranks, layout = tl.load(LORA + some * 4 + 2) * N_PARTS, tl.load(LORA + some * 4 + 3)
            offset = tl.load(OFFSETS + layout * o_stride + entry)
            if (offset >= 0) & (tl.program_id(0) * BR < ranks):
                A = tl.load(BASES + some).to(tl.pointer_type(DTYPE)) + offset + expert * ranks * K
                a_place = A + j.to(tl.int64)[None] * K + k[:, None]
                own = tl.zeros((BM, BR), tl.float32)
                for start in range(0, K, BK):
                    if EVEN:
                        x = tl.load(x_place + start, mask=is_pair[:, None], other=0.0)
                        a = tl.load(a_place + start, mask=(j < ranks)[None], other=0.0)
                    else:
                        in_k = start + k < K
                        x = tl.load(x_place + start, mask=is_pair[:, None] & in_k[None], other=0.0)
                        a = tl.load(a_place + start, mask=in_k[:, None] & (j < ranks)[None], other=0.0)
                    own = tl.dot(x, a, own)
                found = tl.where((owner == some)[:, None], own, found)
                is_mine |= owner == some
            some = tl.max(tl.where(owner < some, owner, -1), 0)
        t_place = T + place[:, None] * t_stride + j[None]
        tl.store(t_place, found.to(T.dtype.element_ty), mask=(is_pair & is_mine)[:, None] & (j < t_stride)[None])


@triton.jit
def _add_gated_kernel(Y, SHARED, X, GATE, OUT, N, BLOCK: tl.constexpr):
    """OUT = Y + sigmoid(X · GATE) * SHARED, a program a row."""
    n = tl.arange(0, BLOCK)
    place, real = tl.program_id(0).to(tl.int64) * N + n, n < N
    x = tl.load(X + place, mask=real, other=0.0).to(tl.float32)
    logit = tl.sum(x * tl.load(GATE + n, mask=real, other=0.0).to(tl.float32), 0)
    shared = tl.load(SHARED + place, mask=real, other=0.0).to(tl.float32) / (1.0 + tl.exp(-logit))
    y = tl.load(Y + place, mask=real, other=0.0).to(tl.float32)
    tl.store(OUT + place, (y + shared).to(OUT.dtype.element_ty), mask=real)


def add_gated(y: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """y + sigmoid(x gate^T) * shared, all [rows, n]; the gate is [1, n]."""
    out, n = torch.empty_like(y), y.shape[1]
    if len(y):
        block = triton.next_power_of_2(n)
        inputs = (y.contiguous(), shared.contiguous(), x.contiguous())
        _add_gated_kernel[(len(y),)](*inputs, gate, out, n, BLOCK=block, num_warps=4 if block <= 2048 else 8)
    return out


@triton.jit
def _sum_pairs_kernel(
    VALUES, PLACES, WEIGHTS, OUT, v_stride, N, TOP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BN: tl.constexpr
):
    """OUT[row] = the sum over its pairs, in the router's order."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN,), tl.float32)
    for i in tl.static_range(TOP):
        place = tl.load(PLACES + row * TOP + i).to(tl.int64)
        value = tl.load(VALUES + place * v_stride + n, mask=n < tl.where(place < 0, 0, N), other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            value = value * tl.load(WEIGHTS + row * TOP + i)
        acc += value
    tl.store(OUT + row * N + n, acc.to(OUT.dtype.element_ty), mask=n < N)


@triton.jit
def _weigh_gradient_kernel(GRAD, VALUES, ORDER, WEIGHTS, D_WEIGHTS, N, BLOCK: tl.constexpr):
    """D_WEIGHTS[pair] = GRAD · VALUES of its place; then GRAD is multiplied by the pair's weight, in place."""
    place = tl.program_id(0).to(tl.int64)
    pair = tl.load(ORDER + place)
    weight, total = tl.load(WEIGHTS + pair), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        grad = tl.load(GRAD + place * N + n, mask=n < N, other=0.0)
        value = tl.load(VALUES + place * N + n, mask=n < N, other=0.0)
        total += grad.to(tl.float32) * value.to(tl.float32)
        tl.store(GRAD + place * N + n, (grad.to(tl.float32) * weight).to(grad.dtype), mask=n < N)
    tl.store(D_WEIGHTS + pair, tl.sum(total, 0))


def weigh_gradient(grad: Tensor, values: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """The gradient of the router's weights, [rows, k], from that of weighted values; `grad` becomes that of the values
    themselves. Both are [pairs, n], sorted."""
    d_weights = torch.empty_like(weights)
    if len(grad):
        block = min(1024, triton.next_power_of_2(grad.shape[1]))
        _weigh_gradient_kernel[(len(grad),)](grad, values, order, weights, d_weights, grad.shape[1], BLOCK=block)
    return d_weights


def sum_pairs(values: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """Sums what stands at each row's pairs, weighed: [rows, n]."""
    (rows, top), n = places.shape, values.shape[1]
    out = torch.empty(rows, n, dtype=values.dtype, device=values.device)
    if rows:
        block = min(SUM_COLUMNS, triton.next_power_of_2(n))
        _sum_pairs_kernel[(rows, triton.cdiv(n, block))](
            *(values, places, values if weights is None else weights, out, values.stride(0), n),
            TOP=top,
            HAS_WEIGHTS=weights is not None,
            BN=block,
            num_warps=4 if block > 128 else 1,
        )
    return out


@dataclass(frozen=True, slots=True)
class Inner:
    """What adapters have made of a product's input: each has it in one of these."""

    rows: Tensor | None
    """[rows, ranks], or chunks whose sum it is: by an A that all experts share."""
    pairs: Tensor | None
    """[pairs, ranks]: by the A of each pair's expert."""


@dataclass(frozen=True, slots=True)
class PairProducts:
    """Products of one layer's pairs, and of the adapters that have something for its experts."""

    pairs: SortedPairs
    lora: LoraTiles | None

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, site: SiteShape, inner: Inner | None, *, of_rows: bool
    ) -> Tensor:
        """x times weight [experts, out, in], and what adapters add: [pairs, out]. `of_rows`: x has a row for each row,
        not for each pair."""
        order, pairs, parts = self.pairs.order, self.pairs, len(site.out_sizes)
        n, width = weight.shape[1] // parts, weight.shape[2]
        out = torch.empty(len(order), parts * n, dtype=x.dtype, device=x.device)
        t_rows = out if inner is None or inner.rows is None else inner.rows
        t_pairs = out if inner is None or inner.pairs is None else inner.pairs
        tile = _tile_of(pairs.tile_pairs, n, x.device, has_adapters=inner is not None)
        if len(order):
            _grouped_product_kernel[(parts * triton.cdiv(n, tile["BN"]), len(pairs.tiles))](
                *(x, weight, weight if bias is None else bias, out, order, pairs.tiles, t_rows, t_pairs),
                *self._adapters(scales=True),
                *(x.stride(0), *weight.stride(), t_rows.stride(-2), t_rows.stride(0), t_pairs.stride(0)),
                *self._table_sizes(),
                *(site.entry, site.entry + (1 if of_rows else OWN_ENTRY), width, n),
                TOP=pairs.places.shape[1],
                OF_ROWS=of_rows,
                HAS_BIAS=bias is not None,
                HAS_LORA=inner is not None,
                HAS_ROWS=inner is not None and inner.rows is not None,
                N_CHUNKS=len(t_rows) if t_rows.dim() == 3 else 1,
                N_PARTS=parts,
                EVEN=n % tile["BN"] == 0 and width % tile["BK"] == 0,
                DTYPE=DTYPES[x.dtype],
                BM=pairs.tile_pairs,
                BR=RANK_BLOCK,
                **tile,
            )
        return out

    def shrink(self, x: Tensor, site: SiteShape, *, of_rows: bool) -> Tensor:
        """x A^T with the A of each pair's expert: [pairs, parts * rank], each adapter's columns by its own rank."""
        lora, order, pairs = self.lora, self.pairs.order, self.pairs
        assert lora is not None, "there are no adapters"
        ranks, depth = lora.max_rank * len(site.out_sizes), 128
        t = torch.empty(len(order), ranks, dtype=x.dtype, device=x.device)
        block = 16 if ranks <= 16 else 32
        if len(order):
            shares = 4 if pairs.tile_pairs <= 32 else 1
            _grouped_shrink_kernel[(triton.cdiv(ranks, block), len(pairs.tiles), shares)](
                *(x, t, order, pairs.tiles, *self._adapters(scales=False), x.stride(0), t.stride(0)),
                *self._table_sizes(),
                *(site.entry + (OWN_ENTRY if of_rows else 0), site.in_size),
                TOP=pairs.places.shape[1],
                OF_ROWS=of_rows,
                N_PARTS=len(site.out_sizes),
                EVEN=site.in_size % depth == 0,
                DTYPE=DTYPES[x.dtype],
                BM=pairs.tile_pairs,
                BR=block,
                BK=depth,
                SHARES=shares,
                num_warps=4,
                num_stages=3,
            )
        return t

    def _adapters(self, *, scales: bool) -> tuple[Tensor, ...]:
        if self.lora is None:
            return (self.pairs.order,) * (5 if scales else 4)
        lora = self.lora
        return lora.owners, lora.tiles, *((lora.scales,) if scales else ()), lora.bases, lora.offsets

    def _table_sizes(self) -> tuple[int, int]:
        return (0, 0) if self.lora is None else (self.lora.offsets.stride(0), len(self.lora.owners))


def _tile_of(pairs: int, n: int, device: torch.device, *, has_adapters: bool) -> dict[str, int]:
    """The fastest that were tried on an H200. None of them changes a bit. Adapters of a tile wait for each other, so
    that smaller steps, and more tiles at a time, are faster with them."""
    columns = min(128, max(16, triton.next_power_of_2(n)))
    is_roomy = kernels.is_roomy(device)
    return {
        "BN": columns,
        "BK": 128 if pairs <= 32 and is_roomy and not has_adapters else 64,
        "num_warps": 4 if pairs < 128 else 8,
        "num_stages": 3 if is_roomy else 2,
    }
