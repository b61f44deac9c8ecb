"""The gradient of one request as a binary tree over a fixed number of gradient shards, so that its bits do not depend
on how many processes computed it.

Each micro-batch of a request belongs to one shard, by the rows of that request's micro-batches alone. A shard is
summed in the order of its micro-batches, then the shards are summed in pairs: s with s + shards/2, then what is
congruent modulo half as much, and so on. A process that has every shard congruent to r modulo n therefore ends with
one node of the tree, and n such nodes make the rest. A shard without micro-batches is left out, never added as zeros:
that could change the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from palestra.model.lora.adapters import Adapter, Rows


def balanced_shards(rows: Sequence[int], shards: int) -> list[int]:
    """The shard of each micro-batch, by their numbers of rows: the largest first, each to the shard that has the
    fewest rows so far. So ranks end at about the same time although trees of shared prefixes differ in size."""
    chosen, loads = [0] * len(rows), [0] * shards
    for n in sorted(range(len(rows)), key=lambda n: -rows[n]):
        chosen[n] = loads.index(min(loads))
        loads[chosen[n]] += rows[n]
    return chosen


def tree_place(shard: int, shards: int) -> int:
    """Place of a shard among the leaves of the tree, from left to right: the bits of its number reversed."""
    bits = shards.bit_length() - 1
    return int(f"{shard:0{bits}b}"[::-1], 2) if bits else 0


@dataclass(slots=True)
class _Node:
    place: int
    """Place of its leftmost leaf."""
    total: Tensor


@dataclass(slots=True)
class GradientTree:
    """Sums the gradient of one adapter's request. Shards come in the order of their places, so that no more than
    log2(shards) sums wait for their neighbours."""

    adapter: Adapter
    shards: int
    earlier: Tensor | None
    """The gradient of earlier requests, which this one is added to at the end."""
    _waiting: list[_Node] = field(default_factory=list)
    _place: int | None = None

    @classmethod
    def begin(cls, adapter: Adapter, shards: int) -> GradientTree:
        """The adapter's gradient row is empty afterwards: it sums one shard at a time."""
        earlier = _take(adapter, "grads") if adapter.has_gradient else None
        return cls(adapter, shards, earlier)

    def enter(self, shard: int) -> None:
        """Enters this shard, before one of its micro-batches."""
        place = tree_place(shard, self.shards)
        if self._place is not None and place != self._place:
            self._waiting.append(_Node(self._place, _take(self.adapter, "partial")))
            while len(self._waiting) > 1 and not self._is_below(place):
                right = self._waiting.pop()
                self._waiting[-1].total.add_(right.total)
        self._place = place

    def close(self) -> None:
        """Leaves the sum of all shards that were entered in the adapter's gradient row."""
        while self._waiting:
            self.adapter.row("partial").add_(self._waiting.pop().total)
        self.adapter.stack.collect_gradient(self.adapter.slot)

    def end(self) -> None:
        """Adds what earlier requests left to the row, which now has the sum of this request."""
        if self.earlier is not None:
            self.adapter.row("grads").add_(self.earlier)
        self.adapter.has_gradient = True

    def _is_below(self, place: int) -> bool:
        """Whether the smallest subtree with the last two sums has this place too, so that they wait for it."""
        left, right = self._waiting[-2].place, self._waiting[-1].place
        level = (left ^ right).bit_length()
        return place >> level == left >> level


def sum_in_tree_order(parts: Sequence[Tensor | None]) -> Tensor:
    """The rest of the tree, above nodes of which the n-th has the shards congruent to n; None: it has none. The parts
    are overwritten."""
    level = list(parts)
    while len(level) > 1:
        half = len(level) // 2
        level = [_sum(level[n], level[n + half]) for n in range(half)]
    assert level[0] is not None, "no rank computed anything"
    return level[0]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.add_(b)


def _take(adapter: Adapter, kind: Rows) -> Tensor:
    """A copy of a row of gradients, which is empty afterwards."""
    row = adapter.row(kind)
    taken = row.clone()
    row.zero_()
    return taken
