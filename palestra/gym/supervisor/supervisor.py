"""A running gym: the head server, every process of servers, and the watch over them.

For example:

    with Ports() as ports:
        config = load_gym(GymSources(files=["gym.yaml"]), ports=ports)
        async with Supervisor(config, ports, report=print) as gym:
            await gym.ready()
            await gym.run()
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Self

from palestra.gym.config import ReservedPorts, our_settings
from palestra.gym.config.settings import is_on_ray
from palestra.gym.errors import GymConfigError, ServerStartError
from palestra.gym.head import head_app, is_loopback
from palestra.gym.records import GymConfig, ServerInstance
from palestra.gym.supervisor.child import ProcessHost, ThisMachine
from palestra.gym.supervisor.plan import processes
from palestra.gym.supervisor.probes import wait_for_upstreams
from palestra.gym.supervisor.process_keeper import ProcessKeeper, ProcessState
from palestra.net.serving import HttpServer
from palestra.placement.reaper import OrphanReaper
from palestra.util.json_types import JsonObject

READY = "All {count} / {count} servers ready!"
WAITING_S = 30.0
STATUS = {ProcessState.HEALTHY: "success", ProcessState.FAILED: "unknown_error"}
"""States in NeMo Gym's words; any other is `connection_error`. `state` has ours."""


class Supervisor:
    """`report` gets what a person wants to know, and what the servers print. Not restartable."""

    def __init__(self, config: GymConfig, ports: ReservedPorts, report: Callable[[str], None]) -> None:
        if not config.servers:
            raise GymConfigError("the config has no servers to run; type: palestra gym run -c FILE")
        self.config = config
        self._ports = ports
        self._report = report
        self._keepers: list[ProcessKeeper] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = AsyncExitStack()
        self._is_ready = False
        self.made_key: str | None = None
        """The admin key, if the head server listens beyond loopback and none was given."""

    @property
    def head_url(self) -> str:
        return f"http://{self.config.head_host}:{self.config.head_port}"

    async def __aenter__(self) -> Self:
        async with self._stack as stack:
            await self._start_head(stack)
            host = await self._host(stack)
            self._keepers = [ProcessKeeper(one, host, self._report) for one in processes(self.config, self._ports)]
            stack.push_async_callback(self._end_all)
            self._tasks = [asyncio.create_task(one.keep(), name=f"keep-{one.name}") for one in self._keepers]
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def build(self) -> None:
        """Builds the environments of all servers, one after another, without starting any: for images without a
        network."""
        for one in processes(self.config, self._ports):
            await one.command(self._report)

    async def ready(self) -> None:
        """Waits until every server is healthy and every model endpoint answers. Raises ServerStartError."""
        waiting = asyncio.create_task(self._all_healthy(), name="all-healthy")
        await self._unless_broken(waiting)
        self._report(READY.format(count=len(self.config.servers)))
        await self._unless_broken(asyncio.create_task(wait_for_upstreams(self.config, self._report), name="upstreams"))
        self._is_ready = True

    async def run(self) -> None:
        """Runs until cancelled. Raises ServerStartError if a server cannot be kept running."""
        await self._unless_broken(asyncio.create_task(asyncio.Event().wait(), name="forever"))

    def instances(self) -> list[JsonObject]:
        """Returns the servers as `/server_instances` shows them."""
        return [_described(server, keeper) for keeper in self._keepers for server in keeper.process.servers]

    @property
    def is_healthy(self) -> bool:
        return self._is_ready and all(keeper.state is ProcessState.HEALTHY for keeper in self._keepers)

    async def _host(self, stack: AsyncExitStack) -> ProcessHost:
        if is_on_ray(self.config.settings):
            try:
                from palestra.gym.supervisor.ray_nodes import RayNodes
            except ModuleNotFoundError as error:
                raise GymConfigError(
                    f"gym.ray needs {error.name}; to install it: pip install 'palestra[ray]'"
                ) from None
            nodes = RayNodes(self.config, self._ports)
            await nodes.open(stack)
            return nodes
        reaper = OrphanReaper()
        stack.callback(reaper.close)
        return ThisMachine(reaper)

    async def _start_head(self, stack: AsyncExitStack) -> None:
        key = our_settings(self.config.settings).admin_key
        if key is None and not is_loopback(self.config.head_host):
            key = self.made_key = f"tml-{secrets.token_urlsafe(32)}"
        head = head_app(self.config, key, self.instances, lambda: self.is_healthy)
        server = HttpServer(head, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        listener = self._ports.socket_of(self.config.head_host, self.config.head_port).dup()
        serving = asyncio.create_task(server.serve([listener]), name="head")
        self._tasks.append(serving)

        async def stop() -> None:
            server.should_exit = True
            await asyncio.wait({serving})

        stack.push_async_callback(stop)

    async def _all_healthy(self) -> None:
        while waited := [keeper for keeper in self._keepers if not keeper.is_ready.is_set()]:
            try:
                async with asyncio.timeout(WAITING_S):
                    await waited[0].is_ready.wait()
            except TimeoutError:
                names = ", ".join(server.name for keeper in waited for server in keeper.process.servers)
                self._report(f"waiting for {names}")

    async def _unless_broken(self, task: asyncio.Task[Any]) -> None:
        """Returns the task's result, or raises the error of the first keeper that gave up meanwhile."""
        try:
            await asyncio.wait({task, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
            for one in self._tasks:
                if one.done():
                    one.result()
                    raise ServerStartError(f"{one.get_name()} ended")
            task.result()
        finally:
            task.cancel()

    async def _end_all(self) -> None:
        """Ends all at once, so that it takes as long as the slowest."""
        keeping = [task for task in self._tasks if task.get_name() != "head"]
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)


def _described(server: ServerInstance, keeper: ProcessKeeper) -> JsonObject:
    return {
        "process_name": server.name,
        "config_path": server.name,
        "server_type": server.kind,
        "name": server.implementation,
        "dir_path": None if server.folder is None else str(server.folder),
        "entrypoint": server.settings["entrypoint"],
        "host": server.host,
        "port": server.port,
        "url": server.url,
        "pid": None if keeper.child is None else keeper.child.pid,
        "start_time": keeper.started_at,
        "status": STATUS.get(keeper.state, "connection_error"),
        "uptime_seconds": time.time() - keeper.started_at if keeper.state is ProcessState.HEALTHY else 0.0,
        "state": keeper.state,
        "restarts": keeper.restarts,
        "isolation": server.isolation,
    }
