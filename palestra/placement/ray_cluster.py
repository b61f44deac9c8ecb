"""A Ray cluster, as far as it places and watches processes: its nodes, what is free on them, which are being
emptied.

`ray.init` takes SIGTERM's handler, which aborts the process 3 s later: it is taken back afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray  # pyright: ignore[reportMissingImports]

NAMESPACE = "palestra"
AUTO = "auto"
KINDS = ("GPU", "CPU")


@dataclass(frozen=True, slots=True)
class ClusterNode:
    node_id: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]
    is_draining: bool

    @property
    def summary(self) -> str:
        parts = [f"{self.free.get(kind, 0):g} of {self.total[kind]:g} {kind}" for kind in KINDS if kind in self.total]
        return f"{self.address} ({self.node_id[:8]}): {', '.join(parts) or 'nothing'} free" + (
            ", being drained" if self.is_draining else ""
        )


async def connect(address: str | None) -> bool:
    """Joins the cluster that this machine is a node of. False: this process is connected already. Raises
    ConnectionError."""
    if ray.is_initialized():
        return False
    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that a thread cannot handle signals, which is meant
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "configure_logging": False}
    try:
        await asyncio.to_thread(ray.init, address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise ConnectionError(
            f"cannot join the Ray cluster at {address!r} ({str(e).splitlines()[0]}); on this machine, type: "
            "ray start --head, or ray start --address=HEAD:6379"
        ) from None
    _take_signals_back()
    return True


def _take_signals_back() -> None:
    """Ray has put handlers of its own before Python's: after SIGTERM they abort the process three seconds later."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


async def disconnect() -> None:
    await asyncio.to_thread(ray.shutdown)


def own_address() -> str:
    """The address of this machine in the cluster."""
    return ray.util.get_node_ip_address()


async def cluster_nodes() -> list[ClusterNode]:
    """The nodes that are alive."""
    return await asyncio.to_thread(_nodes)


def _nodes() -> list[ClusterNode]:
    free, draining = ray._private.state.available_resources_per_node(), draining_nodes()
    return [
        ClusterNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"],
            free.get(node["NodeID"], {}),
            node["NodeID"] in draining,
        )
        for node in sorted(ray.nodes(), key=lambda node: node["NodeID"])
        if node["Alive"]
    ]


def draining_nodes() -> set[str]:
    """Nodes that are to be emptied: by `ray drain-node`, by an autoscaler, or because their machine is taken away."""
    return set(ray._private.state.state.get_draining_nodes())
