"""Ranks of a context group as threads of one process that meet by real gloo: nothing has to start."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo

from palestra.model.context_group import ContextGroup

T = TypeVar("T")
MEETING_S = 60.0


def on_ranks(ranks: int, work: Callable[[ContextGroup], T]) -> list[T]:
    """Calls `work` at each rank; what it returned, in their order."""
    store = HashStore()
    kind = dist.ProcessGroup.BackendType.GLOO

    def at(rank: int) -> T:
        group = dist.ProcessGroup(store, rank, ranks)
        gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, ranks, timedelta(seconds=MEETING_S))
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, gloo)
        return work(ContextGroup(rank, ranks, group))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(at, range(ranks)))
