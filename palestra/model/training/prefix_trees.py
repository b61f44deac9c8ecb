"""Prefixes that data share: what several data begin with is computed once.

Data of one adapter are sorted by their tokens. Each then adds to a tree the tokens that it does not share with the one
before: a new row for each. Rows thus stand in the order of a walk: a row is followed by all rows that continue it.

data       a b c d          rows      0 1 2 3 4 5 6
           a b c e f        tokens    a b c d e f g
           a b g            ends      7 7 6 4 6 6 7     row r is seen by rows r ... ends[r] - 1
paths      0 1 2 3 | 0 1 2 4 5 | 0 1 6

The plan of a request depends on its data alone, so that a pass that is repeated has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from palestra.model.attention.branches import Branches
from palestra.model.training.prepared import Prepared

MIN_SHARED = 16  # tokens; sharing fewer costs more than it saves
BEYOND = 4
"""A tree may have a quarter of a micro-batch more rows than its longest datum, which is computed as a whole anyway."""


@dataclass(frozen=True)
class PrefixTrees:
    """Rows of a micro-batch."""

    order: list[int]
    """Data in the order in which they added their rows."""
    lengths: list[int]
    """Rows of each tree."""
    owners: list[int]
    """A datum of each tree."""
    paths: list[NDArray[np.int64]]
    """Rows of each datum, by its number."""
    new: list[tuple[int, int]]
    """First row that each datum added and the position of that row, in `order`."""

    @cached_property
    def rows(self) -> int:
        return sum(self.lengths)

    @cached_property
    def readers(self) -> NDArray[np.int64]:
        """The row of each position of the data, by their numbers and end to end."""
        return np.concatenate(self.paths)

    @cached_property
    def is_plain(self) -> bool:
        """Whether nothing is shared, and rows are the positions of the data in their order."""
        return np.array_equal(self.readers, np.arange(self.rows))

    def of_rows(self, parts: Sequence[NDArray]) -> NDArray:
        """Returns for each row what stands at its place in the data; all its readers have the same there."""
        joined = np.concatenate(parts)
        if self.is_plain:
            return joined
        first = np.empty(self.rows, np.int64)
        first[self.readers] = np.arange(len(self.readers))
        return joined[first]

    def branches(self) -> Branches | None:
        """Returns how rows see each other; None where nothing is shared."""
        if self.rows == len(self.readers):
            return None
        positions, ends = np.empty(self.rows, np.int64), np.empty(self.rows, np.int64)
        spans, paths, at = [], [], 0
        for n, (i, (row, position)) in enumerate(zip(self.order, self.new, strict=True)):
            path = self.paths[i]
            positions[path[position:]] = np.arange(position, len(path))
            spans.append((row, position, len(path) - position, at))
            paths.append(path)
            at += len(path)
            next_row, kept = self.new[n + 1] if n + 1 < len(self.new) else (self.rows, 0)
            ends[path[kept:]] = next_row  # nothing continues them any more
        lengths = [len(path) for path in paths]
        return Branches(positions, ends, np.concatenate(paths), lengths, [span for span in spans if span[2]])


def grow_trees(data: Sequence[Prepared], *, share: bool = True) -> PrefixTrees:
    """Trees of a micro-batch's data, in the order of their first data. Without `share`, each datum is its own tree."""
    by_adapter: dict[int, list[int]] = {}
    for i, datum in enumerate(data):
        by_adapter.setdefault(id(datum.adapter), []).append(i)
    grown = PrefixTrees([], [], [], [np.empty(0, np.int64)] * len(data), [])
    rows = 0
    for numbers in by_adapter.values():
        for family in sorted(_sharing(data, numbers) if share else [[(i, 0)] for i in numbers], key=min):
            grown.owners.append(family[0][0])
            path, first_row = np.empty(0, np.int64), rows
            for i, shared in family:
                added = len(data[i].tokens) - shared
                grown.paths[i] = path = np.concatenate([path[:shared], np.arange(rows, rows + added)])
                grown.new.append((rows, shared))
                grown.order.append(i)
                rows += added
            grown.lengths.append(rows - first_row)
    return grown


def _sharing(data: Sequence[Prepared], numbers: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Data that share a prefix, sorted by their tokens; each with the number of tokens that it shares with the one
    before it, which is the most that it shares with any earlier one."""
    ordered = sorted(numbers, key=lambda i: (_key(data[i]), i)) if len(numbers) > 1 else numbers
    families: list[list[tuple[int, int]]] = []
    for n, i in enumerate(ordered):
        shared = shared_length(data[ordered[n - 1]], data[i]) if n else 0
        if shared:
            families[-1].append((i, shared))
        else:
            families.append([(i, 0)])
    return families


def shared_length(a: Prepared, b: Prepared) -> int:
    """Returns how many tokens both begin with, and the experts that these have to visit; 0 if it is not worth
    sharing."""
    n = min(len(a.tokens), len(b.tokens))
    same = a.tokens[:n] == b.tokens[:n]
    if a.routing is not None and b.routing is not None:
        same &= (a.routing[:n] == b.routing[:n]).all(axis=(1, 2))
    elif a.routing is not b.routing:
        return 0
    length = n if same.all() else int(same.argmin())
    return length if length >= MIN_SHARED else 0


def _key(datum: Prepared) -> tuple[bool, bytes, bytes]:
    """Data that share more stand closer to each other in this order."""
    routing = datum.routing
    return routing is not None, datum.tokens.astype(">u4").tobytes(), b"" if routing is None else routing.tobytes()


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    numbers: list[int]
    """Which data of the request are in this micro-batch."""
    rows: int
    """Rows that they have together: a token that is shared counts once."""


def plan_micro_batches(data: Sequence[Prepared], row_budget: int, *, share: bool = True) -> list[PlannedBatch]:
    """Plans micro-batches by width, then adapter, then length, up to the budget; data that share a prefix stay together
    as far as it goes, and those of long sequences a little further (`BEYOND`)."""
    first_seen: dict[int, int] = {}
    for datum in data:
        first_seen.setdefault(id(datum.adapter), len(first_seen))
    kinds: dict[tuple[int, int], list[int]] = {}
    for i, datum in enumerate(data):
        kinds.setdefault((datum.targets.shape[1], first_seen[id(datum.adapter)]), []).append(i)
    batches: list[PlannedBatch] = []
    room, width = 0, 0
    for kind in sorted(kinds):
        for family in sorted(_families(data, kinds[kind], row_budget, share=share), key=_size):
            if family.rows > room or kind[0] != width:
                batches.append(PlannedBatch([], 0))
                room, width = row_budget, kind[0]
            joined = PlannedBatch(batches[-1].numbers + family.numbers, batches[-1].rows + family.rows)
            batches[-1], room = joined, room - family.rows
    return batches


def _size(family: PlannedBatch) -> tuple[int, int]:
    return family.rows, min(family.numbers)


def _families(data: Sequence[Prepared], numbers: list[int], most: int, *, share: bool) -> list[PlannedBatch]:
    """Data that share a prefix; those with too many rows for a micro-batch of `most` are cut where the least is
    shared."""
    found: list[PlannedBatch] = []
    todo = _sharing(data, numbers) if share else [[(i, 0)] for i in numbers]
    while todo:
        family = todo.pop()
        rows = sum(len(data[i].tokens) - shared for i, shared in family)
        longest = max(len(data[i].tokens) for i, _ in family)
        if rows <= max(most, longest + most // BEYOND) or len(family) == 1:
            found.append(PlannedBatch([i for i, _ in family], rows))
            continue
        inner = np.array([shared for _, shared in family[1:]])
        places = np.flatnonzero(inner == inner.min()) + 1
        cut = int(places[len(places) // 2])
        todo += [family[:cut], [(family[cut][0], 0), *family[cut + 1 :]]]
    return found
