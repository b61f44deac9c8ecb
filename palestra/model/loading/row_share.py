"""The rows of a linear layer's weight that one of several processes holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class HeldRows:
    """The rows of one weight that this process holds."""

    held: Tensor
    whole_rows: int
    stack: int | None = None
    """How many weights the whole is a stack of, which are never divided; None where it is a single one."""


@dataclass(slots=True)
class RowShare:
    rank: int
    ranks: int
    weights: list[HeldRows] = field(default_factory=list)
    """All that were read."""

    def rows(self, count: int) -> slice:
        """Returns the rows as torch.chunk divides them: the last ranks may have fewer."""
        size = -(-count // self.ranks)
        start = min(count, self.rank * size)
        return slice(start, min(count, start + size))

    def find(self, weight: object) -> HeldRows | None:
        return next((found for found in self.weights if found.held is weight), None)
