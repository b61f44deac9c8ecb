"""The rows of a product's weight that one of several processes holds.

Owns: who has which rows. Never touches: files, how weights come together again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class RowShare:
    rank: int
    ranks: int
    held: list[tuple[Tensor, int]] = field(default_factory=list)
    """Weights of which only a share was read, with the rows of the whole."""

    def rows(self, count: int) -> slice:
        """As torch.chunk divides them: the last ranks may have fewer."""
        size = -(-count // self.ranks)
        start = min(count, self.rank * size)
        return slice(start, min(count, start + size))

    def whole_rows(self, weight: object) -> int | None:
        """Rows of the whole weight, if this is a share of one."""
        return next((rows for held, rows in self.held if held is weight), None)
