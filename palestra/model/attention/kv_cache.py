"""Keys and values in pages, and attention over them.

A page holds `page_size` positions of one sequence, or of many that share the prefix. Decoding rows that share a
prefix (the samples of one prompt) read it once, as one product for the whole group; what is their own is read per
row. Rows are gathered into blocks of similar shape, so a step is a handful of batched products whatever the mix.

A layer that reads the keys of another one calls attention without keys; a new kind of heads gets a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from palestra.model.attention.packed import PackedAttention, attend_with_sinks, seen_keys, softmax_with_sinks
from palestra.model.loading.spec import ModelSpec
from palestra.model.sampling.sequences import Sequence, SequenceChunk, StepPlan
from palestra.model.transfers import to_device

SHARED_TOKENS = 256  # a prefix is worth its own product when sharing saves reading this many positions
BLOCK_WASTE = 1.4  # a block may read this many positions per real one, before a second block is cheaper


class KVCache:
    """For each layer that has keys and values, [kv heads * pages, page_size, head_dim]: a gather of pages is a gather
    of rows, at memcpy speed. Keys and values have one each, unless values are keys (latent attention). Layers that read
    another one's are found under their own number."""

    def __init__(self, spec: ModelSpec, n_pages: int, page_size: int, *, dtype: torch.dtype, device: torch.device):
        self.spec, self.n_pages, self.page_size = spec, n_pages, page_size
        self.dtype, self.device = dtype, device
        self._layers: dict[int, Tensor] = {}
        self._stacks: list[tuple[int, Tensor]] = []
        """The same by heads: how many kv heads, and all layers that have these."""
        for heads in dict.fromkeys(spec.heads[n] for n in spec.attention_layers):
            layers = [n for n in spec.attention_layers if spec.heads[n] == heads]
            shape = (len(layers), spec.kv_sides, heads.n_kv_heads * n_pages, page_size, heads.head_dim)
            pages = torch.empty(shape, dtype=dtype, device=device)
            self._layers.update(zip(layers, pages, strict=True))
            self._stacks.append((heads.n_kv_heads, pages))
        self._layers.update({n: self._layers[source] for n, source in spec.kv_sources.items()})
        self._by_page = {n: [side.flatten(1) for side in layer] for n, layer in self._layers.items()}
        self._by_slot = {n: [side.flatten(0, 1) for side in layer] for n, layer in self._layers.items()}

    def by_head(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values as [kv heads, positions, head_dim]; of compressed rows, values are the first part."""
        shape = self.spec.heads[layer]
        sides = self._layers[layer].view(self.spec.kv_sides, shape.n_kv_heads, -1, shape.head_dim)
        return sides[0], sides[-1][..., : shape.head_dim - self.spec.key_tail]

    def rows_of(self, pages: NDArray, kv_heads: int) -> Tensor:
        """Row numbers of these pages for every kv head: [kv heads * pages]."""
        return to_device((self._first_pages(kv_heads) + pages.reshape(-1)).ravel(), self.device)

    def slots_of(self, slots: NDArray, kv_heads: int) -> Tensor:
        """The same for single positions: [kv heads * slots]."""
        return to_device((self._first_pages(kv_heads) * self.page_size + slots).ravel(), self.device)

    def _first_pages(self, kv_heads: int) -> NDArray:
        """Returns where the pages of each kv head begin."""
        return (np.arange(kv_heads) * self.n_pages)[:, None]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for kept, x in zip(self._by_slot[layer], (k, v)[: self.spec.kv_sides], strict=True):
            kept.index_copy_(0, slots, x.transpose(0, 1).flatten(0, 1))

    def read(self, layer: int, rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Keys and values of gathered pages, as [n, positions, head_dim]."""
        dim = self.spec.heads[layer].head_dim
        sides = [side.index_select(0, rows).view(n, -1, dim) for side in self._by_page[layer]]
        return sides[0], sides[-1]

    def clear(self, pages: NDArray) -> None:
        """Zeroes pages that get a new owner. What was there (NaN, if a tenant's weights were ruined) would reach
        the new one through masked positions: their weight is 0, but 0 times NaN is NaN."""
        if len(pages):
            for kv_heads, stack in self._stacks:
                stack.index_fill_(2, self.rows_of(pages, kv_heads), 0.0)

    def copy(self, copies: Seq[tuple[int, int]]) -> None:
        if not copies:
            return
        for kv_heads, stack in self._stacks:
            source, target = (self.rows_of(np.array(side), kv_heads) for side in zip(*copies, strict=True))
            stack.index_copy_(2, target, stack.index_select(2, source))


@dataclass(slots=True)
class _Block:
    """Decoding rows computed together: `groups` of `members` rows, each group with one shared prefix."""

    rows: Tensor | slice
    """Rows of the step, [groups * members]; groups short of members repeat a row."""
    keep: Tensor | None
    """Which of those are real (None: all)."""
    groups: int
    members: int
    prefix: Tensor | None
    """Cache rows of the shared pages, [kv heads * groups * pages]."""
    prefix_bias: Tensor | None
    """[groups, 1, prefix positions]: -inf past a shorter group's prefix (None: all of equal length)."""
    own: Tensor
    """Cache rows of each row's own pages, [kv heads * groups * members * pages]."""
    own_bias: Tensor
    """[groups * members, 1, own positions]: -inf where nothing may be seen."""


class PagedAttention:
    """Attention for one step of the scheduler's plan: rows are `decode` first, then `prefill`."""

    def __init__(self, cache: KVCache, plan: StepPlan):
        self.cache, self.spec = cache, cache.spec
        self.device = cache.device
        self.n_decode = len(plan.decode)
        slots = write_slots(plan, cache.page_size)
        self.kv_heads = [shape.n_kv_heads for shape in self.spec.heads]
        self.slots = {n: cache.slots_of(slots, n) for n in dict.fromkeys(self.kv_heads)}
        cache.clear(slots[slots % cache.page_size == 0] // cache.page_size)
        self.blocks: dict[tuple[int | None, int], list[_Block]] = {}
        """By the window, and the number of kv heads."""
        self._decoding = plan.decode
        for kind in dict.fromkeys(zip(self.spec.windows, self.kv_heads, strict=True)):
            self.blocks[kind] = self._decode_blocks(*kind) if plan.decode else []
        self._plan_prefill(plan.prefill)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        if k is not None and v is not None:
            self.cache.write(layer, self.slots[self.kv_heads[layer]], k, v)
        blocks = self.blocks[self.spec.windows[layer], self.kv_heads[layer]]
        if len(blocks) == 1 and blocks[0].keep is None and blocks[0].rows == slice(0, len(q)):
            return self._decode(layer, blocks[0], q, sinks)
        out = torch.empty(len(q), self.spec.heads[layer].q_size, dtype=q.dtype, device=q.device)
        for block in blocks:
            mixed, rows = self._decode(layer, block, q[block.rows], sinks), block.rows
            if block.keep is not None:
                assert isinstance(rows, Tensor)
                mixed, rows = mixed[block.keep], rows[block.keep]
            out[rows] = mixed
        if self.fresh is not None:
            q_fresh, k_fresh, v_fresh = (None if x is None else x[self.fresh_rows] for x in (q, k, v))
            assert q_fresh is not None
            out[self.fresh_rows] = self.fresh(layer, q_fresh, k_fresh, v_fresh, sinks)
        for first, chunk, pages in self.continued:
            rows = slice(first, first + chunk.end - chunk.start)
            out[rows] = self._continue(layer, chunk, pages[self.kv_heads[layer]], q[rows], sinks)
        return out

    # Decoding

    def _decode(self, layer: int, block: _Block, q: Tensor, sinks: Tensor | None) -> Tensor:
        """Attends for the rows of a block, [rows, heads * dim]."""
        shape = self.spec.heads[layer]
        softmax = (
            _softmax if sinks is None else partial(softmax_with_sinks, sinks=sinks.view(shape.n_kv_heads, 1, -1, 1))
        )
        heads, n, dim = shape.n_kv_heads, block.groups * block.members, shape.head_dim
        share = shape.n_heads // heads
        grouped = q.view(n, heads, share, dim).transpose(0, 1) * dim**-0.5
        k, v = self.cache.read(layer, block.own, heads * n)
        scores = torch.bmm(grouped.reshape(heads * n, share, dim), k.mT).unflatten(0, (heads, n)) + block.own_bias
        if block.prefix is None:
            mixed = torch.bmm(softmax(scores).flatten(0, 1), v)
        else:
            shared_k, shared_v = self.cache.read(layer, block.prefix, heads * block.groups)
            queries = grouped.reshape(heads * block.groups, block.members * share, dim)
            shared = torch.bmm(queries, shared_k.mT)
            if block.prefix_bias is not None:
                shared.unflatten(0, (heads, block.groups)).add_(block.prefix_bias)
            split = shared.shape[-1]
            weights = softmax(torch.cat([shared.view(heads, n, share, split), scores], -1))
            mixed = torch.bmm(weights[..., split:].flatten(0, 1), v)
            per_group = weights[..., :split].reshape(heads * block.groups, block.members * share, split)
            mixed = mixed + torch.bmm(per_group, shared_v).view(heads * n, share, dim)
        return mixed.view(heads, n, share * dim).transpose(0, 1).flatten(1)

    def _decode_blocks(self, window: int | None, kv_heads: int) -> list[_Block]:
        seqs, size = self._decoding, self.cache.page_size
        groups = [_Group([r], 0, _own_pages(seqs[r], 0)) for r in range(len(seqs))]
        if window is None:
            groups = _shared_groups(seqs, size)
        return [self._block(merged, window, kv_heads) for merged in _similar(groups)]

    def _block(self, groups: list[_Group], window: int | None, kv_heads: int) -> _Block:
        seqs, size = self._decoding, self.cache.page_size
        members = max(len(g.rows) for g in groups)
        prefix_pages = max(g.prefix for g in groups)
        own_pages = max(g.own for g in groups)
        padded = [g.rows + g.rows[:1] * (members - len(g.rows)) for g in groups]
        rows = [r for p in padded for r in p]
        offsets = np.repeat([g.prefix for g in groups], members)
        own = np.zeros((len(rows), own_pages), np.int64)
        for i, (r, offset) in enumerate(zip(rows, offsets.tolist(), strict=True)):
            pages = seqs[r].pages[offset:]
            own[i, : len(pages)] = pages
            own[i, len(pages) :] = pages[-1]  # padding reads what is its own: another's NaN would come through the mask
        positions = np.array([seqs[r].computed for r in rows])
        key = offsets[:, None] * size + np.arange(own_pages * size)
        hidden = key > positions[:, None]
        if window is not None:
            hidden |= key <= positions[:, None] - window
        block = _Block(
            rows=slice(rows[0], rows[-1] + 1) if rows == list(range(rows[0], rows[0] + len(rows))) else self._to(rows),
            keep=None,
            groups=len(groups),
            members=members,
            prefix=None,
            prefix_bias=None,
            own=self.cache.rows_of(own, kv_heads),
            own_bias=self._bias(hidden),
        )
        if any(len(g.rows) < members for g in groups):
            real = [i * members + j for i, g in enumerate(groups) for j in range(len(g.rows))]
            block.keep = self._to(real)
        if prefix_pages:
            shared = np.zeros((len(groups), prefix_pages), np.int64)
            for i, g in enumerate(groups):
                pages = seqs[g.rows[0]].pages[: g.prefix]
                shared[i, : g.prefix] = pages
                shared[i, g.prefix :] = pages[-1]
            block.prefix = self.cache.rows_of(shared, kv_heads)
            lengths = np.array([g.prefix for g in groups])[:, None] * size
            if (lengths != prefix_pages * size).any():
                block.prefix_bias = self._bias(np.arange(prefix_pages * size) >= lengths)
        return block

    def _bias(self, hidden: NDArray) -> Tensor:
        bias = np.where(hidden, -np.inf, 0.0).astype(np.float32)[:, None]
        return torch.from_numpy(bias).to(self.device, self.cache.dtype)

    def _to(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, device=self.device)

    # Prefill

    def _plan_prefill(self, chunks: list[SequenceChunk]) -> None:
        """Chunks that begin a sequence attend within the step; the others also read their pages."""
        self.fresh: PackedAttention | None = None
        self.continued: list[tuple[int, SequenceChunk, dict[int, Tensor]]] = []
        """First row, chunk, and cache rows of its pages by the number of kv heads."""
        fresh: list[tuple[int, int]] = []
        first = self.n_decode
        for chunk in chunks:
            length = chunk.end - chunk.start
            if chunk.start == 0:
                fresh.append((first, length))
            else:
                n = -(-chunk.end // self.cache.page_size)
                pages = np.array(chunk.seq.pages[:n])
                rows = {heads: self.cache.rows_of(pages, heads) for heads in dict.fromkeys(self.kv_heads)}
                self.continued.append((first, chunk, rows))
            first += length
        if fresh:
            lengths = [n for _, n in fresh]
            parts = [ahead_of(chunk) for chunk in chunks if chunk.start == 0]
            ahead = np.concatenate(parts) if any(part.any() for part in parts) else None
            self.fresh = PackedAttention(lengths, self.spec.windows, self.device, self.spec.kv_sources, ahead=ahead)
            rows = np.concatenate([np.arange(start, start + n) for start, n in fresh])
            adjacent = rows[-1] - rows[0] + 1 == len(rows)
            self.fresh_rows = (
                slice(int(rows[0]), int(rows[-1]) + 1) if adjacent else torch.from_numpy(rows).to(self.device)
            )

    def _continue(self, layer: int, chunk: SequenceChunk, pages: Tensor, q: Tensor, sinks: Tensor | None) -> Tensor:
        k, v = (x[None, :, : chunk.end] for x in self.cache.read(layer, pages, self.kv_heads[layer]))
        window = self.spec.windows[layer]
        ahead = None if window is None else ahead_of(chunk)
        seen = seen_keys(chunk.start, chunk.end, window, ahead, q.device)
        heads = q.transpose(0, 1)[None]
        if sinks is None:
            out = scaled_dot_product_attention(heads, k, v, attn_mask=seen, enable_gqa=True)
        else:
            out = attend_with_sinks(heads, k, v, seen, sinks)
        return out[0].transpose(0, 1).flatten(1)


@dataclass(slots=True)
class _Group:
    rows: list[int]
    prefix: int
    """Pages all its rows share."""
    own: int
    """Most pages any of its rows has beyond those."""

    @property
    def cost(self) -> int:
        return self.prefix + self.own * len(self.rows)


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1, dtype=torch.float32).to(scores.dtype)


def _own_pages(seq: Sequence, prefix: int) -> int:
    return len(seq.pages) - prefix


def _shared_groups(seqs: list[Sequence], page_size: int) -> list[_Group]:
    """Rows grouped by the prefix they read once. Prefixes nest (a system prompt, then each prompt of its own), and
    a row has one group: at each fork, reading together or in the branches, whichever reads less."""

    def split(rows: list[int]) -> list[_Group]:
        if len(rows) == 1:
            return [_Group(rows, 0, _own_pages(seqs[rows[0]], 0))]
        shared = _common_prefix([seqs[r].pages for r in rows])
        branches: dict[int, list[int]] = {}
        for r in rows:  # every row has a page beyond: the one it writes is its own
            branches.setdefault(seqs[r].pages[shared], []).append(r)
        apart = [group for branch in branches.values() for group in split(branch)]
        together = _Group(rows, shared, max(_own_pages(seqs[r], shared) for r in rows))
        saved = (sum(g.cost for g in apart) - together.cost) * page_size
        return [together] if shared and saved >= SHARED_TOKENS else apart

    by_first: dict[int, list[int]] = {}
    for r, seq in enumerate(seqs):
        by_first.setdefault(seq.pages[0], []).append(r)
    return [group for rows in by_first.values() for group in split(rows)]


def _common_prefix(lists: list[list[int]]) -> int:
    """Returns how many first pages all have in common: all lists between the smallest and the largest share what these
    do."""
    first, last = min(lists), max(lists)
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def _similar(groups: list[_Group]) -> list[list[_Group]]:
    """Groups of like shape together, as long as padding them to one shape wastes little."""
    merged: list[list[_Group]] = []
    real, members, prefix, own = 0, 0, 0, 0
    for group in sorted(groups, key=lambda g: (g.prefix > 0, len(g.rows), g.prefix, g.own, g.rows[0])):
        if merged and (group.prefix > 0) == (prefix > 0):
            members, prefix, own = max(members, len(group.rows)), max(prefix, group.prefix), max(own, group.own)
            padded = (len(merged[-1]) + 1) * (prefix + own * members)
            if padded <= BLOCK_WASTE * (real + group.cost):
                merged[-1].append(group)
                real += group.cost
                continue
        merged.append([group])
        real, members, prefix, own = group.cost, len(group.rows), group.prefix, group.own
    return [sorted(m, key=lambda g: g.rows[0]) for m in merged]


def row_positions(plan: StepPlan) -> NDArray[np.int64]:
    """The position of each row of the step in its sequence."""
    decode = np.array([s.computed for s in plan.decode], np.int64)
    return np.concatenate([decode, *(np.arange(chunk.start, chunk.end) for chunk in plan.prefill)])


def write_slots(plan: StepPlan, page_size: int) -> NDArray:
    """The slot that each row of the step writes: page * page_size + offset."""
    decode = [s.pages[s.computed // page_size] * page_size + s.computed % page_size for s in plan.decode]
    parts = [np.array(decode, np.int64)]
    for chunk in plan.prefill:
        positions = np.arange(chunk.start, chunk.end)
        pages = np.array(chunk.seq.pages, np.int64)
        parts.append(pages[positions // page_size] * page_size + positions % page_size)
    return np.concatenate(parts)


def ahead_of(chunk: SequenceChunk) -> NDArray[np.int64]:
    """How many rows behind itself each row of a chunk sees, in layers with a window."""
    if chunk.seq.pictures is None:
        return np.zeros(chunk.end - chunk.start, np.int64)
    return chunk.seq.pictures.ahead(chunk.start, chunk.end)
