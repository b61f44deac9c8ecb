"""LoRA for batches that mix adapters: three kernels over tiles of rows that share one adapter.

`shrink` is rows times a matrix of rank rows (x A^T, dy B^T), `expand` adds rank columns times such a matrix to rows
(y += t B, dx += dt A), `outer` sums rank columns times rows over an adapter's rows (the gradients). A tile finds its
adapter's matrices by address, so ranks and layouts mix in one launch, and rows of the base model are in no tile.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportPossiblyUnboundVariable=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = (16, 64)
"""Rows of a tile: for batches of few rows, and for others. A row's result is the same with either."""
FEW_ROWS = 1024
RANK_BLOCK = 32
CHUNK = 512  # terms of a sum that are added without a break; the sums of chunks are added in order
SEGMENT_ROWS = 512  # gradients are summed over this many rows of an adapter at a time, then over those sums in order
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _shrink_kernel(
    X, T, TILES, BASES, OFFSETS, x_stride, t_stride, chunk_stride, o_stride, K0, K1, K2, entry,
    PARTS_IN_RANK: tl.constexpr, N_PARTS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
    CHUNK: tl.constexpr, N_CHUNKS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """T[:, part * rank …] = X[:, columns of the part] @ M^T with M [ranks, K], for each part (program axis 2).

    K is summed in chunks, and their sums in order. With N_CHUNKS a program computes one chunk, T[chunk]: the sums are
    then added where they are used."""
    tile, part = tl.program_id(0), tl.program_id(2)
    row0, count = tl.load(TILES + tile * 4), tl.load(TILES + tile * 4 + 1)
    rank, layout = tl.load(TILES + tile * 4 + 2), tl.load(TILES + tile * 4 + 3)
    offset = tl.load(OFFSETS + layout * o_stride + entry + part)
    ranks, block, first = rank * PARTS_IN_RANK, tl.program_id(1), 0
    if N_CHUNKS:
        block, first = tl.program_id(1) // N_CHUNKS, tl.program_id(1) % N_CHUNKS * CHUNK
    j = block * BR + tl.arange(0, BR)
    if (offset >= 0) & (block * BR < ranks) & (count > 0):
        K, column = K0, 0
        if N_PARTS > 1:
            K = tl.where(part == 0, K0, tl.where(part == 1, K1, K2))
            column = tl.where(part == 0, 0, tl.where(part == 1, K0, K0 + K1))
        M = tl.load(BASES + tile).to(tl.pointer_type(DTYPE)) + offset
        r, k = tl.arange(0, BM), tl.arange(0, BK)
        is_row, is_rank, row = (r < count)[:, None], (j < ranks)[:, None], (row0 + r).to(tl.int64)
        x_row, m_row = X + row[:, None] * x_stride + column + k[None], M + j[:, None].to(tl.int64) * K + k[None]
        last = K
        if N_CHUNKS:
            last = tl.minimum(first + CHUNK, K)
        acc, total = tl.zeros((BM, BR), tl.float32), tl.zeros((BM, BR), tl.float32)
        for start in range(first, last, BK):
            is_new = start % CHUNK == 0
            total, acc = tl.where(is_new, total + acc, total), tl.where(is_new, 0.0, acc)
            in_k = (start + k < K)[None]
            x = tl.load(x_row + start, mask=is_row & in_k, other=0.0)
            m = tl.load(m_row + start, mask=is_rank & in_k, other=0.0)
            acc = tl.dot(x, tl.trans(m), acc)
        total += acc
        place = T + first // CHUNK * chunk_stride + row[:, None] * t_stride + part * rank + j[None]
        tl.store(place, total.to(T.dtype.element_ty), mask=is_row & (j < ranks)[None])


@triton.jit
def _expand_kernel(
    T, Y, TILES, SCALES, BASES, OFFSETS, t_stride, chunk_stride, y_stride, o_stride, N0, N1, N2, entry,
    PARTS_IN_RANK: tl.constexpr, N_PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    N_CHUNKS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Y[:, columns of the part] += scale * T[:, part * rank …] @ M with M [ranks, N]."""
    tile, block, part, column, N = tl.program_id(0), tl.program_id(1), 0, 0, N0
    if N_PARTS > 1:
        first, second = tl.cdiv(N0, BN), tl.cdiv(N0, BN) + tl.cdiv(N1, BN)
        part = tl.where(block < first, 0, tl.where(block < second, 1, 2))
        column = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
        N = tl.where(part == 0, N0, tl.where(part == 1, N1, N2))
        block = block - tl.where(part == 0, 0, tl.where(part == 1, first, second))
    row0, count = tl.load(TILES + tile * 4), tl.load(TILES + tile * 4 + 1)
    rank, layout = tl.load(TILES + tile * 4 + 2), tl.load(TILES + tile * 4 + 3)
    offset = tl.load(OFFSETS + layout * o_stride + entry + part)
    if (offset >= 0) & (count > 0):
        M = tl.load(BASES + tile).to(tl.pointer_type(DTYPE)) + offset
        ranks = rank * PARTS_IN_RANK
        r, n, j = tl.arange(0, BM), block * BN + tl.arange(0, BN), tl.arange(0, BR)
        is_row, row = (r < count)[:, None], (row0 + r).to(tl.int64)
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, ranks, BR):
            in_rank = start + j < ranks
            t_place, t_mask = T + row[:, None] * t_stride + part * rank + start + j[None], is_row & in_rank[None]
            if N_CHUNKS:
                total = tl.zeros((BM, BR), tl.float32)
                for chunk in range(N_CHUNKS):
                    total += tl.load(t_place + chunk * chunk_stride, mask=t_mask, other=0.0)
                t = total.to(DTYPE)
            else:
                t = tl.load(t_place, mask=t_mask, other=0.0)
            m_place = M + (start + j)[:, None].to(tl.int64) * N + n[None]
            m = tl.load(m_place, mask=in_rank[:, None] & (n < N)[None], other=0.0)
            acc = tl.dot(t, m, acc)
        place, mask = Y + row[:, None] * y_stride + column + n[None], is_row & (n < N)[None]
        y = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, tl.fma(acc, tl.load(SCALES + tile), y).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _outer_kernel(
    T, X, SUMS, SEGMENTS, OFFSETS, t_stride, x_stride, o_stride, sum_stride, N0, N1, N2, entry,
    PARTS_IN_RANK: tl.constexpr, N_PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """SUMS[segment, columns of the part …] = T^T X over a segment's rows: [ranks, N] for each part, end to end."""
    segment, block, part, column, N = tl.program_id(0), tl.program_id(1), 0, 0, N0
    if N_PARTS > 1:
        first, second = tl.cdiv(N0, BN), tl.cdiv(N0, BN) + tl.cdiv(N1, BN)
        part = tl.where(block < first, 0, tl.where(block < second, 1, 2))
        column = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
        N = tl.where(part == 0, N0, tl.where(part == 1, N1, N2))
        block = block - tl.where(part == 0, 0, tl.where(part == 1, first, second))
    row0, count = tl.load(SEGMENTS + segment * 4), tl.load(SEGMENTS + segment * 4 + 1)
    rank, layout = tl.load(SEGMENTS + segment * 4 + 2), tl.load(SEGMENTS + segment * 4 + 3)
    ranks, j0 = rank * PARTS_IN_RANK, tl.program_id(2) * BR
    if (tl.load(OFFSETS + layout * o_stride + entry + part) >= 0) & (j0 < ranks):
        r, n, j = tl.arange(0, BM), block * BN + tl.arange(0, BN), j0 + tl.arange(0, BR)
        acc = tl.zeros((BR, BN), tl.float32)
        for start in range(0, count, BM):
            row, in_rows = (row0 + start + r).to(tl.int64), start + r < count
            t_place = row[:, None] * t_stride + part * rank + j[None]
            x_place = row[:, None] * x_stride + column + n[None]
            t = tl.load(T + t_place, mask=in_rows[:, None] & (j < ranks)[None], other=0.0)
            x = tl.load(X + x_place, mask=in_rows[:, None] & (n < N)[None], other=0.0)
            acc = tl.dot(tl.trans(t), x, acc)
        place = SUMS + segment.to(tl.int64) * sum_stride + rank * column + j[:, None].to(tl.int64) * N + n[None]
        tl.store(place, acc, mask=(j < ranks)[:, None] & (n < N)[None])


@triton.jit
def _add_sums_kernel(
    SUMS, OWNERS, SCALES, GRADS, OFFSETS, sum_stride, o_stride, size_per_rank, entry, BLOCK: tl.constexpr
):
    """Adds an adapter's sums to its gradient row, in the order of its segments. The parts of a site are adjacent."""
    owner = tl.program_id(0)
    first, count = tl.load(OWNERS + owner * 4), tl.load(OWNERS + owner * 4 + 1)
    rank, layout = tl.load(OWNERS + owner * 4 + 2), tl.load(OWNERS + owner * 4 + 3)
    offset = tl.load(OFFSETS + layout * o_stride + entry)
    i = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = rank * size_per_rank
    if (offset >= 0) & (tl.program_id(1) * BLOCK < size):
        grads = tl.load(GRADS + owner).to(tl.pointer_type(tl.float32)) + offset + i
        total = tl.load(grads, mask=i < size, other=0.0)
        scale = tl.load(SCALES + owner)
        sums = SUMS + first.to(tl.int64) * sum_stride + i
        for _ in range(count):
            total = tl.fma(tl.load(sums, mask=i < size, other=0.0), scale, total)
            sums += sum_stride
        tl.store(grads, total, mask=i < size)


@dataclass(frozen=True, slots=True)
class SiteShape:
    entry: int
    """Column of the offset table that has the site's A; its B matrices follow."""
    in_size: int
    out_sizes: tuple[int, ...]


@dataclass(slots=True)
class LoraTiles:
    """Tiles of rows that share an adapter, and where their adapters' numbers are."""

    tiles: Tensor
    """int32 [tiles, 4]: first row, rows (0: nothing to do), rank, layout."""
    scales: Tensor
    """float32 [tiles]."""
    bases: Tensor
    """int64 [tiles]: the address of the adapter's row of weights."""
    offsets: Tensor
    """int64 [layouts, entries]: where each matrix begins in a row; -1 where a layout has none."""
    owners: Tensor
    """int32 [rows]: the first tile of a row's adapter; -1: it has none."""
    tile_rows: int
    max_rank: int

    def shrink(self, x: Tensor, site: SiteShape) -> Tensor:
        """x A^T: [rows, parts * rank], each tile's columns by its own rank."""
        return self._shrink(x, site.entry, (site.in_size,), len(site.out_sizes))

    def expand(self, y: Tensor, t: Tensor, site: SiteShape) -> None:
        """y += scale * t B."""
        self._expand(y, t, site.entry + 1, site.out_sizes, 1)

    def apply(self, y: Tensor, x: Tensor, site: SiteShape) -> None:
        """Both, for the same bits."""
        self.expand(y, self.shrink_chunks(x, site), site)

    def shrink_chunks(self, x: Tensor, site: SiteShape) -> Tensor:
        """x A^T, or chunks whose sum it is: few rows have too few tiles for a GPU, so they are computed apart."""
        chunks = triton.cdiv(site.in_size, CHUNK) if len(x) <= FEW_ROWS else 0
        return self._shrink(x, site.entry, (site.in_size,), len(site.out_sizes), chunks)

    def shrink_gradient(self, dy: Tensor, site: SiteShape) -> Tensor:
        """dy B^T: [rows, parts * rank]."""
        return self._shrink(dy, site.entry + 1, site.out_sizes, 1)

    def expand_gradient(self, dx: Tensor, dt: Tensor, site: SiteShape) -> None:
        """dx += scale * dt A."""
        self._expand(dx, dt, site.entry, (site.in_size,), len(site.out_sizes))

    def _shrink(self, x: Tensor, entry: int, sizes: tuple[int, ...], parts_in_rank: int, chunks: int = 0) -> Tensor:
        ranks = self.max_rank * parts_in_rank
        shape = (max(chunks, 1), len(x), ranks * len(sizes))
        t = torch.empty(shape, dtype=torch.float32 if chunks else x.dtype, device=x.device)
        block = _rank_block(ranks)
        _shrink_kernel[(len(self.tiles), triton.cdiv(ranks, block) * max(chunks, 1), len(sizes))](
            *(x, t, self.tiles, self.bases, self.offsets, x.stride(0), t.stride(1), t.stride(0)),
            *(self.offsets.stride(0), *_three(sizes), entry),
            PARTS_IN_RANK=parts_in_rank,
            N_PARTS=len(sizes),
            BM=self.tile_rows,
            BR=block,
            BK=128,
            CHUNK=CHUNK,
            N_CHUNKS=chunks,
            DTYPE=DTYPES[x.dtype],
            num_warps=4,
            num_stages=3,
        )
        return t if chunks else t[0]

    def _expand(self, y: Tensor, t: Tensor, entry: int, sizes: tuple[int, ...], parts_in_rank: int) -> None:
        block, chunks = 128, len(t) if t.dim() == 3 else 0
        _expand_kernel[(len(self.tiles), sum(triton.cdiv(n, block) for n in sizes))](
            *(t, y, self.tiles, self.scales, self.bases, self.offsets, t.stride(-2), t.stride(0), y.stride(0)),
            *(self.offsets.stride(0), *_three(sizes), entry),
            PARTS_IN_RANK=parts_in_rank,
            N_PARTS=len(sizes),
            BM=self.tile_rows,
            BN=block,
            BR=RANK_BLOCK,
            N_CHUNKS=chunks,
            DTYPE=DTYPES[y.dtype],
            num_warps=4,
            num_stages=2,
        )


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The adapters that have something at the experts of a layer."""

    tiles: LoraTiles
    gate_up: SiteShape
    down: SiteShape
    have_own_matrices: bool
    """Some have an A of gate and up, and a B of down, for each expert; else all experts share these."""


@dataclass(slots=True)
class GradientSums:
    """Which rows add to which adapter's gradient: segments of each, and their order."""

    segments: Tensor
    """int32 [segments, 4]: first row, rows, rank, layout. Those of one adapter are adjacent."""
    owners: Tensor
    """int32 [adapters, 4]: first segment, segments, rank, layout."""
    scales: Tensor
    """float32 [adapters]."""
    grads: Tensor
    """int64 [adapters]: the address of the adapter's row of gradients."""
    offsets: Tensor
    max_rank: int

    def add(self, t: Tensor, dt: Tensor, x: Tensor, dy: Tensor, site: SiteShape) -> None:
        """Adds the gradients of A and B, from x A^T, dy B^T, x and dy."""
        self._add(t, dy, site.entry + 1, site.out_sizes, 1)
        self._add(dt, x, site.entry, (site.in_size,), len(site.out_sizes))

    def _add(self, t: Tensor, x: Tensor, entry: int, sizes: tuple[int, ...], parts_in_rank: int) -> None:
        ranks, per_rank, columns = self.max_rank * parts_in_rank, sum(sizes) * parts_in_rank, 128
        sums = torch.empty(len(self.segments), self.max_rank * per_rank, dtype=torch.float32, device=x.device)
        block = _rank_block(ranks)
        grid = (len(self.segments), sum(triton.cdiv(n, columns) for n in sizes), triton.cdiv(ranks, block))
        _outer_kernel[grid](
            *(t, x, sums, self.segments, self.offsets, t.stride(0), x.stride(0), self.offsets.stride(0)),
            *(sums.stride(0), *_three(sizes), entry),
            PARTS_IN_RANK=parts_in_rank,
            N_PARTS=len(sizes),
            BM=64,
            BN=columns,
            BR=block,
            num_warps=4,
            num_stages=3,
        )
        size = 1024
        _add_sums_kernel[(len(self.owners), triton.cdiv(self.max_rank * per_rank, size))](
            *(sums, self.owners, self.scales, self.grads, self.offsets, sums.stride(0)),
            *(self.offsets.stride(0), per_rank, entry),
            BLOCK=size,
            num_warps=4,
        )


def _rank_block(ranks: int) -> int:
    """More would spill registers: measured on an H200, 128 is up to 20 times slower."""
    return 16 if ranks <= 16 else 32


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    first, second, third = (*sizes, 0, 0)[:3]
    return first, second, third
