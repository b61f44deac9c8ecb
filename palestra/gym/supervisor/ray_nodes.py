"""Processes of a gym on the nodes of a Ray cluster. Callers reach them at the addresses of the config all the same.

Server folders and Palestra itself must be at the same path on every node. When a node is lost, its processes are
started on another one; the addresses stay those of this machine, which forwards connections (`relay.py`).
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from contextlib import AsyncExitStack

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

from palestra.config.redaction import redact
from palestra.gym.config.ports import ReservedPorts
from palestra.gym.records import GymConfig
from palestra.gym.start import ProcessStart, read_start, to_bytes
from palestra.gym.supervisor.child import with_process_name
from palestra.gym.supervisor.plan import PlannedProcess
from palestra.gym.supervisor.relay import TcpRelay
from palestra.placement.node_process import NodeProcess, RemoteProcess, kill_actor
from palestra.placement.process import NotPlaced, ProcessCommand, Report, RunningProcess
from palestra.placement.ray_cluster import cluster_nodes, connect, disconnect, own_address

PLACE_S = 120.0  # for an actor to start on some node


class GymLauncher:
    """Prepares a process of a gym on its node, where its servers get ports of that machine."""

    def __init__(self, argument: bytes) -> None:
        start = read_start(io.BytesIO(argument))
        servers = [start.config.servers[one] for one in start.sockets]
        self._ports, address = ReservedPorts(), own_address()
        self.answer = {one.name: (address, self._ports.reserve_for(one.host, one.port, address)) for one in servers}
        """The address at which each server listens."""
        self._process = PlannedProcess("gym", servers, start.config, self._ports)

    async def command(self, report: Report) -> ProcessCommand:
        return await self._process.command(report)


LAUNCHER = f"{GymLauncher.__module__}:{GymLauncher.__name__}"


class RayNodes:
    """Spreads processes evenly; one that is restarted goes to another node, since its node may be the problem."""

    def __init__(self, config: GymConfig, ports: ReservedPorts) -> None:
        self._config = config
        self._relays = {one.name: TcpRelay(ports.socket_of(one.host, one.port)) for one in config.servers.values()}
        self._nodes: dict[str, str] = {}
        """The last node of each process."""
        self._endings: set[asyncio.Task[None]] = set()

    async def open(self, stack: AsyncExitStack) -> None:
        """Joins the cluster unless this process is in one already."""
        if await connect(self._config.settings.get("ray_head_node_address")):
            stack.push_async_callback(disconnect)
        for relay in self._relays.values():
            await relay.open()
            stack.push_async_callback(relay.close)

    async def _choose(self, name: str) -> str:
        nodes = [node.node_id for node in await cluster_nodes() if not node.is_draining]
        if not nodes:
            raise NotPlaced("the Ray cluster has no node that takes processes now")
        last = self._nodes.pop(name, None)  # after the wait, in which others may have chosen
        load = Counter(self._nodes.values())
        self._nodes[name] = min(nodes, key=lambda node: (node == last, load[node]))
        return self._nodes[name]

    async def start(self, process: PlannedProcess, report: Report, on_line: Report) -> RunningProcess:
        node = await self._choose(process.name)
        actor = (
            ray.remote(NodeProcess)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote()
        )
        stdin = to_bytes(ProcessStart(config=self._config, sockets={one.name: 0 for one in process.servers}))
        try:
            found = await asyncio.wait_for(actor.start.remote(process.name, LAUNCHER, stdin), PLACE_S)
            pid = await actor.pid.remote()
        except (RayError, TimeoutError) as error:
            kill_actor(actor)
            raise NotPlaced(f"no node of the cluster accepted it ({error!r})") from None
        for name, (host, port) in found.items():
            self._relays[name].point_to((host, port))
            report(f"{name} is on a node of the cluster, at {host}:{port}")
        running = RemoteProcess(actor, pid or 0, with_process_name(process.name, on_line), clean=redact)
        ending = asyncio.create_task(self._forget(process, running), name=f"{process.name}-relays")
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        return running

    async def _forget(self, process: PlannedProcess, running: RemoteProcess) -> None:
        await running.wait()
        for server in process.servers:
            self._relays[server.name].point_to(None)
