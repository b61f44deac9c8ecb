"""Sampling steps as CUDA graphs: the launches of a whole forward pass are recorded once for each of a few row counts.

A step writes its inputs into fixed buffers, in one copy, and replays. Rows beyond those of the step do nothing: they
write to no page, see no key, advance no state and belong to no adapter's tile. Prefill chunks ride beside decoding rows
in graphs of their own; a step of more rows than the largest is computed without a graph, where launches are a small
part of it.
Owns: the graphs and their buffers. Never touches: which rows a step has, drawing tokens.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palestra.model.attention.kv_cache import KVCache, row_positions, write_slots
from palestra.model.attention.tiled import (
    DECODE_ROWS,
    PREFILL_ROWS,
    PagedTiles,
    SharedArrays,
    SharedResults,
    TiledPagedAttention,
    cut_spans,
    head_group,
    page_numbers,
    row_spans,
    shared_splits,
    tile_rows,
)
from palestra.model.decoder import Decoder
from palestra.model.kernels.attention import Tiles
from palestra.model.kernels.chunk_products import Spans
from palestra.model.kernels.lora import TILE_ROWS, ExpertTiles, LoraTiles, SiteShape
from palestra.model.loading.layer_spec import HeadShape
from palestra.model.lora.buckets import RowRun
from palestra.model.lora.layout import SITE_ENTRIES, SITE_KINDS, Layout, SiteName
from palestra.model.lora.linear import LoraPlan
from palestra.model.lora.tiles import TileArrays, addresses, site_shape
from palestra.model.mixers.kernel_recurrence import SpanArrays
from palestra.model.mlp.routing import Routing
from palestra.model.sampling.kernel_recurrence import SlottedKernelRecurrence, plan_spans
from palestra.model.sampling.recurrent_states import RecurrentStates
from palestra.model.sampling.sequences import StepPlan
from palestra.model.transfers import StagedBuffer
from palestra.types import LoraConfig

USUAL_RANK = 32
SPARE_TILES = 16  # tiles for adapters with few rows, beside those of a graph full of one; more: a tile for each row
PREFILL_SIZES = (64, 128, 256, 512, 1024)  # rows of steps with prefill; LoRA tiles of more are cut otherwise
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
    has_prefill: bool = False
    """Otherwise every row decodes."""
    have_own_matrices: bool = False
    """Experts of some adapters share none of theirs."""


class RecordedStep(Protocol):
    hidden: Tensor
    """What a replay writes."""

    def replay(self) -> None: ...


Recorder = Callable[[Callable[[], Tensor]], RecordedStep]
"""Makes something that can be replayed of a forward pass over fixed buffers."""


@dataclass(slots=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor
    forward: Callable[[], Tensor]
    """What was recorded. It holds the tensors that the graph writes to and that are not of the graph's own memory."""

    def replay(self) -> None:
        self.graph.replay()


class CudaRecorder:
    """Records CUDA graphs, which share their memory: they are replayed one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], Tensor]) -> RecordedStep:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward()  # compiles what is not compiled yet, which a graph cannot record
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = forward()
        return _CudaGraph(graph, hidden, forward)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Destroying another sampler's graphs or pinned memory while a graph is recorded would end the recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _StepArrays:
    """What a graph reads of a step, on the host."""

    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    decode: NDArray[np.int32]
    prefill: dict[int, NDArray[np.int32]]
    """Tiles of queries, each: see `Tiles`. Those of prefills by the number of heads in a tile."""
    lora: TileArrays | None
    shared: dict[int, SharedArrays]
    """By the number of heads in a tile, too."""
    pages: NDArray[np.int32]
    recurrence: SpanArrays | None

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        runs: Seq[RowRun],
        groups: Iterable[int],
        page_size: int,
        *,
        has_states: bool,
        positions: NDArray[np.int64] | None = None,
    ) -> _StepArrays:
        spans, decoding = row_spans(plan), len(plan.decode)
        return cls(
            row_positions(plan) if positions is None else positions,
            write_slots(plan, page_size),
            spans[:decoding],
            {group: cut_spans(spans[decoding:], group, PREFILL_ROWS) for group in groups},
            TileArrays.of(runs, TILE_ROWS[0]) if runs else None,
            {group: SharedArrays.of(plan, group, page_size) for group in groups},
            page_numbers(plan),
            plan_spans(plan) if has_states else None,
        )


class StepGraphs:
    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        states: RecurrentStates | None,
        max_rows: int,
        recorder: Recorder | None = None,
    ):
        self.decoder, self.cache, self.states = decoder, cache, states
        self.row_counts = _row_counts(max_rows, with_experts=bool(decoder.spec.experts))
        self._sites = _site_shapes(decoder)
        self._shapes = {shape: head_group(shape, decoder.spec.key_tail) for shape in decoder.spec.heads}
        """The heads of layers, and how many of them are in a tile."""
        self._queries = {group: tile_rows(PREFILL_ROWS, group) // group for group in self._shapes.values()}
        most_pages = max_rows * -(-decoder.spec.max_positions // cache.page_size)
        most_rows = max(self.row_counts[-1], PREFILL_SIZES[-1])
        self._inputs = _Inputs(most_rows, most_pages, self._queries, decoder.spec.n_layers, cache.device)
        self._recorder: Recorder = recorder or CudaRecorder()
        self._recorded: dict[GraphKey, RecordedStep] = {}
        self._results: dict[tuple[int, HeadShape], SharedResults] = {}
        """By the number of tiles that share keys."""
        self._routes = _route_buffer(decoder, most_rows)

    def run(
        self, plan: StepPlan, tokens: Tensor, runs: Seq[RowRun], positions: NDArray[np.int64] | None = None
    ) -> Tensor | None:
        """Hidden states of the plan's rows, valid until the next call; None when no graph can hold the step.
        `runs`: the rows that have adapters. `positions`: of the rows for rope, where these are not their places."""
        has_states = self.states is not None
        step = _StepArrays.of(
            plan, runs, self._queries, self.cache.page_size, has_states=has_states, positions=positions
        )
        key = self._key(step, len(tokens))
        if key is None:
            return None
        try:
            self.record(key)
        except torch.OutOfMemoryError:
            return None
        self._inputs.fill(step, tokens)
        recorded = self._recorded[key]
        recorded.replay()
        return recorded.hidden[: len(tokens)]

    def routes(self, rows: int) -> Tensor | None:
        """Returns the experts that the rows of the last step visited, [rows, layers with experts, experts per
        token]."""
        return None if self._routes is None else self._routes[:rows]

    def _key(self, step: _StepArrays, rows: int) -> GraphKey | None:
        """The smallest graph that holds the step."""
        has_prefill = rows > len(step.decode)
        sizes = PREFILL_SIZES if has_prefill else self.row_counts
        if rows > sizes[-1] or len(step.pages) > self._inputs.most_pages:
            return None
        size = sizes[bisect_left(sizes, rows)]
        n_shared = max(len(shared.tiles) for shared in step.shared.values())
        shared_tiles = 1 << max(n_shared - 1, 15).bit_length() if n_shared else 0
        if shared_tiles > self._inputs.most_shared:
            return None
        if any(len(tiles) > self._prefill_tiles(size, group) for group, tiles in step.prefill.items()):
            return None
        if step.recurrence and len(step.recurrence.table) > self._spans(size):
            return None
        if step.lora is None:
            return GraphKey(size, shared_tiles=shared_tiles, has_prefill=has_prefill)
        if len(step.lora.layouts) > MAX_LAYOUTS:
            return None
        few = _few_tiles(size)
        rank = max(layout.rank for layout in step.lora.layouts)
        tiles = few if len(step.lora.tiles) <= few else size
        rank = 1 << (rank - 1).bit_length()
        return GraphKey(size, tiles, rank, shared_tiles, has_prefill, step.lora.have_own_matrices)

    @property
    def usual_keys(self) -> list[GraphKey]:
        """Graphs of the base model and of adapters of a common rank; the largest first, since others fit into its
        memory."""
        sizes = [*((n, True) for n in PREFILL_SIZES), *((n, False) for n in self.row_counts)]
        return [
            GraphKey(n, lora_tiles, rank, has_prefill=has_prefill)
            for n, has_prefill in sorted(sizes, reverse=True)
            for lora_tiles, rank in ((0, 0), (_few_tiles(n), USUAL_RANK))
        ]

    def _prefill_tiles(self, rows: int, group: int) -> int:
        """Enough for a graph full of chunks that end within a tile."""
        return 2 * -(-rows // self._queries[group]) + SPARE_TILES

    def _spans(self, rows: int) -> int:
        """Returns the spans of recurrences: one for each sequence."""
        return min(rows, self.row_counts[-1] + SPARE_TILES)

    def record(self, key: GraphKey) -> None:
        if key not in self._recorded:
            self._inputs.clear()
            self._recorded[key] = self._recorder(self._forward(key))

    def _forward(self, key: GraphKey) -> Callable[[], Tensor]:
        inputs, rows = self._inputs, key.rows
        tiles = {shape: self._tiles(key, shape) for shape in self._shapes}
        attention = TiledPagedAttention(self.cache, inputs.slots[:rows], inputs.pages, tiles)
        plan = LoraPlan()
        if key.tiles:
            n = key.tiles
            lora_tiles = LoraTiles(
                *(inputs.lora_tiles[:n], inputs.lora_scales[:n], inputs.lora_bases[:n], inputs.lora_offsets),
                inputs.owners[:rows],
                tile_rows=TILE_ROWS[0],
                max_rank=key.max_rank,
            )
            plan = LoraPlan(_GraphLora(lora_tiles, self._sites, key.have_own_matrices))
        recur = None if self.states is None else self._recurrence(self.states, key)
        tokens, positions, routes = inputs.tokens[:rows], inputs.positions[:rows], self._routes

        def forward() -> Tensor:
            if routes is None:
                return self.decoder(tokens, positions, attention, plan, recur)
            routing = Routing(slots=inputs.slots[:rows])
            hidden = self.decoder(tokens, positions, attention, plan, recur, routing=routing)
            routes[:rows].copy_(routing.by_row)
            return hidden

        return forward

    def _tiles(self, key: GraphKey, shape: HeadShape) -> PagedTiles:
        inputs, group, shared = self._inputs, self._shapes[shape], None
        if n := key.shared_tiles:
            arrays = [inputs.of(group, f"shared_{name}") for name in ("tiles", "rows", "by_row")]
            if (n, shape) not in self._results:  # graphs are replayed one after another: they share the room
                tail = self.decoder.spec.key_tail
                self._results[n, shape] = SharedResults.of(n, shape, tail, self.cache.device)
            shared = shared_splits(arrays[0][:n], arrays[1][:n], arrays[2][: key.rows], group, self._results[n, shape])
        tiles = [Tiles(inputs.tiles[: key.rows], tile_rows(DECODE_ROWS, group))]
        if key.has_prefill:
            table = inputs.of(group, "prefill_tiles")[: self._prefill_tiles(key.rows, group)]
            tiles.append(Tiles(table, tile_rows(PREFILL_ROWS, group)))
        return PagedTiles(shape.n_heads // group, tiles, shared)

    def _recurrence(self, states: RecurrentStates, key: GraphKey) -> SlottedKernelRecurrence:
        inputs, rows = self._inputs, key.rows
        spans = Spans(inputs.recurrent_spans[: self._spans(rows)])
        return SlottedKernelRecurrence(states, inputs.recurrent_rows[:rows], spans, not key.has_prefill)


class _GraphLora:
    """`LoraProducts` of a recorded step: tiles are read from buffers, and sites are all that an adapter may have."""

    def __init__(self, tiles: LoraTiles, sites: dict[SiteName, SiteShape], have_own_matrices: bool):
        self.tiles, self.sites, self.have_own_matrices = tiles, sites, have_own_matrices

    def apply(self, y: Tensor, x: Tensor, name: SiteName) -> None:
        if name in self.sites:
            self.tiles.apply(y, x, self.sites[name])

    def at_experts(self, layer: int) -> ExpertTiles:
        gate_up, down = self.sites[layer, "gate_up"], self.sites[layer, "down"]
        return ExpertTiles(self.tiles, gate_up, down, self.have_own_matrices)

    def inner(self, x: Tensor, name: SiteName) -> list[Tensor]:
        raise NotImplementedError("a recorded step has no backward pass")

    def add(self, y: Tensor, inner: Seq[Tensor], name: SiteName) -> None:
        raise NotImplementedError("a recorded step has no backward pass")

    def backward(self, dy: Tensor, x: Tensor, inner: Seq[Tensor], dx: Tensor | None, name: SiteName) -> None:
        raise NotImplementedError("a recorded step has no backward pass")


class _Inputs:
    """Buffers that the graphs read. One copy brings a step's inputs to the device: what is always used comes first."""

    def __init__(self, rows: int, most_pages: int, queries: dict[int, int], n_layers: int, device: torch.device):
        """`queries`: of a tile of rows that read the same keys, by its heads of each."""
        self.most_shared, self.most_pages = 4 * rows, most_pages
        entries = (1 + len(SITE_KINDS) * n_layers) * SITE_ENTRIES
        shapes: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            ("positions", (rows,), torch.int64),
            ("slots", (rows,), torch.int64),
            ("lora_bases", (rows + SPARE_TILES,), torch.int64),
            ("lora_offsets", (MAX_LAYOUTS, entries), torch.int64),
            ("tiles", (rows, 4), torch.int32),
            ("lora_tiles", (rows + SPARE_TILES, 4), torch.int32),
            ("lora_scales", (rows + SPARE_TILES,), torch.float32),
            ("owners", (rows,), torch.int32),
            ("recurrent_rows", (rows, 3), torch.int32),
            ("recurrent_spans", (rows, 4), torch.int32),
        ]
        for group, n in queries.items():
            shapes += [
                (_of(group, "prefill_tiles"), (2 * rows + SPARE_TILES, 4), torch.int32),
                (_of(group, "shared_by_row"), (rows, 2), torch.int32),
                (_of(group, "shared_tiles"), (self.most_shared, 3), torch.int32),
                (_of(group, "shared_rows"), (self.most_shared, n), torch.int32),
            ]
        shapes.append(("pages", (most_pages,), torch.int32))
        total = sum(int(np.prod(shape)) * dtype.itemsize for _, shape, dtype in shapes)
        self._buffer = StagedBuffer(total, device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._views: dict[str, tuple[NDArray, Tensor]] = {}
        offset = 0
        for name, shape, dtype in shapes:
            end = offset + int(np.prod(shape)) * dtype.itemsize
            host, own = (
                buffer[offset:end].view(dtype).view(shape) for buffer in (self._buffer.host, self._buffer.device)
            )
            self._views[name] = (host.numpy(), own)
            offset = end
        self._pages_begin = total - most_pages * 4
        self.clear()

    def __getattr__(self, name: str) -> Tensor:
        return self._views[name][1]

    def of(self, group: int, name: str) -> Tensor:
        """Returns the settings that depend on the heads in a tile."""
        return self._views[_of(group, name)][1]

    def clear(self) -> None:
        """A step without rows."""
        self._buffer.wait()
        for name, (host, _) in self._views.items():
            host[...] = -1 if name in ("slots", "lora_offsets", "owners", "recurrent_rows") else 0
        self._buffer.send()

    def fill(self, step: _StepArrays, tokens: Tensor) -> None:
        views = {name: host for name, (host, _) in self._views.items()}
        rows, decoding = len(tokens), len(step.decode)
        self.tokens[:rows].copy_(tokens)
        self._buffer.wait()
        views["positions"][:rows] = step.positions
        views["slots"][:rows] = step.slots
        views["slots"][rows:] = -1
        views["tiles"][:decoding] = step.decode
        views["tiles"][decoding:] = 0
        views["lora_tiles"][:, 1] = 0
        views["owners"][:] = -1
        if lora := step.lora:
            n = len(lora.tiles)
            views["lora_tiles"][:n] = lora.tiles
            views["owners"][: len(lora.owners)] = lora.owners
            views["lora_scales"][:n] = lora.scales
            views["lora_bases"][:n] = addresses(lora.adapters, "compute")
            views["lora_offsets"][: len(lora.offsets), : lora.offsets.shape[1]] = lora.offsets
            views["lora_offsets"][: len(lora.offsets), lora.offsets.shape[1] :] = -1
        if spans := step.recurrence:
            views["recurrent_rows"][:rows] = spans.rows
            views["recurrent_rows"][rows:, 0] = -1
            views["recurrent_spans"][: len(spans.table)] = spans.table
            views["recurrent_spans"][len(spans.table) :, 1] = 0
        for group, shared in step.shared.items():
            by_row, tiles, rows_of = (views[_of(group, f"shared_{name}")] for name in ("by_row", "tiles", "rows"))
            prefill, n = views[_of(group, "prefill_tiles")], len(shared.tiles)
            prefill[: len(step.prefill[group])] = step.prefill[group]
            prefill[len(step.prefill[group]) :] = 0
            by_row[:decoding] = shared.by_row
            by_row[decoding:] = 0
            tiles[:n] = shared.tiles
            tiles[n:, 1] = 0
            rows_of[:n] = shared.rows
        views["pages"][: len(step.pages)] = step.pages
        self._buffer.send(self._pages_begin + 4 * len(step.pages))


def _of(group: int, name: str) -> str:
    return f"{name} of {group}"


def _site_shapes(decoder: Decoder) -> dict[SiteName, SiteShape]:
    layout = Layout.of(decoder.spec, LoraConfig(rank=1))
    return {name: site_shape(name, site) for name, site in layout.sites.items()}


def _route_buffer(decoder: Decoder, rows: int) -> Tensor | None:
    experts = list(decoder.spec.experts.values())
    if not experts:
        return None
    return torch.zeros(rows, len(experts), experts[0].per_token, dtype=torch.int16, device=decoder.device)


def _row_counts(most: int, *, with_experts: bool) -> list[int]:
    """Not below 32: cuBLASLt without split-K picks a slow kernel for long sums of fewer rows (219 us for 19). Nor below
    64 where a model has experts, whose other products are narrow: 97 us for 14 at Qwen3-30B-A3B's attention output."""
    fewest = 64 if with_experts else 32
    return sorted({*range(fewest, min(most, 256), 32), *range(256, most, 64), max(fewest, most)})


def _few_tiles(rows: int) -> int:
    return -(-rows // TILE_ROWS[0]) + SPARE_TILES
