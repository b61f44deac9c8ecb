"""Layers that several processes compute together: each has its part of the heads and of the width inside of
feed-forward networks, with the rows or columns of the weights that belong to it.

Every rank has the whole residual stream. Each half of a layer ends with a sum over ranks, forward, and begins with one,
backward. Ranks gather all parts and add them in the order of ranks: the bits are the same at every rank and in every
run, where an all-reduce would follow how the ranks are connected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from palestra.model.loading.tensor_parallel import TensorShard


@dataclass(frozen=True, slots=True)
class TensorGroup:
    shard: TensorShard
    group: dist.ProcessGroup
    """Its ranks, in order."""

    def enter(self, x: Tensor) -> Tensor:
        """Passes on the input of a half of a layer; its gradients are summed over ranks."""
        return _Enter.apply(x, self) if x.requires_grad and torch.is_grad_enabled() else x

    def leave(self, x: Tensor) -> Tensor:
        """Returns the output of a half of a layer, summed over ranks."""
        return _Leave.apply(x, self) if x.requires_grad and torch.is_grad_enabled() else self.sum(x)

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.shard.ranks)]
        dist.all_gather(parts, x, self.group)
        total = parts[0].float()  # halves are rounded once
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def broadcast(self, x: Tensor) -> None:
        """Broadcasts from the first of the group's ranks."""
        dist.broadcast(x, group=self.group, group_src=0)


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.sum(grads[0]), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None
