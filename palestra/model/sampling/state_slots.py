"""Recurrent states of sequences: which slot is whose, and which snapshots can be found again by their tokens.

A state is overwritten with every token, so it is never shared: a running sequence owns a slot, a fork copies it, and
prefixes are shared by snapshots, which hang on the page where they were taken and are the least recently used first to
go. Snapshots are taken inside prompts only, on a grid of positions: whoever resumes there computes the same numbers as
one that computes everything. Owns: slots, snapshots, where prompts are cut. Never touches: tensors, pages.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from palestra.model.mixers.chunked_scan import CHUNK
from palestra.model.sampling.kv_page_pool import PageNode
from palestra.model.sampling.sequences import Sequence, StateMove


class StateSlots:
    """Rows 0 to `n_slots` are sequences' own, the `n_snapshots` after them snapshots."""

    def __init__(self, n_slots: int, n_snapshots: int, page_size: int):
        if n_slots < 1 or n_snapshots < 0:
            raise ValueError(f"states need n_slots >= 1 and n_snapshots >= 0, got {n_slots} and {n_snapshots}")
        self.n_slots, self.n_snapshots, self.page_size = n_slots, n_snapshots, page_size
        self.grid = math.lcm(CHUNK, page_size)
        """Snapshots are taken at multiples of this."""
        self.moves: list[StateMove] = []
        """What is to be done before the next step, in this order."""
        self._free = list(range(n_slots - 1, -1, -1))
        self._free_snapshots = list(range(n_slots + n_snapshots - 1, n_slots - 1, -1))
        self._kept: OrderedDict[int, PageNode] = OrderedDict()
        """Snapshots that can be found, the least recently used first."""

    @property
    def available(self) -> int:
        return len(self._free)

    def take(self, source: int | None) -> int:
        """A slot, which begins as a copy of another row, or as zeros."""
        slot = self._free.pop()
        self.moves.append((source, slot))
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def deepest(self, node: PageNode | None, limit: int) -> PageNode | None:
        """The last page up to `node` and `limit` tokens that has a snapshot."""
        while node is not None and (node.snapshot is None or node.depth * self.page_size > limit):
            node = node.parent
        return node

    def resume(self, node: PageNode | None) -> int | None:
        """The row of a page's snapshot, which counts as used."""
        if node is None or node.snapshot is None:
            return None
        self._kept.move_to_end(node.snapshot)
        return node.snapshot

    def positions_to_keep(self, seq: Sequence, known: int) -> tuple[int, ...]:
        """Returns where a sequence that starts is to leave snapshots: at the end of its prompt, and where it leaves the
        first `known` tokens, which others computed before it: the second one to come by pays, the third gains."""
        last = (seq.prompt_len - 1) // self.grid * self.grid
        found = {min(known // self.grid * self.grid, last), last} if self.n_snapshots else ()
        return tuple(sorted(p for p in found if p > seq.computed))

    def prefill_end(self, seq: Sequence, budget: int, *, must_move: bool) -> int:
        """Returns how far to compute. Prompts are cut on the grid of chunks and where a snapshot is due; with
        `must_move` at least a chunk is computed, however small the budget."""
        end = seq.computed + budget
        if seq.computed >= seq.prompt_len:
            return min(end, len(seq.tokens))
        stop = next(p for p in (*seq.keep_at, seq.prompt_len) if p > seq.computed)
        if end >= stop:
            return stop
        on_grid = end // CHUNK * CHUNK
        if on_grid <= seq.computed and must_move:
            on_grid = seq.computed // CHUNK * CHUNK + CHUNK
        return max(seq.computed, min(on_grid, stop))

    def reserve_snapshot(self) -> int | None:
        """A row that the next step fills; `keep` or `discard` it afterwards. None where all are reserved."""
        if not self._free_snapshots and self._kept:
            gone = (row for row, node in self._kept.items() if not node.is_live)
            self._forget(next(gone, next(iter(self._kept))))
        return self._free_snapshots.pop() if self._free_snapshots else None

    def keep(self, row: int, node: PageNode | None) -> None:
        """Lets the snapshot be found at a page, unless that has one or is gone."""
        if node is None or node.snapshot is not None:
            self.discard(row)
        else:
            node.snapshot = row
            self._kept[row] = node

    def discard(self, row: int) -> None:
        self._free_snapshots.append(row)

    def _forget(self, row: int) -> None:
        self._kept.pop(row).snapshot = None
        self._free_snapshots.append(row)

    def check(self, owners: list[int]) -> None:
        """Raise AssertionError if the books do not add up, with the slots that sequences own between steps."""
        assert sorted(self._free + owners) == list(range(self.n_slots)), "slot lost or owned twice"
        rows = sorted(self._free_snapshots + list(self._kept))
        assert rows == list(range(self.n_slots, self.n_slots + self.n_snapshots)), "snapshot lost or in two places"
        assert all(node.snapshot == row for row, node in self._kept.items()), "snapshot on another page"
