"""LoRA products by kernels over tiles of rows: for half precision on a GPU.

Runs of rows with one adapter are cut into tiles, and of each tile the kernels read

    tiles [tiles, 4]                first row, rows (at most 16, or 64 in a large batch), rank, layout
    bases [tiles]                   the address of the adapter's row of numbers
    offsets [layouts, entries]      where in such a row the matrices of each site begin; -1: the layout has none

So ranks and layouts mix in one launch. For gradients, the runs of each adapter are cut into longer segments: a segment
is summed at once, and an adapter's segments in order. Rows of adapters may move: then addresses are looked up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.kernels.lora import (
    FEW_ROWS,
    SEGMENT_ROWS,
    TILE_ROWS,
    ExpertTiles,
    GradientSums,
    LoraTiles,
    SiteShape,
)
from palestra.model.lora.adapters import Adapter, Rows
from palestra.model.lora.buckets import RowRun
from palestra.model.lora.layout import Layout, Site, SiteName, site_entry
from palestra.model.transfers import to_device


@dataclass(slots=True)
class TileArrays:
    """What `LoraTiles` holds, on the host; the addresses come apart, since they may change."""

    tiles: NDArray[np.int32]
    scales: NDArray[np.float32]
    offsets: NDArray[np.int64]
    owners: NDArray[np.int32]
    """The adapter of each row, up to the last row that has one."""
    adapters: list[Adapter]
    """One for each tile."""
    layouts: list[Layout]

    @classmethod
    def of(cls, runs: Sequence[RowRun], tile_rows: int) -> TileArrays:
        layouts = list({id(run.adapter.stack): run.adapter.stack.own_layout for run in runs}.values())
        number = {id(layout): i for i, layout in enumerate(layouts)}
        rows, adapters, firsts = [], [], {}
        owners = np.full(max(run.start + run.rows for run in runs), -1, np.int32)
        for run in runs:
            layout = run.adapter.stack.own_layout
            owner = firsts.setdefault((id(run.adapter.stack), run.adapter.slot), len(rows))
            owners[run.start : run.start + run.rows] = owner
            for first, n in _cut(run, tile_rows):
                rows.append((first, n, layout.rank, number[id(layout)]))
                adapters.append(run.adapter)
        offsets = np.full((len(layouts), max(len(layout.offset_row) for layout in layouts)), -1, np.int64)
        for row, layout in zip(offsets, layouts, strict=True):
            row[: len(layout.offset_row)] = layout.offset_row
        scales = np.array([a.stack.own_layout.scale for a in adapters], np.float32)
        return cls(np.array(rows, np.int32), scales, offsets, owners, adapters, layouts)

    @property
    def have_own_matrices(self) -> bool:
        """Whether experts of an adapter share none of theirs."""
        return any(layout.has_own_matrices for layout in self.layouts)


class TiledLora:
    """What the adapters of a batch add to its linear layers; see `LoraProducts`."""

    def __init__(self, runs: Sequence[RowRun], device: torch.device | str):
        self._runs, self._device = runs, device
        n_rows = sum(run.rows for run in runs)
        tile_rows = TILE_ROWS[0] if n_rows <= FEW_ROWS else TILE_ROWS[1]
        self._arrays = arrays = TileArrays.of(runs, tile_rows)
        self._max_rank = max(layout.rank for layout in arrays.layouts)
        self._tiles = LoraTiles(
            self._to(arrays.tiles),
            self._to(arrays.scales),
            self._to(addresses(arrays.adapters, "compute")),
            self._to(arrays.offsets),
            self._to(arrays.owners),
            tile_rows,
            self._max_rank,
        )
        self._sums: GradientSums | None = None
        self._owners: list[Adapter] = []
        self._moves = self._count_moves()

    def inner(self, x: Tensor, name: SiteName) -> list[Tensor]:
        site = self._at(name)
        return [] if site is None else [self._tiles.shrink(x, site)]

    def add(self, y: Tensor, inner: Sequence[Tensor], name: SiteName) -> None:
        site = self._at(name)
        if site is not None:
            self._tiles.expand(y, inner[0], site)

    def apply(self, y: Tensor, x: Tensor, name: SiteName) -> None:
        site = self._at(name)
        if site is not None:
            self._tiles.apply(y, x, site)

    def backward(self, dy: Tensor, x: Tensor, inner: Sequence[Tensor], dx: Tensor | None, name: SiteName) -> None:
        site = self._at(name)
        if site is None:
            return
        self._sums = self._sums or self._plan_sums()
        dt = self._tiles.shrink_gradient(dy, site)
        self._sums.add(inner[0], dt, x, dy, site)
        if dx is not None:
            self._tiles.expand_gradient(dx, dt, site)

    def at_experts(self, layer: int) -> ExpertTiles | None:
        gate_up, down = self._at((layer, "gate_up")), self._at((layer, "down"))
        if gate_up is None or down is None:
            return None
        return ExpertTiles(self._tiles, gate_up, down, self._arrays.have_own_matrices)

    def _at(self, name: SiteName) -> SiteShape | None:
        """The site, with the addresses of adapters brought up to date; None where no adapter has it."""
        site = next((layout.sites[name] for layout in self._arrays.layouts if name in layout.sites), None)
        if self._moves != (moves := self._count_moves()):
            self._moves = moves
            self._tiles.bases = self._to(addresses(self._arrays.adapters, "compute"))
            if self._sums is not None:
                self._sums.grads = self._to(addresses(self._owners, "partial"))
        return None if site is None else site_shape(name, site)

    def _count_moves(self) -> int:
        return sum({id(run.adapter.stack): run.adapter.stack.moves for run in self._runs}.values())

    def _plan_sums(self) -> GradientSums:
        number = {id(layout): i for i, layout in enumerate(self._arrays.layouts)}
        by_owner: dict[tuple[int, int], list[RowRun]] = {}
        for run in self._runs:
            by_owner.setdefault((id(run.adapter.stack), run.adapter.slot), []).append(run)
        segments, owners = [], []
        for runs in by_owner.values():
            layout = runs[0].adapter.stack.own_layout
            pieces = [piece for run in runs for piece in _cut(run, SEGMENT_ROWS)]
            owners.append((len(segments), len(pieces), layout.rank, number[id(layout)]))
            segments += [(first, n, layout.rank, number[id(layout)]) for first, n in pieces]
        self._owners = [runs[0].adapter for runs in by_owner.values()]
        return GradientSums(
            self._to(np.array(segments, np.int32)),
            self._to(np.array(owners, np.int32)),
            self._to(np.array([a.stack.own_layout.scale for a in self._owners], np.float32)),
            self._to(addresses(self._owners, "partial")),
            self._tiles.offsets,
            self._max_rank,
        )

    def _to(self, array: NDArray) -> Tensor:
        return to_device(array, self._device)


def addresses(adapters: Sequence[Adapter], kind: Rows) -> NDArray[np.int64]:
    """The addresses of the adapters' rows in memory, until the next of their stack's `moves`."""
    rows = {id(a.stack): a.stack.rows(kind) for a in adapters}
    found = ((rows[id(a.stack)], a.slot) for a in adapters)
    return np.array([r.data_ptr() + slot * r.stride(0) * r.itemsize for r, slot in found], np.int64)


def site_shape(name: SiteName, site: Site) -> SiteShape:
    return SiteShape(site_entry(name), site.in_size, tuple(p.out_size for p in site.parts))


def _cut(run: RowRun, size: int) -> list[tuple[int, int]]:
    end = run.start + run.rows
    return [(first, min(size, end - first)) for first in range(run.start, end, size)]
