"""Causal attention over packed sequences: what training and fresh prompts use.

On a GPU in half precision kernels of our own do it (`attention/tiled`). Elsewhere sequences of similar length are
computed together, right-padded: with a causal mask no real position sees the padding, so no mask tensor is needed.
Sequences that share rows (`Branches`) are computed as one, with a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from palestra.model.attention.branches import Branches

PADDING_AREA = 128 * 128  # score cells a group may waste: about what launching one more group costs


class Attention(Protocol):
    """What the decoder calls in each layer. q: [tokens, heads, dim], k and v: [tokens, kv heads, dim], or None where a
    layer reads those of an earlier one (`ModelSpec.kv_sources`); sinks, where the model has some: [heads], see
    `attend_with_sinks`."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Group:
    n: int
    length: int
    start: int
    index: Tensor | None
    """[n * length] rows, when the group is not simply the rows from `start` on."""
    is_masked: bool = False
    """One tree, or a sequence with rows that see later ones: who sees whom is not a matter of the order alone."""

    def take(self, x: Tensor) -> Tensor:
        rows = (
            x[self.start : self.start + self.n * self.length] if self.index is None else x.index_select(0, self.index)
        )
        return rows.unflatten(0, (self.n, self.length)).transpose(1, 2)


class PackedAttention:
    def __init__(
        self,
        lengths: Sequence[int],
        windows: Sequence[int | None],
        device: torch.device | str = "cpu",
        sources: Mapping[int, int] | None = None,
        branches: Branches | None = None,
        ahead: NDArray[np.int64] | None = None,
    ):
        """`sources`: layers that read the keys and values of another one, and which that is. `branches`: sequences that
        share rows; `lengths` are the rows of each tree then. `ahead`: how many rows behind itself each row sees in
        layers with a window."""
        self.windows, self.sources, self._branches, self._ahead = windows, sources or {}, branches, ahead
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of layers that others read."""
        self.groups: list[_Group] = []
        self.restore: Tensor | None = None
        """Where each packed row stands in the groups' outputs laid end to end (None: in place already)."""
        self._plan(list(lengths), device)
        self._bands: dict[tuple[int, int], Tensor] = {}
        self._seen: dict[tuple[int, int | None], Tensor] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        if k is None or v is None:
            k, v = self._kept[self.sources[layer]]
        elif layer in self.sources.values():
            self._kept[layer] = (k, v)
        outputs = [self._attend(g, self.windows[layer], q, k, v, sinks) for g in self.groups]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if self.restore is None else out.index_select(0, self.restore)

    def _attend(
        self, group: _Group, window: int | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        taken = (group.take(q), group.take(k), group.take(v))
        if group.is_masked:
            seen = self._seen_by(group, window, q.device)
            if sinks is not None:
                out = attend_with_sinks(*taken, seen, sinks)
            else:
                out = scaled_dot_product_attention(*taken, attn_mask=seen, enable_gqa=True)
        elif sinks is not None:
            out = attend_with_sinks(*taken, self._band(group.length, window or group.length, q.device), sinks)
        else:
            band = self._band(group.length, window, q.device) if window is not None and window < group.length else None
            out = scaled_dot_product_attention(*taken, attn_mask=band, is_causal=band is None, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)

    def _band(self, length: int, window: int, device: torch.device) -> Tensor:
        key = (length, window)
        if key not in self._bands:
            position = torch.arange(length, device=device)
            back = position[:, None] - position
            self._bands[key] = (back >= 0) & (back < window)
        return self._bands[key]

    def _seen_by(self, group: _Group, window: int | None, device: torch.device) -> Tensor:
        key = (group.start, window)
        if key not in self._seen:
            self._seen[key] = self._mask(group.start, group.start + group.length, window, device)
        return self._seen[key]

    def _mask(self, start: int, stop: int, window: int | None, device: torch.device) -> Tensor:
        ahead = None if self._ahead is None or window is None else self._ahead[start:stop]
        if self._branches is not None:
            return torch.from_numpy(self._branches.seen(start, stop, window, ahead)).to(device)
        return seen_keys(0, stop - start, window, ahead, device)

    def _plan(self, lengths: list[int], device: torch.device | str) -> None:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        position, offset = [0] * len(lengths), 0
        masked = [m for m, n in enumerate(lengths) if self._is_masked(starts[m], starts[m] + n)]
        for m in masked:
            self.groups.append(_Group(1, lengths[m], starts[m], None, is_masked=True))
            position[m], offset = offset, offset + lengths[m]
        for members in _similar(lengths, without=masked):
            longest = lengths[members[-1]]
            members.sort()
            plain = all(
                lengths[m] == longest and starts[m] == starts[members[0]] + i * longest for i, m in enumerate(members)
            )
            index = None if plain else _padded_rows([(starts[m], lengths[m]) for m in members], longest).to(device)
            self.groups.append(_Group(len(members), longest, starts[members[0]], index))
            for i, m in enumerate(members):
                position[m] = offset + i * longest
            offset += len(members) * longest
        if position != starts[:-1] or offset != starts[-1]:
            rows = [torch.arange(p, p + n) for p, n in zip(position, lengths, strict=True)]
            self.restore = torch.cat(rows).to(device)

    def _is_masked(self, start: int, stop: int) -> bool:
        if self._ahead is not None and self._ahead[start:stop].any():
            return True
        return self._branches is not None and bool((self._branches.ends[start:stop] != stop).any())


def seen_keys(
    start: int, end: int, window: int | None, ahead: NDArray[np.int64] | None, device: torch.device
) -> Tensor:
    """[queries, keys]: which keys up to `end` the queries from `start` on see. `ahead`: how many positions behind
    itself each query sees."""
    key = torch.arange(end, device=device)
    query = key[start:, None]
    seen = key <= (query if ahead is None else query + torch.from_numpy(ahead).to(device)[:, None])
    return seen if window is None else seen & (key > query - window)


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor) -> Tensor:
    """Attention in which each head's sink, a logit, takes its share and returns nothing. q: [n, heads, queries, dim],
    k and v: [n, kv heads, keys, dim], seen: [queries, keys]."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return softmax_with_sinks(scores, sinks[:, None, None]) @ v


def softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Over the last dimension and the sinks, whose shares are left out; computed in float32."""
    joined = torch.cat([scores.float(), sinks.expand(*scores.shape[:-1], 1)], -1)
    return torch.softmax(joined, -1)[..., :-1].to(scores.dtype)


def _similar(lengths: list[int], without: Sequence[int]) -> list[list[int]]:
    """Numbers of sequences grouped by length, shortest first, each group ending with its longest."""
    groups: list[list[int]] = []
    area = 0
    for m in sorted(set(range(len(lengths))).difference(without), key=lambda m: (lengths[m], m)):
        cells = lengths[m] ** 2
        if groups and cells * len(groups[-1]) - area <= PADDING_AREA:
            groups[-1].append(m)
            area += cells
        else:
            groups.append([m])
            area = cells
    return groups


def _padded_rows(spans: list[tuple[int, int]], length: int) -> Tensor:
    """[n * length] row numbers; past its end a sequence repeats its last row."""
    starts, counts = torch.tensor(spans)[:, :1], torch.tensor(spans)[:, 1:]
    return (starts + torch.arange(length).minimum(counts - 1)).flatten()
