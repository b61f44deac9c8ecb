"""One vLLM server as we use it: it starts, is tested, watched, lost, and starts again.

Unlike a worker or a server of a gym, it may run elsewhere and belong to others: then being lost and found again is
all there is to a restart, and each time it is tested anew for what it can do.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from palestra.config.serve import VllmConfig
from palestra.server.core.checkpoints.adapter_transfers import AdapterTransfers, TransferredAdapter
from palestra.server.replicas.errors import ReplicaError, ReplicaLost, ReplicaUnfit, UnknownAdapter
from palestra.server.replicas.loaded_adapters import LoadedAdapters
from palestra.server.replicas.replica import Replica, Tell
from palestra.server.vllm.client import VllmClient
from palestra.server.vllm.params import ServedModelFacts
from palestra.server.vllm.probe import CapabilityProbe, LoraTargets, StartupWait, look_over
from palestra.server.vllm.process import VllmProcess
from palestra.server.vllm.sample_call import sample_once
from palestra.types.engine import ModelCard, Sample, Sampled
from palestra.util.backoff import Backoff

log = structlog.get_logger()

LOOK_S = 5.0
MAX_MISSES = 3  # failed checks in a row
COME_S = 0.25  # between checks of one that is starting
RESTARTS = Backoff(0.5, 15.0)
"""Pause before the next try: the first, and the longest one."""

TELL_S = 10.0  # between messages about one that is waited for, at first
MIN_TELLS = 4  # messages before it is given up, however soon that is

UNLOAD_S = 5.0


@dataclass(frozen=True, slots=True)
class VllmContext:
    """What the vLLM servers of a model share."""

    vllm: VllmConfig
    card: ModelCard
    transfers: AdapterTransfers
    trials: CapabilityProbe
    prefix: str
    """Begins the names of adapters: others may load some there, too."""
    on_change: Callable[[Replica], None]
    on_load: Callable[[], None]


class VllmReplica(Replica):
    def __init__(self, number: int, place: VllmProcess | str, context: VllmContext, *, api_key: str | None = None):
        super().__init__(number, max_in_flight=context.vllm.max_in_flight)
        self._vllm, self._card, self._shared = context.vllm, context.card, context
        self._on_change = context.on_change
        self._process = place if isinstance(place, VllmProcess) else None
        self._use(place if isinstance(place, str) else "", api_key)
        self.base_name, self.context = "", 0
        self.abilities: LoraTargets | None = None
        self._doubts = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self.first_try: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Whether it started at all; the exception says why not."""

    def _use(self, url: str, api_key: str | None) -> None:
        self.client = VllmClient(url, api_key, request_s=self._vllm.request_s)
        self.adapters = LoadedAdapters(
            self, prefix=self._shared.prefix, max_loaded=self._vllm.max_adapters, on_load=self._shared.on_load
        )

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def where(self) -> str:
        return f"vLLM at {self.url}"

    def doubt(self) -> None:
        self._doubts.set()

    # Samples

    def stand_in(self) -> TransferredAdapter | None:
        return None if self.abilities is None or self.abilities.keeps_base else self._shared.trials.plain

    async def sample(self, sample: Sample, adapter: str | None, tell: Tell) -> Sampled:
        if not self.is_up:
            raise ReplicaLost(f"{self.where} has ended")
        started, card = time.monotonic(), self._card
        facts = ServedModelFacts(self.context or card.max_positions, card.vocab_size, card.eos_token_ids)
        result = await sample_once(self.client, adapter or self.base_name, sample, facts, tell)
        return Sampled(request_id=sample.request_id, outcome=result, compute_s=time.monotonic() - started)

    async def load_adapter(self, name: str, adapter: TransferredAdapter) -> None:
        with self._shared.transfers.reading(adapter.digest):
            try:
                await self.client.load(name)
            except UnknownAdapter as e:  # it could not be fetched
                raise ReplicaLost(f"{self.where} did not get an adapter: {e}") from None

    async def unload_adapter(self, name: str) -> None:
        await self.client.unload(name)

    # Life cycle

    def start(self) -> None:
        """Begins; `first_try` says how it went."""
        self._life = asyncio.create_task(self._live(), name=f"vLLM {self.number}")

    async def stop(self) -> None:
        """Ends a server of our own; another one is left as it was."""
        if self.is_up and self._process is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UNLOAD_S):
                    await self.adapters.unload_all()
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)

    async def _live(self) -> None:
        """Runs for ever; when cancelled, it leaves nothing behind."""
        pauses = RESTARTS.pauses()
        while True:
            try:
                await self._come()
                pauses = RESTARTS.pauses()
                await self._stay()
            except ReplicaError as e:
                self._leave(self._explained(e))
            except Exception as e:
                log.exception("vLLM could not be watched")
                self._leave(f"watching vLLM at {self.url} failed: {e!r}")
            finally:
                self.is_up = False
                await self.client.close()
                if self._process is not None:
                    await self._process.stop()
            await asyncio.sleep(next(pauses))

    async def _come(self) -> None:
        """Starts it if it is ours, waits for it, and tests it."""
        if self._process is not None:
            await self._start(self._process)
        awaited = StartupWait("the server to be ready", "start_s")
        try:
            async with asyncio.timeout(None) as patience:
                telling = asyncio.create_task(self._tell(awaited, patience), name=f"waiting for vLLM {self.number}")
                try:
                    await self._get_ready(awaited)
                finally:
                    telling.cancel()
        except TimeoutError:
            raise ReplicaUnfit(self._given_up(awaited)) from None
        self.is_up, self.trouble = True, ""
        log.info("vLLM is ready", url=self.url, model=self.base_name, context=self.context)
        if not self.first_try.done():
            self.first_try.set_result(None)
        self._on_change(self)

    async def _tell(self, awaited: StartupWait, patience: asyncio.Timeout) -> None:
        """Reports that it is waited for, less often as it takes longer; ends the waiting if it takes too long."""
        while awaited.seconds < self._limit_s(awaited):
            self.trouble = f"vLLM at {self.url}: waiting for {awaited.what}"
            log.info("waiting for vLLM", url=self.url, what=awaited.what, seconds=round(awaited.seconds))
            while await awaited.changes_within(self._pause_s(awaited)):
                pass  # no message about what is quick
        patience.reschedule(asyncio.get_running_loop().time())

    def _pause_s(self, awaited: StartupWait) -> float:
        limit_s, seconds = self._limit_s(awaited), awaited.seconds
        return min(max(TELL_S, seconds / 2), limit_s / MIN_TELLS, limit_s - seconds)

    def _limit_s(self, awaited: StartupWait) -> float:
        return getattr(self._vllm, awaited.limit)

    def _given_up(self, awaited: StartupWait) -> str:
        """Returns an error text; the reason may be at the end of its log."""
        after = f"after {self._limit_s(awaited):g} s (vllm.{awaited.limit}) of waiting for {awaited.what}"
        log_end = f"; its log ends: {self._process.last_lines} (see {self._process.log_file})" if self._process else ""
        return f"vLLM at {self.url} was given up {after}{log_end}"

    async def _get_ready(self, awaited: StartupWait) -> None:
        while not await self.client.is_healthy():
            if self._process is not None and not self._process.is_alive:
                raise ReplicaLost("vLLM ended")
            await asyncio.sleep(COME_S)
        served = await self.client.models()
        base = next((model for model in served if model.parent is None), None)
        if base is None:
            raise ReplicaUnfit(f"vLLM at {self.url} serves no model")
        self.base_name, self.context = base.id, base.max_model_len or self._card.max_positions
        self.adapters.meet(model.id for model in served)
        shared = self._shared
        self.abilities = await look_over(self.client, base.id, shared.prefix, shared.vllm, shared.trials, awaited)

    async def _start(self, process: VllmProcess) -> None:
        try:
            await process.start(self._card)
        except OSError as e:
            raise ReplicaUnfit(f"{self._vllm.python} cannot be run ({e.strerror})") from None
        self._use(process.url, process.api_key)

    async def _stay(self) -> None:
        """Returns when it is lost."""
        misses = 0
        ended = asyncio.create_task(self._process.ended()) if self._process is not None else None
        try:
            while True:
                await self._until_doubt(ended)
                if ended is not None and ended.done():
                    raise ReplicaLost(f"vLLM at {self.url} ended")
                misses = 0 if await self.client.is_healthy() else misses + 1
                self.queued = 0 if misses else await self.client.queued()
                if misses >= MAX_MISSES or (misses and self._doubts.is_set()):
                    raise ReplicaLost(f"vLLM at {self.url} does not answer any more")
                self._doubts.clear()
        finally:
            if ended is not None:
                ended.cancel()

    async def _until_doubt(self, ended: asyncio.Task[None] | None) -> None:
        doubts = asyncio.create_task(self._doubts.wait())
        await asyncio.wait({doubts, *filter(None, (ended,))}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        doubts.cancel()

    def _explained(self, error: ReplicaError) -> str:
        """Adds the reason from the log, if the server is one of ours."""
        if self._process is None or isinstance(error, ReplicaUnfit):
            return str(error)
        what = "broke" if self.first_try.done() else "did not start"
        return f"vLLM {what}: {self._process.last_output} (see {self._process.log_file})"

    def _leave(self, why: str) -> None:
        was_up, self.is_up, self.trouble = self.is_up, False, why
        log.warning("vLLM is not available", url=self.url, why=why)
        if not self.first_try.done():
            self.first_try.set_exception(ReplicaUnfit(why))
        if was_up:
            self._on_change(self)
