"""Micro-batches that several processes compute together, each a part of the rows: so a sequence may be as long as all
of them have room for.

What concerns rows alone (projections, feed-forward networks, experts, the head) each process computes of its own rows,
with whole weights. Where rows see each other, in attention and in recurrences, heads are divided instead: each process
gets all rows of its heads, and what they return goes back to the processes that have the rows.

process 0    rows 0-3, all heads            all rows, heads 0-1            rows 0-3, all heads
process 1    rows 4-7, all heads    ->      all rows, heads 2-3    ->      rows 4-7, all heads

Only copies travel, forward and backward, and heads do not know of each other: the code between is that of one process,
and a row has the bits that it has there. Gradients of adapters are sums over each process's rows, which
`ProcessGroup.sum_gradients` adds up in the order of the processes.

All processes must run the same exchanges in the same order. So whether autograd records anything follows the whole
micro-batch, not a process's rows of it (see `LoraPlan.part`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function

from palestra.model.loading.tensor_parallel import TensorShard

LEAST_ROWS = 16
"""Of each process; micro-batches with fewer are computed by the first one alone."""


@dataclass(frozen=True, slots=True)
class ContextGroup:
    rank: int
    ranks: int
    group: dist.ProcessGroup
    """Its ranks, in order."""

    def divide(self, rows: int) -> ContextRows | None:
        """Divides the rows of a micro-batch; None if there are so few that the first rank computes them all."""
        if rows < LEAST_ROWS * self.ranks:
            return None
        return ContextRows(self, [rows * rank // self.ranks for rank in range(self.ranks + 1)])

    def exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Sends so many rows to each rank, in order, and returns those that come from each, in order."""
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
        return out


@dataclass(frozen=True)
class ContextRows:
    """Rows of one micro-batch, of which each rank has neighbouring ones."""

    group: ContextGroup
    bounds: Sequence[int]
    """The first row of each rank; at the end the number of rows."""

    @cached_property
    def own(self) -> slice:
        return slice(self.bounds[self.group.rank], self.bounds[self.group.rank + 1])

    def moved(self, bounds: NDArray[np.int64]) -> ContextRows:
        """Other rows, which are made of these and divided at these bounds."""
        return ContextRows(self.group, bounds.tolist())

    @cached_property
    def shard(self) -> TensorShard:
        """This rank's part of the heads."""
        return TensorShard(self.group.rank, self.group.ranks)

    def to_heads(self, x: Tensor) -> Tensor:
        """From own rows of all heads, [own rows, heads, dim], to all rows of own heads, [rows, own heads, dim]. Fewer
        heads than ranks are sent to several ranks each."""
        if (ranks := self.group.ranks) > x.shape[1]:
            x = x[:, :, None].expand(-1, -1, ranks // x.shape[1], -1).flatten(1, 2)
        return _ToHeads.apply(x, self) if _is_recorded(x) else self._to_heads(x)

    def to_rows(self, x: Tensor) -> Tensor:
        """From all rows of own heads to own rows of all heads."""
        return _ToRows.apply(x, self) if _is_recorded(x) else self._to_rows(x)

    def gather(self, x: Tensor) -> Tensor:
        """Returns all rows of what each rank has for its own; without gradients."""
        return self.group.exchange(x.repeat(self.group.ranks, *(1,) * (x.dim() - 1)), self._own_to_each, self._counts)

    def _to_heads(self, x: Tensor) -> Tensor:
        parts = x.unflatten(1, (self.group.ranks, -1)).transpose(0, 1).flatten(0, 1)
        return self.group.exchange(parts, self._own_to_each, self._counts)

    def _to_rows(self, x: Tensor) -> Tensor:
        parts = self.group.exchange(x, self._counts, self._own_to_each)
        return parts.unflatten(0, (self.group.ranks, -1)).transpose(0, 1).flatten(1, 2)

    @cached_property
    def _counts(self) -> list[int]:
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]

    @cached_property
    def _own_to_each(self) -> list[int]:
        return [self._counts[self.group.rank]] * self.group.ranks


def _is_recorded(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ContextRows) -> Tensor:
        ctx.rows = rows
        return rows._to_heads(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.rows._to_rows(grads[0]), None


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ContextRows) -> Tensor:
        ctx.rows = rows
        return rows._to_rows(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.rows._to_heads(grads[0]), None
