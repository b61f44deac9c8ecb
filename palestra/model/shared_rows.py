"""Rows that several readers have in common: spread to them, and sums of what they send back.

Sums are in the order of the readers, whatever the device: the same bits each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function

from palestra.model.transfers import to_device


@dataclass(frozen=True)
class Readers:
    rows: NDArray[np.int64]
    """[readers]: the row that each reads; every row has a reader."""

    @cached_property
    def _by_row(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Readers in the order of their rows, and where those of each row begin."""
        order = self.rows.argsort(kind="stable")
        return order, np.searchsorted(self.rows[order], np.arange(self.rows.max() + 2))

    def of_rows(self, first: int, last: int) -> NDArray[np.int64]:
        """Readers of the rows from `first` to `last`, in order."""
        order, starts = self._by_row
        return np.sort(order[starts[first] : starts[last + 1]])

    def spread(self, values: Tensor, some: NDArray[np.int64] | None = None, first: int = 0) -> Tensor:
        """Returns what stands at the rows, for each reader or for some of them. `values` are of the rows from `first`
        on."""
        rows = self.rows if some is None else self.rows[some]
        return values.index_select(0, to_device(rows - first, values.device))

    def summed(self, values: Tensor, some: NDArray[np.int64]) -> Tensor:
        """Values of some readers, summed for each row that any of them reads."""
        rows = self.rows[some]
        order, counts = rows.argsort(kind="stable"), np.unique(rows, return_counts=True)[1]
        return sum_runs(values.index_select(0, to_device(order, values.device)), counts)


def sum_runs(values: Tensor, counts: NDArray[np.int64]) -> Tensor:
    """Sums neighbouring rows in their order: `counts` rows for each one of the result."""
    return values if counts.max() == 1 else _sum_runs(values, to_device(counts, values.device))


def _sum_runs(values: Tensor, counts: Tensor) -> Tensor:
    flat = values.reshape(len(values), -1).float()
    sums = torch.segment_reduce(flat, "sum", lengths=counts, axis=0)
    return sums.reshape(-1, *values.shape[1:]).to(values.dtype)


class SpreadRows:
    """Rows as their readers see them, and of each row what its first reader has made of it; with gradients."""

    def __init__(self, rows: NDArray[np.int64], device: torch.device | str) -> None:
        """`rows`: as in `Readers`."""
        order = rows.argsort(kind="stable")
        counts = np.bincount(rows)
        self._rows, self._order, self._counts = (to_device(array, device) for array in (rows, order, counts))
        self._first = to_device(order[np.cumsum(counts) - counts], device)

    def spread(self, x: Tensor) -> Tensor:
        return _Spread.apply(x, self._rows, self._order, self._counts)

    def pick(self, x: Tensor) -> Tensor:
        return _Pick.apply(x, self._first)


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, order: Tensor, counts: Tensor) -> Tensor:
        ctx.order, ctx.counts = order, counts
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum_runs(grads[0].index_select(0, ctx.order), ctx.counts), None, None, None


class _Pick(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.places, ctx.size = places, len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (d,) = grads
        return d.new_zeros(ctx.size, *d.shape[1:]).index_copy_(0, ctx.places, d), None
