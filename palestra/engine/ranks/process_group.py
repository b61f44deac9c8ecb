"""The process group of ranks: torch.distributed, by gloo between CPUs and NCCL between GPUs.

Owns: joining, broadcasts, the exchange of gradients in the tree's order. Never touches: who decides what.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from palestra.model.context_group import ContextGroup
from palestra.model.loading.tensor_parallel import TensorShard
from palestra.model.tensor_group import TensorGroup
from palestra.model.training.gradient_tree import sum_in_tree_order

MEETING_S = 600.0  # the longest that one rank waits for another: as the server's `worker_stall_s`, unless that is set
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class ProcessGroup:
    """One process of several. All ranks call the same methods in the same order."""

    def __init__(self, meeting: str, rank: int, ranks: int, device: torch.device, tensor: int = 1, context: int = 1):
        """Waits for all others. `meeting` is the same for all: a new folder, or host:port where rank 0 listens.
        `tensor` neighbours share every layer, and `context` of such groups share every micro-batch."""
        timeout, host = timedelta(seconds=MEETING_S), meeting.rpartition(":")[0]
        is_one_machine = Path(meeting).is_absolute()
        interface = (
            LOOPBACK if is_one_machine else _interface_towards(host)
        )  # of one machine: no other machine can connect
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)
        if is_one_machine:
            store: Store = FileStore(str(Path(meeting) / "meeting"), ranks)
        else:
            store = TCPStore(host, int(meeting.rpartition(":")[2]), ranks, is_master=rank == 0, timeout=timeout)
        self.rank, self.ranks, self.tensor, self.context, self._kind = rank, ranks, tensor, context, device.type
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )

    def shard_mesh(self, shard: int) -> DeviceMesh | None:
        """The ranks across which this one's base model lies: neighbours, so that they are close to each other. None:
        each rank has all of it."""
        if shard == 1:
            return None
        mesh = init_device_mesh(self._kind, (self.ranks // shard, shard), mesh_dim_names=("copies", "shard"))
        return mesh["shard"]

    def tensor_group(self) -> TensorGroup | None:
        """The ranks that compute every layer together with this one; None: it computes them alone."""
        if self.tensor == 1:
            return None
        mesh = init_device_mesh(self._kind, (self.ranks // self.tensor, self.tensor), mesh_dim_names=("data", "tensor"))
        return TensorGroup(TensorShard(self.rank % self.tensor, self.tensor), mesh["tensor"].get_group())

    def context_group(self) -> ContextGroup | None:
        """The ranks that have the other rows of this one's micro-batches; None: it has all."""
        if self.context == 1:
            return None
        shape = (self.ranks // (self.context * self.tensor), self.context, self.tensor)
        mesh = init_device_mesh(self._kind, shape, mesh_dim_names=("data", "context", "tensor"))
        rank = self.rank // self.tensor % self.context
        return ContextGroup(rank, self.context, mesh["context"].get_group())

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        dist.broadcast(tensor, source)

    def sum_gradients(self, row: Tensor, ranks: Collection[int]) -> None:
        """Replaces the row of every rank by the sum over `ranks`, in the order of the tree; where several processes
        share every layer or every micro-batch, `ranks` counts their groups, and their sums are added at the end. Each
        process adds up a slice: the traffic is that of an all-reduce, whose own order would depend on how the ranks
        are connected."""
        members = self.tensor * self.context
        if len(ranks) == 1 and members == 1:
            (source,) = ranks
            dist.broadcast(row, source)
            return
        size = -(-len(row) // self.ranks)
        slices = row.new_zeros(self.ranks, size)
        slices.view(-1)[: len(row)] = row
        received = torch.empty_like(slices)
        dist.all_to_all_single(received, slices)
        groups = received.unflatten(0, (-1, members))
        parts = [groups[n] if n in ranks else None for n in range(len(groups))]
        total, *others = sum_in_tree_order(parts)
        for other in others:
            total += other
        dist.all_gather(list(slices.unbind()), total)
        row.copy_(slices.view(-1)[: len(row)])

    def close(self) -> None:
        dist.destroy_process_group()


def _interface_towards(host: str) -> str:
    """The network interface of this machine by which it reaches another."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == own for one in addresses):
            return name
    raise OSError(f"no network interface has the address {own}, by which {host} is reached")
