"""Attention by kernels over tiles of queries: for half precision on a GPU, in training and in sampling.

Owns: cutting sequences into tiles, page tables. Never touches: the kernels themselves, which page belongs to whom.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.attention.kv_cache import KVCache, write_slots
from palestra.model.kernels.attention import (
    KEY_SPLIT,
    KeySource,
    Launch,
    SharedSplits,
    Tiles,
    attend,
    attend_once,
    attend_packed,
    write_pages,
)
from palestra.model.loading.spec import ModelSpec
from palestra.model.sampling.sequences import Sequence, StepPlan
from palestra.model.transfers import to_device

PREFILL_ROWS = 64  # queries times heads of a group in a tile
DECODE_ROWS = 16  # the same for single queries: the smallest tile there is
LATENT_HEADS = 32  # of a tile where all heads have the same keys, which are wide


def head_group(spec: ModelSpec) -> int:
    """Heads of a query that a tile holds: those that have the same keys, as far as there is room."""
    group = spec.n_heads // spec.n_kv_heads
    if not spec.key_tail:
        return group
    return max(n for n in range(1, min(group, LATENT_HEADS) + 1) if group % n == 0)


class TiledPackedAttention:
    """Causal attention within each of several sequences that stand end to end; see `Attention`."""

    def __init__(self, lengths: Seq[int], spec: ModelSpec, device: torch.device | str):
        self.spec = spec
        starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].tolist()
        spans = [(start, 0, n, start) for start, n in zip(starts, lengths, strict=True)]
        self.groups = spec.n_heads // head_group(spec)
        self.tiles = cut_tiles(np.array(spans, np.int32), head_group(spec), PREFILL_ROWS, device)
        step = Launch.of(spec.head_dim - spec.key_tail, device).gradient_keys
        blocks = [(s, key, n) for s, n in zip(starts, lengths, strict=True) for key in range(0, n, step)]
        self.key_blocks = to_device(blocks, device, np.int32)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        assert k is not None, "the kernels know no layers that read another one's keys"
        values, window, tail = None if self.spec.key_tail else v, self.spec.windows[layer], self.spec.key_tail
        return attend_packed(q, k, values, self.tiles, self.key_blocks, self.groups, window, sinks, tail)


class TiledPagedAttention:
    """Attention on pages where they are; see `Attention`. Keys past a sequence's end are never read, so pages need no
    clearing when they change hands."""

    def __init__(
        self, cache: KVCache, slots: Tensor, pages: Tensor, tiles: list[Tiles], shared: SharedSplits | None = None
    ):
        """`shared` is for the first tiles, those of single queries."""
        self.cache, self.spec, self.slots, self.tiles, self.shared = cache, cache.spec, slots, tiles, shared
        row_stride, head_stride = cache.slot_strides
        self.groups = self.spec.n_heads // head_group(self.spec)
        self.keys = KeySource(row_stride, 0 if self.spec.key_tail else head_stride, pages, cache.page_size)

    @classmethod
    def of(cls, cache: KVCache, plan: StepPlan) -> TiledPagedAttention:
        """For one step of the scheduler's plan: rows are `decode` first, then `prefill`."""
        group, device, n = head_group(cache.spec), cache.device, len(plan.decode)
        spans = row_spans(plan)
        tiles = [
            cut_tiles(some, group, rows, device)
            for some, rows in ((spans[:n], DECODE_ROWS), (spans[n:], PREFILL_ROWS))
            if len(some)
        ]
        slots, pages = (to_device(array, device) for array in (write_slots(plan, cache.page_size), page_numbers(plan)))
        arrays = SharedArrays.of(plan, group, cache.page_size)
        shared = None
        if len(arrays.tiles):
            tables = [to_device(array, device) for array in (arrays.tiles, arrays.rows, arrays.by_row)]
            results = SharedResults.of(len(arrays.tiles), cache.spec, device)
            shared = shared_splits(tables[0], tables[1], tables[2], cache.spec, results)
        return cls(cache, slots, pages, tiles, shared)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        assert k is not None, "the kernels know no layers that read another one's keys"
        keys, values = self.cache.by_head(layer)
        write_pages(k, None if self.spec.key_tail else v, keys, values, self.slots)
        out, window = q.new_empty(len(q), q.shape[1] * values.shape[-1]), self.spec.windows[layer]
        shared = self.shared if window is None else None
        if shared is not None:
            attend_once(q, keys, values, self.keys, self.groups, shared)
        for tiles in self.tiles:
            attend(q, keys, values, tiles, self.keys, self.groups, window, out, shared=shared, sinks=sinks)
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
    """How far rows from `first` on share whole splits (of `step` pages): the end of the rows, and the splits."""
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
    def of(cls, n_tiles: int, spec: ModelSpec, device: torch.device) -> SharedResults:
        group, dim = head_group(spec), spec.head_dim - spec.key_tail
        shape = (n_tiles * (tile_rows(PREFILL_ROWS, group) // group), spec.n_heads)
        m, weight = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        return cls(m, weight, torch.empty(*shape, dim, dtype=torch.float32, device=device))


def shared_splits(tiles: Tensor, rows: Tensor, by_row: Tensor, spec: ModelSpec, results: SharedResults) -> SharedSplits:
    size = tile_rows(PREFILL_ROWS, head_group(spec))
    return SharedSplits(tiles, rows, by_row, results.m, results.weight, results.acc, size)


def page_numbers(plan: StepPlan) -> NDArray[np.int32]:
    """The pages of all rows of a plan, end to end."""
    return np.fromiter(chain.from_iterable(chunk.seq.pages for chunk in plan.rows), np.int32)


def row_spans(plan: StepPlan) -> NDArray[np.int32]:
    """What `cut_spans` needs of each chunk: first row, its position, rows, where its pages begin."""
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
