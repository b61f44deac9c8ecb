"""Processes of a gym on the nodes of a Ray cluster. Callers reach them at the addresses of the config all the same.

Owns: the actor that runs a process on its node, and following it from node to node. Never touches: health, restarts.

Server folders and Palestra itself must be at the same path on every node. When a node is lost, its processes are
started on another one; the addresses stay those of this machine, which forwards connections (`relay.py`).
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter, deque
from contextlib import AsyncExitStack, suppress
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # pyright: ignore[reportMissingImports]

from palestra.gym.config.ports import ReservedPorts
from palestra.gym.records import GymConfig
from palestra.gym.start import ProcessStart, read_start, to_bytes
from palestra.gym.supervisor.child import LAST_LINES, GymProcess, NotPlaced, Report, RunningProcess
from palestra.gym.supervisor.plan import PlannedProcess
from palestra.gym.supervisor.reaper import OrphanReaper
from palestra.gym.supervisor.relay import TcpRelay

PLACE_S = 120.0  # for an actor to start on some node
GOODBYE_S = 5.0
NEWS_S = 1.0
LOST = -9
"""The exit code of a process whose node is gone."""


class RemoteProcess:
    """Runs on the node, as an actor: the same child as on this machine, with its own reaper."""

    def __init__(self) -> None:
        self._reaper = OrphanReaper()
        self._ports = ReservedPorts()
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        self._child: GymProcess | None = None

    async def start(self, name: str, stdin: bytes) -> dict[str, tuple[str, int]]:
        """Starts the process and returns where each server listens on this node."""
        start = read_start(io.BytesIO(stdin))
        servers = [start.config.servers[one] for one in start.sockets]
        address = ray.util.get_node_ip_address()
        found = {one.name: (address, self._ports.reserve_for(one.host, one.port, address)) for one in servers}
        process = PlannedProcess(name, servers, start.config, self._ports)
        command = await process.command(self._lines.put_nowait)
        self._child = await GymProcess.start(name, command, self._reaper, self._lines.put_nowait)
        return found

    async def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def news(self) -> list[str]:
        """Returns what it has printed since the last call; waits a moment for something."""
        found: list[str] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(NEWS_S):
                found.append(await self._lines.get())
        while not self._lines.empty():
            found.append(self._lines.get_nowait())
        return found

    async def wait(self) -> int:
        assert self._child is not None
        return await self._child.wait()

    async def stop(self, timeout_s: float) -> None:
        if self._child is not None:
            await self._child.stop(timeout_s)


class RemoteChild:
    """The same process as the supervisor sees it."""

    def __init__(self, actor: Any, pid: int, relays: list[TcpRelay], on_line: Report) -> None:
        self.pid = pid
        self._actor = actor
        self._relays = relays
        self._heard = on_line
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._reading = asyncio.create_task(self._read(), name="ray-output")
        self._ending: asyncio.Task[int] = asyncio.create_task(self._end(), name="ray-end")

    @property
    def last_output(self) -> str:
        return "\n".join(self._last)

    @property
    def has_ended(self) -> bool:
        return self._ending.done()

    async def wait(self) -> int:
        return await asyncio.shield(self._ending)

    async def stop(self, timeout_s: float) -> None:
        with suppress(RayError, TimeoutError):
            await asyncio.wait_for(self._actor.stop.remote(timeout_s), timeout_s + GOODBYE_S)
        await self.kill()

    async def kill(self) -> None:
        """Ends the actor, and with it the process: the reaper on the node kills it."""
        with suppress(RayError):
            ray.kill(self._actor)
        await self.wait()

    async def _end(self) -> int:
        try:
            code = await self._actor.wait.remote()
            await asyncio.wait({self._reading}, timeout=NEWS_S * 2)
            ray.kill(self._actor)
        except RayError as error:
            code = LOST
            self._last.append(f"its node or its actor has ended: {error}")
        for relay in self._relays:
            relay.point_to(None)
        self._reading.cancel()
        return code

    async def _read(self) -> None:
        with suppress(RayError):
            while True:
                for line in await self._actor.news.remote():
                    self._last.append(line.partition(") ")[2])
                    self._heard(line)


class RayNodes:
    """Spreads processes evenly; one that is restarted goes to another node, since its node may be the problem."""

    def __init__(self, config: GymConfig, ports: ReservedPorts) -> None:
        self._config = config
        self._relays = {one.name: TcpRelay(ports.socket_of(one.host, one.port)) for one in config.servers.values()}
        self._nodes: dict[str, str] = {}
        """The last node of each process."""

    async def open(self, stack: AsyncExitStack) -> None:
        """Joins the cluster unless this process is in one already."""
        if not ray.is_initialized():
            address = self._config.settings.get("ray_head_node_address")
            await asyncio.to_thread(ray.init, address=address, log_to_driver=False, configure_logging=False)
            stack.callback(ray.shutdown)
        for relay in self._relays.values():
            await relay.open()
            stack.push_async_callback(relay.close)

    def _chosen(self, name: str) -> str:
        last = self._nodes.pop(name, None)
        load = Counter(self._nodes.values())
        alive = sorted(one["NodeID"] for one in ray.nodes() if one["Alive"])
        self._nodes[name] = min(alive, key=lambda node: (node == last, load[node]))
        return self._nodes[name]

    async def start(self, process: PlannedProcess, report: Report, on_line: Report) -> RunningProcess:
        node = self._chosen(process.name)
        actor = (
            ray.remote(RemoteProcess)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True))
            .remote()
        )
        stdin = to_bytes(ProcessStart(config=self._config, sockets={one.name: 0 for one in process.servers}))
        try:
            found = await asyncio.wait_for(actor.start.remote(process.name, stdin), PLACE_S)
            pid = await actor.pid.remote()
        except (RayError, TimeoutError) as error:
            with suppress(RayError):
                ray.kill(actor)
            raise NotPlaced(f"no node of the cluster accepted it ({error!r})") from None
        for name, (host, port) in found.items():
            self._relays[name].point_to((host, port))
            report(f"{name} is on a node of the cluster, at {host}:{port}")
        return RemoteChild(actor, pid, [self._relays[one.name] for one in process.servers], on_line)
