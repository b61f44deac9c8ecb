"""The vLLM servers of one base model: started, chosen from, what all of them can do.

Owns: the servers, which one gets which prompt. Never touches: what is requested of them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import structlog

from palestra.config.serve import ModelConfig
from palestra.server.core.metrics import Metrics
from palestra.server.core.workers import WorkerError
from palestra.server.vllm.adapters import VllmAdapter
from palestra.server.vllm.affinity import Affinity
from palestra.server.vllm.client import VllmClient
from palestra.server.vllm.errors import VllmError, VllmLost
from palestra.server.vllm.probe import LoraTargets, StartupWait, look_over, write_trials
from palestra.server.vllm.process import VllmProcess
from palestra.server.vllm.replica import VllmReplica
from palestra.types.engine import ModelCard

log = structlog.get_logger()

UNLOAD_S = 5.0


class ReplicaSet:
    def __init__(self, model: ModelConfig, metrics: Metrics, *, trials: Path, logs: Path):
        self._model, self._vllm, self._metrics = model, model.vllm, metrics
        self._trials, self._logs = trials, logs
        self.replicas: list[VllmReplica] = []
        self._affinity = Affinity()
        self._tasks: set[asyncio.Task[None]] = set()
        self._came = asyncio.Event()
        self._plain: VllmAdapter | None = None

    # Start and end

    async def start(self, card: ModelCard) -> None:
        """Returns when samples can be requested; raises WorkerError if they cannot."""
        try:
            trials = await asyncio.to_thread(
                write_trials, self._trials, self._model.path, card.vocab_size, self._vllm.max_lora_rank
            )
        except (OSError, ValueError, KeyError) as e:
            raise WorkerError(f"{self._model.path} cannot be prepared for vLLM: {e!r}") from None

        self._plain = await asyncio.to_thread(VllmAdapter.read, trials.plain)

        async def look(client: VllmClient, name: str, awaited: StartupWait) -> LoraTargets:
            return await look_over(client, name, self._vllm, trials, awaited)

        name = self._model.name[0]
        for number, place in enumerate(self._places()):
            replica = VllmReplica(
                number,
                self._vllm,
                place,
                card,
                look,
                owner=self._trials,
                on_change=self._on_change,
                on_load=lambda: self._metrics.vllm_loaded(name),
            )
            self.replicas.append(replica)
            self._run(replica.live(), f"vLLM {number} of {name}")
        try:
            await self._until_there()
        except VllmError as e:
            await self.stop()
            raise WorkerError(str(e)) from None

    def _places(self) -> list[VllmProcess | str]:
        if self._vllm.urls:
            return [*self._vllm.urls]
        logs = [self._logs.with_name(f"{self._logs.name}-{n}.log") for n in range(self._vllm.replicas)]
        return [VllmProcess(self._model, n, log_file) for n, log_file in enumerate(logs)]

    async def _until_there(self) -> None:
        """Waits for all servers of our own; if they are given by address, for the first one, and the others may follow
        later."""
        waiting = {replica.first_try for replica in self.replicas}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
            if self._vllm.urls:
                break
        for one in waiting:
            one.add_done_callback(lambda late: late.cancelled() or late.exception())

    async def stop(self) -> None:
        """Stops our own servers; others are left as they were."""
        theirs = [replica for replica in self.replicas if replica.is_up and self._vllm.urls]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNLOAD_S):
                await asyncio.gather(*(replica.adapters.unload_all() for replica in theirs))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_change(self, replica: VllmReplica) -> None:
        self._metrics.vllm_up(self._model.name[0], replica.number, is_up=replica.is_up)
        self._came.set()

    @property
    def is_up(self) -> bool:
        return any(replica.is_up for replica in self.replicas)

    @property
    def placed(self) -> int:
        """Returns the number of requests that the servers have."""
        return sum(min(replica.load, self._vllm.max_in_flight) for replica in self.replicas)

    @property
    def queued(self) -> int:
        """Returns how many of these have not begun yet."""
        return sum(replica.queued for replica in self.replicas if replica.is_up)

    # What all of them can do

    @property
    def context(self) -> int | None:
        return min((replica.context for replica in self.replicas if replica.context), default=None)

    def serves(self, part: str) -> bool:
        """`part` is a flag of LoraConfig."""
        known = [replica.abilities for replica in self.replicas if replica.abilities is not None]
        return all(getattr(able, part) for able in known)

    def stand_in(self, replica: VllmReplica) -> VllmAdapter | None:
        """Returns an adapter for the base model, if the server mixes up requests without an adapter."""
        return None if replica.abilities is None or replica.abilities.keeps_base else self._plain

    # Choosing a server

    async def pick(self, prompt: Sequence[int], avoid: VllmReplica | None = None) -> VllmReplica:
        """Returns the server of the prompt's conversation, else the least busy one; waits until one is up. `avoid` is
        used only if it is the only one."""
        try:
            async with asyncio.timeout(self._vllm.wait_s):
                while not (up := [replica for replica in self.replicas if replica.is_up]):
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            why = "; ".join(replica.trouble for replica in self.replicas if replica.trouble)
            raise VllmLost(f"no vLLM server was available for {self._vllm.wait_s:g} s: {why}") from None
        home, up = self._affinity.home(prompt), [replica for replica in up if replica is not avoid] or up
        return next((r for r in up if r.number == home), None) or min(up, key=lambda r: (r.load, r.number))

    def note(self, sequence: Sequence[int], replica: VllmReplica) -> None:
        self._affinity.note(sequence, replica.number)

    # Adapters

    def push(self, adapter: VllmAdapter) -> None:
        """Loads an adapter at every server that is up; one that starts later gets it when it is needed."""
        for replica in self.replicas:
            if replica.is_up:
                self._run(self._push(replica, adapter), f"push {adapter.folder}")

    async def _push(self, replica: VllmReplica, adapter: VllmAdapter) -> None:
        try:
            await replica.adapters.load(adapter)
        except VllmError as e:  # callers that sample from it get the error
            log.warning("an adapter could not be pushed", url=replica.url, error=str(e))

    def drop(self, adapter: VllmAdapter) -> None:
        for replica in self.replicas:
            replica.adapters.drop(adapter)
