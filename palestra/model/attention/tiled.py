"""Attention by kernels over tiles of queries: for half precision on a GPU, in training and in sampling."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.attention.branches import Branches
from palestra.model.attention.kv_cache import KVCache, write_slots
from palestra.model.kernels.attention import (
    KEY_SPLIT,
    KeySource,
    Launch,
    PackedTrees,
    SharedSplits,
    Tiles,
    attend,
    attend_once,
    attend_packed,
    write_pages,
)
from palestra.model.loading.layer_spec import HeadShape
from palestra.model.loading.spec import ModelSpec
from palestra.model.sampling.sequences import Sequence, StepPlan
from palestra.model.transfers import to_device

PREFILL_ROWS = 64  # queries times heads of a group in a tile
DECODE_ROWS = 16  # the same for single queries: the smallest tile there is
LATENT_HEADS = 32  # of a tile where all heads have the same keys, which are wide


def head_group(shape: HeadShape, key_tail: int) -> int:
    """Heads of a query that a tile holds: those that have the same keys, as far as there is room."""
    group = shape.n_heads // shape.n_kv_heads
    if not key_tail:
        return group
    return max(n for n in range(1, min(group, LATENT_HEADS) + 1) if group % n == 0)


@dataclass(frozen=True, slots=True)
class _PackedTiles:
    """Tiles of rows that were added by one sequence each, for layers with heads of one shape."""

    groups: int
    tiles: Tiles
    key_blocks: Tensor

    @classmethod
    def of(cls, spans: NDArray[np.int32], shape: HeadShape, key_tail: int, device: torch.device | str) -> _PackedTiles:
        """`spans`: as for `cut_spans`."""
        group = head_group(shape, key_tail)
        step = Launch.of(shape.head_dim - key_tail, device).gradient_keys
        blocks = [
            (row + key, position + key, row + n) for row, position, n, _ in spans.tolist() for key in range(0, n, step)
        ]
        tiles = cut_tiles(spans, group, PREFILL_ROWS, device)
        return cls(shape.n_heads // group, tiles, to_device(blocks, device, np.int32))


class TiledPackedAttention:
    """Causal attention within each of several sequences that stand end to end, or that share rows; see `Attention`."""

    def __init__(
        self, lengths: Seq[int], spec: ModelSpec, device: torch.device | str, branches: Branches | None = None
    ):
        self.spec = spec
        if branches is None:
            starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
            spans = np.stack([starts, np.zeros_like(starts), np.asarray(lengths), starts], axis=1)
            self.trees = None
        else:
            spans = np.array(branches.spans)
            arrays = branches.paths, branches.positions, branches.ends
            self.trees = PackedTrees(*(to_device(array, device, np.int32) for array in arrays))
        shapes = set(spec.heads)
        self.tiles = {s: _PackedTiles.of(spans.astype(np.int32), s, spec.key_tail, device) for s in shapes}
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        """Keys and values of layers that others read."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        window, tail, planned = self.spec.windows[layer], self.spec.key_tail, self.tiles[self.spec.heads[layer]]
        values = None if tail else v
        if k is None:
            k, values = self._kept[self.spec.kv_sources[layer]]
        elif layer in self.spec.kv_sources.values():
            self._kept[layer] = (k, values)
        trees = self.trees
        return attend_packed(
            q, k, values, planned.tiles, planned.key_blocks, planned.groups, window, sinks, tail, trees
        )


@dataclass(frozen=True, slots=True)
class PagedTiles:
    """Tiles of a step's rows, for layers with heads of one shape."""

    groups: int
    tiles: list[Tiles]
    shared: SharedSplits | None = None
    """For the first tiles, those of single queries."""

    @classmethod
    def of(cls, cache: KVCache, plan: StepPlan, shape: HeadShape) -> PagedTiles:
        tail, device, n = cache.spec.key_tail, cache.device, len(plan.decode)
        group, spans = head_group(shape, tail), row_spans(plan)
        tiles = [
            cut_tiles(some, group, rows, device)
            for some, rows in ((spans[:n], DECODE_ROWS), (spans[n:], PREFILL_ROWS))
            if len(some)
        ]
        arrays, shared = SharedArrays.of(plan, group, cache.page_size), None
        if len(arrays.tiles):
            tables = [to_device(array, device) for array in (arrays.tiles, arrays.rows, arrays.by_row)]
            results = SharedResults.of(len(arrays.tiles), shape, tail, device)
            shared = shared_splits(tables[0], tables[1], tables[2], group, results)
        return cls(shape.n_heads // group, tiles, shared)


class TiledPagedAttention:
    """Attention on pages where they are; see `Attention`. Keys past a sequence's end are never read, so pages need no
    clearing when they change hands."""

    def __init__(self, cache: KVCache, slots: Tensor, pages: Tensor, tiles: Mapping[HeadShape, PagedTiles]):
        self.cache, self.spec, self.slots, self.pages, self.tiles = cache, cache.spec, slots, pages, tiles

    @classmethod
    def of(cls, cache: KVCache, plan: StepPlan) -> TiledPagedAttention:
        """Makes the plan of one step of the scheduler: rows are `decode` first, then `prefill`."""
        arrays = write_slots(plan, cache.page_size), page_numbers(plan)
        slots, pages = (to_device(array, cache.device) for array in arrays)
        tiles = {shape: PagedTiles.of(cache, plan, shape) for shape in dict.fromkeys(cache.spec.heads)}
        return cls(cache, slots, pages, tiles)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        tail, planned = self.spec.key_tail, self.tiles[self.spec.heads[layer]]
        keys, values = self.cache.by_head(layer)
        if k is not None:
            write_pages(k, None if tail else v, keys, values, self.slots)
        source = KeySource(keys.stride(1), 0 if tail else keys.stride(0), self.pages, self.cache.page_size)
        out, window = q.new_empty(len(q), q.shape[1] * values.shape[-1]), self.spec.windows[layer]
        shared = planned.shared if window is None else None
        if shared is not None:
            attend_once(q, keys, values, source, planned.groups, shared)
        for tiles in planned.tiles:
            attend(q, keys, values, tiles, source, planned.groups, window, out, shared=shared, sinks=sinks)
            shared = None
        return out


@dataclass(slots=True)
class SharedArrays:
    """What `SharedSplits` holds of a plan's decoding rows, on the host."""

    tiles: NDArray[np.int32]
    rows: NDArray[np.int32]
    by_row: NDArray[np.int32]

    @classmethod
    def of(cls, plan: StepPlan, group: int, page_size: int) -> SharedArrays:
        """Neighbouring rows whose first whole splits are on the same pages, as many as a tile holds: samples of one
        prompt stand beside each other."""
        queries, step, rest = tile_rows(PREFILL_ROWS, group) // group, *divmod(KEY_SPLIT, page_size)
        tiles: list[tuple[int, int, int]] = []
        rows: list[list[int]] = []
        by_row = np.zeros((len(plan.decode), 2), np.int32)
        ends = [s.pages[step - 1] if len(s.pages) >= step else None for s in plan.decode if not rest]
        sources = list(accumulate((len(s.pages) for s in plan.decode), initial=0))
        first = 0
        while first < len(ends) - 1:
            if ends[first] is None or ends[first] != ends[first + 1]:  # the first split is its own
                first += 1
                continue
            end, splits = _sharing(plan.decode, first, queries, step)
            members = list(range(first, end))
            by_row[first:end, 0] = len(tiles) * queries + np.arange(end - first)
            by_row[first:end, 1] = splits
            tiles += [(split, len(members), sources[first]) for split in range(splits)]
            rows += [members + [0] * (queries - len(members))] * splits
            first = end
        return cls(np.array(tiles, np.int32).reshape(-1, 3), np.array(rows, np.int32).reshape(-1, queries), by_row)


def _sharing(seqs: Seq[Sequence], first: int, most: int, step: int) -> tuple[int, int]:
    """Returns how far rows from `first` on share whole splits (of `step` pages): the end of the rows, and the
    splits."""
    pages, end, splits = seqs[first].pages, first + 1, 0
    while end < min(first + most, len(seqs)):
        others = seqs[end].pages
        found = min(len(pages), len(others)) // step
        if not found or pages[step - 1] != others[step - 1]:
            break
        while pages[found * step - 1] != others[found * step - 1]:  # a page knows all that is before it
            found -= 1
        if found < splits:
            break
        splits, end = splits or found, end + 1
    return end, splits


def tile_rows(least: int, group: int) -> int:
    """Rows of a tile that holds at least one query with all heads of its group."""
    return max(least, 1 << (group - 1).bit_length())


@dataclass(frozen=True, slots=True)
class SharedResults:
    """Room for what is computed once: see `SharedSplits`."""

    m: Tensor
    weight: Tensor
    acc: Tensor

    @classmethod
    def of(cls, n_tiles: int, shape: HeadShape, key_tail: int, device: torch.device) -> SharedResults:
        group = head_group(shape, key_tail)
        places = (n_tiles * (tile_rows(PREFILL_ROWS, group) // group), shape.n_heads)
        m, weight = (torch.empty(places, dtype=torch.float32, device=device) for _ in range(2))
        return cls(m, weight, torch.empty(*places, shape.head_dim - key_tail, dtype=torch.float32, device=device))


def shared_splits(tiles: Tensor, rows: Tensor, by_row: Tensor, group: int, results: SharedResults) -> SharedSplits:
    size = tile_rows(PREFILL_ROWS, group)
    return SharedSplits(tiles, rows, by_row, results.m, results.weight, results.acc, size)


def page_numbers(plan: StepPlan) -> NDArray[np.int32]:
    """The pages of all rows of a plan, end to end."""
    return np.fromiter(chain.from_iterable(chunk.seq.pages for chunk in plan.rows), np.int32)


def row_spans(plan: StepPlan) -> NDArray[np.int32]:
    """Returns what `cut_spans` needs of each chunk: first row, its position, rows, where its pages begin."""
    start, end, pages = np.array([(c.start, c.end, len(c.seq.pages)) for c in plan.rows], np.int32).reshape(-1, 3).T
    rows = end - start
    return np.stack([np.cumsum(rows) - rows, start, rows, np.cumsum(pages) - pages], axis=1)


def cut_spans(spans: NDArray[np.int32], group: int, rows: int) -> NDArray[np.int32]:
    """Spans of neighbouring queries that fit into a tile of `rows`; see `Tiles`.

    The longest ones come first: what ends last should begin first."""
    size = tile_rows(rows, group) // group
    table = [
        (row + first, position + first, min(size, n - first), source)
        for row, position, n, source in spans.tolist()
        for first in range(0, n, size)
    ]
    table.sort(key=lambda tile: -tile[1])
    return np.array(table, np.int32).reshape(-1, 4)


def cut_tiles(spans: NDArray[np.int32], group: int, rows: int, device: torch.device | str) -> Tiles:
    return Tiles(to_device(cut_spans(spans, group, rows), device), tile_rows(rows, group))
