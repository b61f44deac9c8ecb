"""The replicas of one base model: they come and go, and each sample gets one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog

from palestra.server.core.background import Background
from palestra.server.core.checkpoints.adapter_transfers import TransferredAdapter
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.replicas.affinity import Affinity
from palestra.server.replicas.errors import ReplicaError, ReplicaLost
from palestra.server.replicas.replica import Replica
from palestra.types.engine import Sample
from palestra.util.round_robin import RoundRobin

log = structlog.get_logger()

GroupKey = tuple[str, tuple[int, ...]]
"""The digest of an adapter and a prompt: requests with the same one are a group."""


@dataclass(slots=True)
class PromptGroup:
    """Requests under way for samples of one prompt: they share its keys and values at one replica."""

    replica: Replica
    requests: int = 0


class ReplicaSet:
    def __init__(self, model: str, metrics: Metrics, *, wait_s: float):
        self._model, self._metrics, self._wait_s = model, metrics, wait_s
        self.replicas: list[Replica] = []
        self._affinity = Affinity()
        self._groups: dict[GroupKey, PromptGroup] = {}
        self._waiting: RoundRobin[deque[asyncio.Future[None]]] = RoundRobin()
        """Requests for which no replica was free, by owner and by adapter, the oldest of these first."""
        self._called: deque[asyncio.Future[None]] = deque()
        """Requests that had their turn and found no replica all the same: the next place is theirs."""
        self._pushing = Background()

    # Coming and going

    def add(self, replica: Replica) -> None:
        self.replicas.append(replica)

    def remove(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        self._metrics.replica_gone(self._model, replica.number)

    def on_change(self, replica: Replica) -> None:
        """Called when a replica is up, or no longer."""
        self._metrics.replica_up(self._model, replica.number, is_up=replica.is_up)
        self._wake(replica.slots)

    async def stop(self) -> None:
        await asyncio.gather(*(replica.stop() for replica in self.replicas), return_exceptions=True)
        await self._pushing.settle_down()

    @property
    def is_up(self) -> bool:
        return any(replica.is_up for replica in self.replicas)

    @property
    def placed(self) -> int:
        """Returns the number of requests that the replicas have."""
        return sum(replica.requests for replica in self.replicas)

    @property
    def queued(self) -> int:
        """Returns how many of these have not begun yet."""
        return sum(replica.queued for replica in self.replicas if replica.is_up)

    # Choosing a replica

    @asynccontextmanager
    async def place(
        self, sample: Sample, adapter: TransferredAdapter | None, avoid: Replica | None = None
    ) -> AsyncIterator[Replica]:
        """A place at a replica during the block: where the same prompt is being sampled from the same weights, else
        where the prompt's conversation is, else at the least busy one. Waits until there is one. `avoid` is used only
        if there is no other."""
        key = (adapter.digest if adapter is not None else "", sample.request.prompt)
        if self._waiting or self._called:  # not before those who came earlier
            await self._wait(sample.request.cache_salt, key[0])
        while (replica := self._choose(key, avoid)) is None:
            await self._wait(None, "")
        group = self._groups.get(key)
        if group is None or group.replica is not replica:
            group = self._groups[key] = PromptGroup(replica)
        group.requests += 1
        replica.requests += 1
        replica.sequences += sample.request.num_samples
        try:
            yield replica
        finally:
            replica.requests -= 1
            replica.sequences -= sample.request.num_samples
            group.requests -= 1
            if not group.requests and self._groups.get(key) is group:
                del self._groups[key]
            self._wake(1)

    def _choose(self, key: GroupKey, avoid: Replica | None) -> Replica | None:
        up = [replica for replica in self.replicas if replica.is_up]
        free = [r for r in up if r.is_free and (r is not avoid or len(up) == 1)]
        group = self._groups.get(key)
        if group is not None and group.replica in free:
            return group.replica
        home = self._affinity.home(key[1])
        return next((r for r in free if r.number == home), None) or min(
            free, key=lambda r: (r.sequences, r.number), default=None
        )

    async def _wait(self, owner: str | None, adapter: str) -> None:
        """Waits for a free replica, in the line of an owner's requests to an adapter; without an owner before all
        others. Raises ReplicaLost if none is up for too long."""
        waiter = asyncio.get_running_loop().create_future()
        line = self._called if owner is None else self._waiting.add(owner, adapter, deque())
        line.append(waiter)
        try:
            async with asyncio.timeout(self._wait_s):
                await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake(1)  # it was woken, and will not come
            raise
        except TimeoutError:
            if not self.is_up:
                why = "; ".join(replica.trouble for replica in self.replicas if replica.trouble)
                raise ReplicaLost(
                    f"no sampler was available for {self._wait_s:g} s: {why or 'no replica has joined'}"
                ) from None
        finally:
            if waiter in line:
                line.remove(waiter)
                if owner is not None and not line:
                    self._waiting.remove(owner, adapter)

    def _wake(self, count: int) -> None:
        while count > 0 and (self._called or self._waiting):
            waiter = self._called.popleft() if self._called else self._next()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    def _next(self) -> asyncio.Future[None]:
        """Takes the request whose turn it is out of its line."""
        owner, adapter, line = self._waiting.first()
        waiter = line.popleft()
        self._waiting.owner_served(owner)
        self._waiting.served(owner, adapter)
        if not line:
            self._waiting.remove(owner, adapter)
        return waiter

    def note(self, sequence: Sequence[int], replica: Replica) -> None:
        """Notes where a prompt and its answer were sampled."""
        self._affinity.note(sequence, replica.number)

    # Adapters

    def push(self, adapter: TransferredAdapter) -> None:
        """Loads an adapter at every replica that is up; one that comes later gets it when it is needed."""
        for replica in self.replicas:
            if replica.is_up:
                self._pushing.run(self._push(replica, adapter))

    async def _push(self, replica: Replica, adapter: TransferredAdapter) -> None:
        try:
            await replica.adapters.load(adapter)
        except ReplicaError as e:  # callers that sample from it get the error
            log.warning("an adapter could not be pushed", replica=replica.where, error=str(e))

    def drop(self, adapter: TransferredAdapter) -> None:
        for replica in self.replicas:
            replica.adapters.drop(adapter)
