"""LoRA for batches that mix adapters: three kernels over tiles of rows that share one adapter.

`shrink` is rows times a matrix of rank rows (x A^T, dy B^T), `expand` adds rank columns times such a matrix to rows
(y += t B, dx += dt A), `outer` sums rank columns times rows over an adapter's rows (the gradients). A tile finds its
adapter's matrices by address, so ranks and layouts mix in one launch, and rows of the base model are in no tile.
Owns: the kernels and the tiles. Never touches: where adapters come from, autograd.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

TILE_ROWS = (16, 64)
"""Rows of a tile: for batches of few rows, and for others. A row's result is the same with either."""
FEW_ROWS = 1024
RANK_BLOCK = 32
SEGMENT_ROWS = 512  # gradients are summed over this many rows of an adapter at a time, then over those sums in order
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _shrink_kernel(
    X, T, TILES, BASES, OFFSETS, x_stride, t_stride, o_stride, K0, K1, K2, entry, PARTS_IN_RANK: tl.constexpr,
    N_PARTS: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """T[:, part * rank …] = X[:, columns of the part] @ M^T with M [ranks, K], for each part (program axis 2)."""
    tile, part = tl.program_id(0), tl.program_id(2)
    row0, count = tl.load(TILES + tile * 4), tl.load(TILES + tile * 4 + 1)
    rank, layout = tl.load(TILES + tile * 4 + 2), tl.load(TILES + tile * 4 + 3)
    offset = tl.load(OFFSETS + layout * o_stride + entry + part)
    ranks = rank * PARTS_IN_RANK
    j = tl.program_id(1) * BR + tl.arange(0, BR)
    if (offset >= 0) & (tl.program_id(1) * BR < ranks) & (count > 0):
        K, column = K0, 0
        if N_PARTS > 1:
            K = tl.where(part == 0, K0, tl.where(part == 1, K1, K2))
            column = tl.where(part == 0, 0, tl.where(part == 1, K0, K0 + K1))
        M = tl.load(BASES + tile).to(tl.pointer_type(DTYPE)) + offset
        r, k = tl.arange(0, BM), tl.arange(0, BK)
        row = (row0 + r).to(tl.int64)
        acc = tl.zeros((BM, BR), tl.float32)
        for start in range(0, K, BK):
            in_k = start + k < K
            x = tl.load(X + row[:, None] * x_stride + column + start + k[None], mask=(r < count)[:, None] & in_k[None], other=0.0)
            m = tl.load(M + j[:, None].to(tl.int64) * K + start + k[None], mask=(j < ranks)[:, None] & in_k[None], other=0.0)
            acc = tl.dot(x, tl.trans(m), acc)
        place = T + row[:, None] * t_stride + part * rank + j[None]
        tl.store(place, acc.to(T.dtype.element_ty), mask=(r < count)[:, None] & (j < ranks)[None])


@triton.jit
def _expand_kernel(
    T, Y, TILES, SCALES, BASES, OFFSETS, t_stride, y_stride, o_stride, N0, N1, N2, entry, PARTS_IN_RANK: tl.constexpr,
    N_PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, DTYPE: tl.constexpr,
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
        row = (row0 + r).to(tl.int64)
        acc = tl.zeros((BM, BN), tl.float32)
        for start in range(0, ranks, BR):
            in_rank = start + j < ranks
            t = tl.load(T + row[:, None] * t_stride + part * rank + start + j[None], mask=(r < count)[:, None] & in_rank[None], other=0.0)
            m = tl.load(M + (start + j)[:, None].to(tl.int64) * N + n[None], mask=in_rank[:, None] & (n < N)[None], other=0.0)
            acc = tl.dot(t, m, acc)
        place, mask = Y + row[:, None] * y_stride + column + n[None], (r < count)[:, None] & (n < N)[None]
        y = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, tl.fma(acc, tl.load(SCALES + tile), y).to(Y.dtype.element_ty), mask=mask)


@triton.jit
def _outer_kernel(
    T, X, SUMS, SEGMENTS, OFFSETS, t_stride, x_stride, o_stride, sum_stride, N0, N1, N2, entry,
    PARTS_IN_RANK: tl.constexpr, N_PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """SUMS[segment, columns of the part …] = T^T X over the rows of a segment: [ranks, N] for each part, end to end."""
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
            t = tl.load(T + row[:, None] * t_stride + part * rank + j[None], mask=in_rows[:, None] & (j < ranks)[None], other=0.0)
            x = tl.load(X + row[:, None] * x_stride + column + n[None], mask=in_rows[:, None] & (n < N)[None], other=0.0)
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
class TileRun:
    """Adjacent rows of one adapter."""

    start: int
    rows: int
    owner: int
    """Index into the owners."""


@dataclass(frozen=True, slots=True)
class Owner:
    """An adapter as the kernels see it."""

    rank: int
    layout: int
    scale: float


@dataclass(frozen=True, slots=True)
class SiteShape:
    entry: int
    """Column of the offset table that has the site's A; its B matrices follow."""
    in_size: int
    out_sizes: tuple[int, ...]


class LoraTiles:
    """The tiles of one batch. Addresses of adapters may change while it lives: `place` gives the current ones."""

    def __init__(
        self, runs: list[TileRun], owners: list[Owner], offsets: NDArray[np.int64], device: torch.device | str
    ):
        self.device, self.owners = device, owners
        n_rows = sum(run.rows for run in runs)
        self.tile_rows = TILE_ROWS[0] if n_rows <= FEW_ROWS else TILE_ROWS[1]
        tiles = [(*piece, run.owner) for run in runs for piece in _cut(run.start, run.rows, self.tile_rows)]
        self._tile_owner = np.array([owner for *_, owner in tiles])
        self.max_rank = max(o.rank for o in owners)
        self.tiles = self._table(tiles)
        self.scales = self._to(np.array([owners[o].scale for o in self._tile_owner], np.float32))
        self.offsets = self._to(offsets)
        self._runs = runs
        self._segments: Tensor | None = None
        self.bases = self.grads = self.tiles

    def place(self, bases: NDArray[np.int64], grads: NDArray[np.int64] | None = None) -> None:
        """Where each owner's rows of weights and gradients begin, as addresses."""
        self.bases = self._to(bases[self._tile_owner])
        if grads is not None:
            self.grads = self._to(grads)

    def shrink(self, x: Tensor, site: SiteShape) -> Tensor:
        """x A^T: [rows, parts * rank], each tile's columns by its own rank."""
        parts = len(site.out_sizes)
        return self._shrink(x, site.entry, (site.in_size,), parts)

    def expand(self, y: Tensor, t: Tensor, site: SiteShape) -> None:
        """y += scale * t B."""
        self._expand(y, t, site.entry + 1, site.out_sizes, 1)

    def backward(self, dy: Tensor, x: Tensor, t: Tensor, dx: Tensor | None, site: SiteShape) -> None:
        """Adds to the gradient rows of all owners, and to dx."""
        parts = len(site.out_sizes)
        dt = self._shrink(dy, site.entry + 1, site.out_sizes, 1)
        self._add_gradient(t, dy, site.entry + 1, site.out_sizes, 1)
        self._add_gradient(dt, x, site.entry, (site.in_size,), parts)
        if dx is not None:
            self._expand(dx, dt, site.entry, (site.in_size,), parts)

    def _shrink(self, x: Tensor, entry: int, sizes: tuple[int, ...], parts_in_rank: int) -> Tensor:
        width = self.max_rank * parts_in_rank * len(sizes)
        t = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
        block = min(64, max(16, triton.next_power_of_2(self.max_rank * parts_in_rank)))
        _shrink_kernel[(len(self.tiles), triton.cdiv(self.max_rank * parts_in_rank, block), len(sizes))](
            *(x, t, self.tiles, self.bases, self.offsets, x.stride(0), t.stride(0), self.offsets.stride(0)),
            *_three(sizes),
            entry,
            PARTS_IN_RANK=parts_in_rank,
            N_PARTS=len(sizes),
            BM=self.tile_rows,
            BR=block,
            BK=64,
            DTYPE=DTYPES[x.dtype],
            num_warps=4,
            num_stages=4,
        )
        return t

    def _expand(self, y: Tensor, t: Tensor, entry: int, sizes: tuple[int, ...], parts_in_rank: int) -> None:
        block = 128
        _expand_kernel[(len(self.tiles), sum(triton.cdiv(n, block) for n in sizes))](
            *(t, y, self.tiles, self.scales, self.bases, self.offsets, t.stride(0), y.stride(0)),
            self.offsets.stride(0),
            *_three(sizes),
            entry,
            PARTS_IN_RANK=parts_in_rank,
            N_PARTS=len(sizes),
            BM=self.tile_rows,
            BN=block,
            BR=RANK_BLOCK,
            DTYPE=DTYPES[y.dtype],
            num_warps=4,
            num_stages=2,
        )

    def _add_gradient(self, t: Tensor, x: Tensor, entry: int, sizes: tuple[int, ...], parts_in_rank: int) -> None:
        if self._segments is None:
            self._plan_segments()
        assert self._segments is not None
        per_rank = sum(sizes) * parts_in_rank
        sums = torch.empty(len(self._segments), self.max_rank * per_rank, dtype=torch.float32, device=x.device)
        columns, ranks = 128, min(64, max(16, triton.next_power_of_2(self.max_rank * parts_in_rank)))
        grid = (
            len(self._segments),
            sum(triton.cdiv(n, columns) for n in sizes),
            triton.cdiv(self.max_rank * parts_in_rank, ranks),
        )
        _outer_kernel[grid](
            *(t, x, sums, self._segments, self.offsets, t.stride(0), x.stride(0), self.offsets.stride(0)),
            sums.stride(0),
            *_three(sizes),
            entry,
            PARTS_IN_RANK=parts_in_rank,
            N_PARTS=len(sizes),
            BM=64,
            BN=columns,
            BR=ranks,
            num_warps=4,
            num_stages=3,
        )
        block = 1024
        _add_sums_kernel[(len(self._owner_table), triton.cdiv(self.max_rank * per_rank, block))](
            *(sums, self._owner_table, self._owner_scales, self.grads, self.offsets, sums.stride(0)),
            *(self.offsets.stride(0), per_rank, entry),
            BLOCK=block,
            num_warps=4,
        )

    def _plan_segments(self) -> None:
        """Segments of one owner are adjacent, so that its sums are added in one loop."""
        runs = sorted(self._runs, key=lambda run: (run.owner, run.start))
        segments = [(*piece, run.owner) for run in runs for piece in _cut(run.start, run.rows, SEGMENT_ROWS)]
        self._segments = self._table(segments)
        owner_of = np.array([owner for *_, owner in segments])
        found, first, counts = np.unique(owner_of, return_index=True, return_counts=True)
        self._owner_table = self._table([(int(f), int(c), int(o)) for o, f, c in zip(found, first, counts, strict=True)])
        self._owner_scales = self._to(np.array([self.owners[o].scale for o in found], np.float32))

    def _table(self, pieces: list[tuple[int, int, int]]) -> Tensor:
        rows = [(start, n, self.owners[o].rank, self.owners[o].layout) for start, n, o in pieces]
        return self._to(np.array(rows, np.int32).reshape(-1, 4))

    def _to(self, array: NDArray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _cut(start: int, rows: int, size: int) -> list[tuple[int, int]]:
    return [(first, min(size, start + rows - first)) for first in range(start, start + rows, size)]


def _three(sizes: tuple[int, ...]) -> tuple[int, int, int]:
    first, second, third = (*sizes, 0, 0)[:3]
    return first, second, third
