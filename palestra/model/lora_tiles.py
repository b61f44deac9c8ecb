"""LoRA products by kernels over tiles of rows: for half precision on a GPU.

Owns: which adapter a tile uses and where its numbers are. Never touches: the kernels themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.adapters import Adapter, Rows, SiteName
from palestra.model.kernels.lora import LoraTiles, Owner, SiteShape, TileRun
from palestra.model.lora_buckets import Run

MAX_PARTS = 3  # projections that share an input: q, k and v


class TiledLora:
    """What the adapters of a batch add to its products; see `LoraProducts`."""

    def __init__(self, runs: Sequence[Run], device: torch.device | str):
        owners = {(id(run.adapter.stack), run.adapter.slot): run.adapter for run in runs}
        numbers = {key: i for i, key in enumerate(owners)}
        self._owners: list[Adapter] = list(owners.values())
        self._layouts = list({id(a.stack): a.stack.layout for a in self._owners}.values())
        layout_of = {id(layout): i for i, layout in enumerate(self._layouts)}
        self._entries = {
            name: i * (1 + MAX_PARTS)
            for i, name in enumerate(dict.fromkeys(name for layout in self._layouts for name in layout.sites))
        }
        self._tiles = LoraTiles(
            [TileRun(r.start, r.rows, numbers[id(r.adapter.stack), r.adapter.slot]) for r in runs],
            [Owner(a.stack.layout.rank, layout_of[id(a.stack.layout)], a.stack.layout.scale) for a in self._owners],
            self._offsets(),
            device,
        )
        self._moves: tuple[int, ...] = ()
        """What `Stack.moves` was when the addresses were looked up."""
        self._with_grads = False

    def inner(self, x: Tensor, name: SiteName) -> list[Tensor]:
        site = self._at(name)
        return [] if site is None else [self._tiles.shrink(x, site)]

    def add(self, y: Tensor, inner: Sequence[Tensor], name: SiteName) -> None:
        site = self._at(name)
        if site is not None:
            self._tiles.expand(y, inner[0], site)

    def backward(self, dy: Tensor, x: Tensor, inner: Sequence[Tensor], dx: Tensor | None, name: SiteName) -> None:
        site = self._at(name, grads=True)
        if site is not None:
            self._tiles.backward(dy, x, inner[0], dx, site)

    def _at(self, name: SiteName, *, grads: bool = False) -> SiteShape | None:
        """The site, with the addresses of adapters brought up to date; None where no adapter has it."""
        layout = next((layout for layout in self._layouts if name in layout.sites), None)
        if layout is None:
            return None
        moves = tuple(a.stack.moves for a in self._owners)
        if moves != self._moves or (grads and not self._with_grads):
            self._moves, self._with_grads = moves, self._with_grads or grads
            self._tiles.place(self._addresses("compute"), self._addresses("grads") if self._with_grads else None)
        site = layout.sites[name]
        return SiteShape(self._entries[name], site.in_size, tuple(p.out_size for p in site.parts))

    def _addresses(self, kind: Rows) -> NDArray[np.int64]:
        rows = [a.stack.rows(kind) for a in self._owners]
        return np.array(
            [r.data_ptr() + a.slot * r.stride(0) * r.itemsize for r, a in zip(rows, self._owners, strict=True)],
            np.int64,
        )

    def _offsets(self) -> NDArray[np.int64]:
        """[layouts, sites * (A, B of each part)]: where a matrix begins in an adapter's row; -1: it has none."""
        table = np.full((len(self._layouts), len(self._entries) * (1 + MAX_PARTS)), -1, np.int64)
        for row, layout in zip(table, self._layouts, strict=True):
            for name, site in layout.sites.items():
                entry = self._entries[name]
                row[entry : entry + 1 + len(site.parts)] = [site.a_offset, *(p.b_offset for p in site.parts)]
        return table
