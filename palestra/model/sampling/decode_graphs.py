"""Decoding steps as CUDA graphs: the launches of a whole forward pass are recorded once for each of a few row counts.

A step writes its inputs into fixed buffers, in one copy, and replays. Rows beyond those of the step do nothing: they
write to no page, see no key and belong to no adapter's tile. Owns: the graphs and their buffers. Never touches:
which rows a step has, drawing tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.attention.kv_cache import KVCache, write_slots
from palestra.model.attention.tiled import (
    DECODE_ROWS,
    SharedArrays,
    SharedResults,
    TiledPagedAttention,
    page_numbers,
    row_spans,
    shared_splits,
    shared_tile_rows,
)
from palestra.model.decoder import Decoder
from palestra.model.kernels.attention import Tiles
from palestra.model.kernels.lora import TILE_ROWS, LoraTiles, SiteShape
from palestra.model.lora.adapters import SITE_ENTRIES, SITE_KINDS, Layout, SiteName
from palestra.model.lora.buckets import RowRun
from palestra.model.lora.linear import LoraPlan
from palestra.model.lora.tiles import TileArrays, addresses, site_shape
from palestra.model.sampling.sequences import StepPlan
from palestra.types import LoraConfig

USUAL_RANK = 32
SPARE_TILES = 16  # tiles for adapters with few rows, beside those of a graph full of one; more: a tile for each row
MAX_LAYOUTS = 32  # kinds of adapters (rank, alpha, targets) in one step; more: without a graph


@dataclass(frozen=True, slots=True)
class GraphKey:
    rows: int
    tiles: int = 0
    """Tiles of rows that share an adapter; 0: the base model alone."""
    max_rank: int = 0
    """A power of two, so that few graphs serve all ranks."""
    shared_tiles: int = 0
    """Tiles of rows that read the same keys: a power of two, or 0."""


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    forward: Callable[[], Tensor]
    """What was recorded. It holds the tensors that the graph writes to and that are not of the graph's own memory."""


class DecodeGraphs:
    def __init__(self, decoder: Decoder, cache: KVCache, max_rows: int):
        self.decoder, self.cache = decoder, cache
        self.row_counts = _row_counts(max_rows)
        self._sites = _site_shapes(decoder)
        most_rows, most_pages = self.row_counts[-1], -(-decoder.spec.max_positions // cache.page_size)
        self._group = decoder.spec.n_heads // decoder.spec.n_kv_heads
        queries = shared_tile_rows(self._group) // self._group
        self._inputs = _Inputs(most_rows, most_rows * most_pages, queries, decoder.spec.n_layers, cache.device)
        self._graphs: dict[GraphKey, _Graph] = {}
        self._results: dict[int, SharedResults] = {}
        """By the number of tiles that share keys."""
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, plan: StepPlan, tokens: Tensor, runs: Seq[RowRun]) -> Tensor | None:
        """Hidden states of the plan's rows, valid until the next call; None when no graph can hold the step.
        `runs`: the rows that have adapters."""
        rows = len(plan.decode)
        if plan.prefill or rows > self.row_counts[-1]:
            return None
        size = self.row_counts[bisect_left(self.row_counts, rows)]
        arrays = TileArrays.of(runs, TILE_ROWS[0]) if runs else None
        shared = SharedArrays.of(plan, self._group, self.cache.page_size)
        shared_tiles = 1 << max(len(shared.tiles) - 1, 15).bit_length() if len(shared.tiles) else 0
        if shared_tiles > self._inputs.most_shared:
            return None
        key = GraphKey(size, shared_tiles=shared_tiles)
        if arrays is not None:
            if len(arrays.layouts) > MAX_LAYOUTS:
                return None
            few = _few_tiles(size)
            rank = max(layout.rank for layout in arrays.layouts)
            tiles = few if len(arrays.tiles) <= few else size
            key = GraphKey(size, tiles, 1 << (rank - 1).bit_length(), shared_tiles)
        try:
            self.record(key)
        except torch.OutOfMemoryError:
            return None
        self._inputs.fill(plan, tokens, arrays, shared, self.cache.page_size)
        graph = self._graphs[key]
        graph.graph.replay()
        return graph.hidden[:rows]

    @property
    def usual_keys(self) -> list[GraphKey]:
        """Graphs of the base model and of adapters of a common rank; the largest first, since others fit into its
        memory."""
        sizes = self.row_counts[::-1]
        return [key for n in sizes for key in (GraphKey(n), GraphKey(n, _few_tiles(n), USUAL_RANK))]

    def record(self, key: GraphKey) -> None:
        if key not in self._graphs:
            self._graphs[key] = self._capture(key)

    def _capture(self, key: GraphKey) -> _Graph:
        self._inputs.clear()
        forward = self._forward(key)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()  # compiles what is not compiled yet, which a graph cannot record
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = forward()
        return _Graph(graph, hidden, forward)

    def _forward(self, key: GraphKey) -> Callable[[], Tensor]:
        inputs, rows = self._inputs, key.rows
        shared = None
        if n := key.shared_tiles:
            arrays = (inputs.shared_tiles[:n], inputs.shared_rows[:n], inputs.shared_by_row[:rows])
            if n not in self._results:  # graphs are replayed one after another: they share the room
                self._results[n] = SharedResults.of(n, self.decoder.spec, self.cache.device)
            shared = shared_splits(*arrays, self.decoder.spec, self._results[n])
        tiles = Tiles(inputs.tiles[:rows], max(DECODE_ROWS, 1 << (self._group - 1).bit_length()))
        attention = TiledPagedAttention(self.cache, inputs.slots[:rows], inputs.pages, [tiles], shared)
        plan = LoraPlan()
        if key.tiles:
            n = key.tiles
            tiles = LoraTiles(
                *(inputs.lora_tiles[:n], inputs.lora_scales[:n], inputs.lora_bases[:n], inputs.lora_offsets),
                tile_rows=TILE_ROWS[0],
                max_rank=key.max_rank,
            )
            plan = LoraPlan(_GraphLora(tiles, self._sites))
        return lambda: self.decoder(inputs.tokens[:rows], inputs.positions[:rows], attention, plan)


class _GraphLora:
    """`LoraProducts` of a recorded step: the tiles are read from buffers, and every site is there."""

    def __init__(self, tiles: LoraTiles, sites: dict[SiteName, SiteShape]):
        self.tiles, self.sites = tiles, sites

    def apply(self, y: Tensor, x: Tensor, name: SiteName) -> None:
        self.tiles.apply(y, x, self.sites[name])

    def inner(self, x: Tensor, name: SiteName) -> list[Tensor]:
        raise NotImplementedError("a recorded step has no backward pass")

    def add(self, y: Tensor, inner: Seq[Tensor], name: SiteName) -> None:
        raise NotImplementedError("a recorded step has no backward pass")

    def backward(self, dy: Tensor, x: Tensor, inner: Seq[Tensor], dx: Tensor | None, name: SiteName) -> None:
        raise NotImplementedError("a recorded step has no backward pass")


class _Inputs:
    """Buffers that the graphs read. One copy brings a step's inputs to the device: what is always used comes first."""

    def __init__(self, rows: int, most_pages: int, queries: int, n_layers: int, device: torch.device):
        """`queries`: of a tile of rows that read the same keys."""
        self.most_shared = 4 * rows
        entries = (1 + len(SITE_KINDS) * n_layers) * SITE_ENTRIES
        shapes: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            ("positions", (rows,), torch.int64),
            ("slots", (rows,), torch.int64),
            ("lora_bases", (rows + SPARE_TILES,), torch.int64),
            ("lora_offsets", (MAX_LAYOUTS, entries), torch.int64),
            ("tiles", (rows, 4), torch.int32),
            ("lora_tiles", (rows + SPARE_TILES, 4), torch.int32),
            ("lora_scales", (rows + SPARE_TILES,), torch.float32),
            ("shared_by_row", (rows, 2), torch.int32),
            ("shared_tiles", (self.most_shared, 3), torch.int32),
            ("shared_rows", (self.most_shared, queries), torch.int32),
            ("pages", (most_pages,), torch.int32),
        ]
        total = sum(int(np.prod(shape)) * dtype.itemsize for _, shape, dtype in shapes)
        self._host = torch.zeros(total, dtype=torch.uint8).pin_memory()
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event()
        self._views: dict[str, tuple[NDArray, Tensor]] = {}
        offset = 0
        for name, shape, dtype in shapes:
            end = offset + int(np.prod(shape)) * dtype.itemsize
            host, own = (buffer[offset:end].view(dtype).view(shape) for buffer in (self._host, self._device))
            self._views[name] = (host.numpy(), own)
            offset = end
        self._pages_begin = total - most_pages * 4
        self.clear()

    def __getattr__(self, name: str) -> Tensor:
        return self._views[name][1]

    def clear(self) -> None:
        """A step without rows."""
        self._copied.synchronize()
        for name, (host, _) in self._views.items():
            host[...] = -1 if name in ("slots", "lora_offsets") else 0
        self._device.copy_(self._host)

    def fill(
        self, plan: StepPlan, tokens: Tensor, lora: TileArrays | None, shared: SharedArrays, page_size: int
    ) -> None:
        views, rows = {name: host for name, (host, _) in self._views.items()}, len(plan.decode)
        self.tokens[:rows].copy_(tokens)
        self._copied.synchronize()  # the host's side is still read while the step before is waited for
        views["positions"][:rows] = [s.computed for s in plan.decode]
        views["slots"][:rows] = write_slots(plan, page_size)
        views["slots"][rows:] = -1
        views["tiles"][:rows] = row_spans(plan)
        views["tiles"][rows:] = 0
        views["lora_tiles"][:, 1] = 0
        if lora is not None:
            n = len(lora.tiles)
            views["lora_tiles"][:n] = lora.tiles
            views["lora_scales"][:n] = lora.scales
            views["lora_bases"][:n] = addresses(lora.adapters, "compute")
            views["lora_offsets"][: len(lora.offsets), : lora.offsets.shape[1]] = lora.offsets
            views["lora_offsets"][: len(lora.offsets), lora.offsets.shape[1] :] = -1
        n = len(shared.tiles)
        views["shared_by_row"][:rows] = shared.by_row
        views["shared_by_row"][rows:] = 0
        views["shared_tiles"][:n] = shared.tiles
        views["shared_tiles"][n:, 1] = 0
        views["shared_rows"][:n] = shared.rows
        pages = page_numbers(plan)
        views["pages"][: len(pages)] = pages
        used = self._pages_begin + 4 * len(pages)
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        self._copied.record()


def _site_shapes(decoder: Decoder) -> dict[SiteName, SiteShape]:
    layout = Layout.of(decoder.spec, LoraConfig(rank=1))
    return {name: site_shape(name, site) for name, site in layout.sites.items()}


def _row_counts(most: int) -> list[int]:
    """Not below 32: cuBLASLt without split-K picks a slow kernel for long sums of fewer rows (219 us for 19)."""
    return sorted({*range(32, min(most, 256), 32), *range(256, most, 64), max(32, most)})


def _few_tiles(rows: int) -> int:
    return -(-rows // TILE_ROWS[0]) + SPARE_TILES
