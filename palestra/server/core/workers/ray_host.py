"""Workers and replicas on the nodes of a Ray cluster: each has a placement group, with an actor for each of its ranks.

Actors outlive the server, so that the next one finds its workers again. While its actors live, a worker that has ended
is started again on the same nodes, where its newest snapshots are; else Ray finds other nodes, and the state comes from
the copies at the server.

Owns: the placement group, which rank is where. Never touches: messages, when a worker is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray  # pyright: ignore[reportMissingImports]
import structlog
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from palestra.config.serve import RayConfig
from palestra.placement.launchers import PYTHON, python_argument
from palestra.placement.node_process import NodeProcess, RemoteProcess, kill_actor
from palestra.placement.process import NotPlaced
from palestra.placement.ray_cluster import NAMESPACE, cluster_nodes, draining_nodes
from palestra.server.core.workers.link_security import LinkNetwork
from palestra.server.core.workers.worker_hosts import LocalHost, RunningWorker, environment_of
from palestra.types.engine import RanksMeeting, WorkerConfig
from palestra.util.json_types import JsonObject
from palestra.util.log_files import open_log

log = structlog.get_logger()

ANSWER_S = 30.0  # of an actor that lives
START_S = 120.0  # for actors to start on their nodes, which import Palestra
LOOK_S = 2.0
GOODBYE_S = 10.0
FORGET_AFTER_S = 600.0  # a server that has been away for so long does not come back to its workers
CANNOT_START = 2
"""Exit code of a rank whose output says why."""


@dataclass(frozen=True, slots=True)
class RaySlot:
    """Nodes that a worker has: an actor for each rank."""

    slot_id: str
    actors: list[Any]
    nodes: list[tuple[str, str]]
    """Id and address of each rank's node."""


class RayWorker:
    """The ranks of a worker. The end of one is the end of all."""

    def __init__(self, slot: RaySlot, pids: list[int], log_file: Path):
        self._slot, self._out = slot, open_log(log_file)
        self._ranks = [
            RemoteProcess(actor, pid, partial(self._write, rank), keeps_actor=True)
            for rank, (actor, pid) in enumerate(zip(slot.actors, pids, strict=True))
        ]
        self._ending = asyncio.create_task(self._end(), name="ray worker")
        self._killing: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._ranks[0].pid

    @property
    def where(self) -> str:
        return ", ".join(dict.fromkeys(f"{address} ({node[:8]})" for node, address in self._slot.nodes))

    @property
    def facts(self) -> JsonObject:
        nodes = [{"node": node, "address": address} for node, address in self._slot.nodes]
        return {"pid": self.pid, "slot": self._slot.slot_id, "nodes": nodes}

    @property
    def returncode(self) -> int | None:
        return self._ending.result() if self._ending.done() and not self._ending.cancelled() else None

    async def wait(self) -> None:
        await asyncio.shield(self._ending)

    def terminate(self) -> None:
        self._killing = asyncio.create_task(self._ranks[0].terminate(), name="terminate")

    def kill(self) -> None:
        for actor in self._slot.actors:
            kill_actor(actor)

    def leave(self) -> None:
        self._ending.cancel()
        for rank in self._ranks:
            rank.leave()

    async def _end(self) -> int:
        waits = [asyncio.create_task(rank.wait()) for rank in self._ranks]
        try:
            done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if others and all(one.result() == 0 for one in done):  # in order: the others are about to end
                await asyncio.wait(others, timeout=GOODBYE_S)
            await asyncio.gather(*(rank.halt() for rank in self._ranks if not rank.has_ended))
            codes = await asyncio.gather(*waits)
        finally:
            for one in waits:
                one.cancel()
            self._out.close()
        return CANNOT_START if CANNOT_START in codes else next((code for code in codes if code), 0)

    def _write(self, rank: int, line: str) -> None:
        _, address = self._slot.nodes[rank]
        with contextlib.suppress(OSError, ValueError):  # a full disk must not end the reading
            self._out.write(f"[{address} rank {rank}] {line}\n".encode())
            self._out.flush()


class RayHost:
    def __init__(self, name: str, config: RayConfig, network: LinkNetwork, needs: list[Mapping[str, float]]):
        """`name` is the worker's in the whole cluster; `needs`: resources of each rank."""
        self.name, self._config, self._network, self._needs = name, config, network, needs
        self._slot: RaySlot | None = None

    async def start(self, config: WorkerConfig, log_file: Path) -> RayWorker:
        try:
            return await self._start(config, log_file)
        except (RayError, TimeoutError) as e:
            await self.close()
            raise NotPlaced(f"{self.name} could not be started on its nodes ({_first_line(e)})") from None

    async def _start(self, config: WorkerConfig, log_file: Path) -> RayWorker:
        slot = self._slot
        if slot is None or not await self._is_usable(slot):
            await self.close()
            slot = self._slot = await self._placed()
        changes = {
            "client_key": self._network.admit(self.name, config.life),
            "state": f"states/{self.name}/{slot.slot_id}",
        }
        config = msgspec.structs.replace(config, **changes, meeting=await self._meeting(slot, config.life))
        pids = await asyncio.gather(*(self._start_rank(slot, rank, config) for rank in range(len(slot.actors))))
        log.info("a worker is on its nodes", worker=self.name, nodes=[address for _, address in slot.nodes])
        return RayWorker(slot, pids, log_file)

    async def _start_rank(self, slot: RaySlot, rank: int, config: WorkerConfig) -> int:
        environment = environment_of(config)
        if rank:
            environment["PALESTRA_FOLLOWER"] = str(rank)
        actor = slot.actors[rank]
        argument = python_argument("palestra.engine", environment)
        await asyncio.wait_for(actor.start.remote(self.name, PYTHON, argument), START_S)
        return await asyncio.wait_for(actor.pid.remote(), ANSWER_S) or 0

    async def _meeting(self, slot: RaySlot, life: str) -> RanksMeeting | None:
        if len(slot.actors) == 1:
            return None
        calls_port, store_port = await asyncio.wait_for(slot.actors[0].free_ports.remote(2), ANSWER_S)
        return RanksMeeting(
            host=slot.nodes[0][1],
            calls_port=calls_port,
            store_port=store_port,
            secret_key=self._network.rank_key(self.name, life),
        )

    async def find(self, known: JsonObject, log_file: Path) -> RunningWorker | None:
        """The nodes of an earlier server's worker are used again in any case, if they are there."""
        slot_id, life = known.get("slot"), known.get("life")
        if not slot_id or not life:
            return await LocalHost().find(known, log_file)  # of a server without Ray: it is replaced
        try:
            actors = [
                await asyncio.to_thread(ray.get_actor, _actor_name(slot_id, rank), NAMESPACE)
                for rank in range(len(self._needs))
            ]
            self._slot = await _found(slot_id, actors)
            pids = await asyncio.gather(*(actor.pid.remote() for actor in actors))
        except (ValueError, RayError, TimeoutError):
            self._slot = self._slot or RaySlot(slot_id, [], [])
            return None
        if any(pid is None for pid in pids):
            return None
        self._network.admit(self.name, life)
        return RayWorker(self._slot, list(pids), log_file)

    async def wait_until_draining(self) -> None:
        while self._slot is None or not await self._is_draining(self._slot):  # noqa: ASYNC110 - Ray does not notify
            await asyncio.sleep(LOOK_S)

    async def close(self) -> None:
        """Gives the nodes back."""
        if self._slot is not None:
            for actor in self._slot.actors:
                kill_actor(actor)
            await asyncio.to_thread(_remove_group, self._slot.slot_id)
            self._slot = None

    async def _is_usable(self, slot: RaySlot) -> bool:
        try:
            answers = (asyncio.wait_for(actor.pid.remote(), ANSWER_S) for actor in slot.actors)
            await asyncio.gather(*answers)
        except (RayError, TimeoutError):
            return False
        return bool(slot.actors) and not await self._is_draining(slot)

    async def _is_draining(self, slot: RaySlot) -> bool:
        try:
            draining = await asyncio.to_thread(draining_nodes)
        except Exception as e:  # boundary: whatever Ray says, it is asked again
            log.warning("Ray does not say which nodes are drained", error=str(e))
            return False
        return any(node in draining for node, _ in slot.nodes)

    async def _placed(self) -> RaySlot:
        slot_id = uuid.uuid4().hex
        group = await asyncio.to_thread(
            partial(
                ray.util.placement_group,
                [dict(one) for one in self._needs],
                strategy="PACK",
                name=slot_id,
                lifetime="detached",
            )
        )
        until, is_told = time.monotonic() + self._config.wait_s, False
        try:
            while not await asyncio.to_thread(group.wait, LOOK_S):
                if time.monotonic() > until:
                    raise NotPlaced(await self._what_is_missing())
                if not is_told:
                    is_told = True
                    log.warning("waiting for nodes", worker=self.name, why=await self._what_is_missing())
            actors = [self._actor(group, slot_id, rank) for rank in range(len(self._needs))]
            return await _found(slot_id, actors)
        except BaseException as e:
            await asyncio.to_thread(_remove_group, slot_id)
            if isinstance(e, RayError | TimeoutError):
                raise NotPlaced(f"the nodes of {self.name} do not answer ({_first_line(e)})") from None
            raise

    def _actor(self, group: Any, slot_id: str, rank: int) -> Any:
        needs = dict(self._needs[rank])
        return (
            ray.remote(NodeProcess)
            .options(
                name=_actor_name(slot_id, rank),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=needs.pop("CPU", 0),
                num_gpus=needs.pop("GPU", 0),
                resources=needs,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote(FORGET_AFTER_S)
        )

    async def _what_is_missing(self) -> str:
        each = " + ".join(f"{amount:g} {kind}" for kind, amount in self._needs[0].items())
        ranks = "" if len(self._needs) == 1 else f" for each of its {len(self._needs)} ranks"
        nodes = "; ".join(node.summary for node in await cluster_nodes())
        return f"no node of the Ray cluster has room for {self.name}: it needs {each}{ranks}; there are: {nodes}"


async def _found(slot_id: str, actors: list[Any]) -> RaySlot:
    answers = (asyncio.wait_for(actor.where.remote(), START_S) for actor in actors)
    return RaySlot(slot_id, actors, [tuple(one) for one in await asyncio.gather(*answers)])


def _actor_name(slot_id: str, rank: int) -> str:
    return f"{slot_id}-{rank}"


def _remove_group(slot_id: str) -> None:
    with contextlib.suppress(ValueError, RayError):
        ray.util.remove_placement_group(ray.util.get_placement_group(slot_id))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
