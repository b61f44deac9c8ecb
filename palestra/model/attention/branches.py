"""Rows that several sequences share: who sees whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Branches:
    """Sequences that share their beginnings, as trees that stand end to end. A row is followed by all rows that
    continue it, so that those which see it are the rows from itself to its end."""

    positions: NDArray[np.int64]
    """[rows]: places in the sequences."""
    ends: NDArray[np.int64]
    """[rows]: the row behind the last that sees this one."""
    paths: NDArray[np.int64]
    """Rows of each sequence from its first token to its last, all sequences end to end."""
    sequence_lengths: Sequence[int]
    spans: Sequence[tuple[int, int, int, int]]
    """Rows that were added by one sequence: the first, its position, their number, where the sequence begins in
    `paths`."""

    def seen(
        self, start: int, stop: int, window: int | None, ahead: NDArray[np.int64] | None = None
    ) -> NDArray[np.bool_]:
        """[rows, rows]: which of the rows from `start` to `stop`, a tree, see which. `ahead`: how many rows behind
        itself each of them sees."""
        row = np.arange(start, stop)
        last = row if ahead is None else row + ahead
        found = (row <= last[:, None]) & (row[:, None] < self.ends[start:stop])
        if window is not None:
            position = self.positions[start:stop]
            found &= position[:, None] - position < window
        return found
