"""One vLLM server as we use it: it starts, is tested, watched, lost, and starts again.

Owns: whether it may be used, how many requests at once. Never touches: which requests it gets.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from palestra.config.serve import VllmConfig
from palestra.server.vllm.adapters import LoadedAdapters
from palestra.server.vllm.client import VllmClient
from palestra.server.vllm.errors import VllmError, VllmLost, VllmUnfit
from palestra.server.vllm.probe import LoraTargets, StartupWait
from palestra.server.vllm.process import VllmProcess
from palestra.types.engine import ModelCard

log = structlog.get_logger()

LOOK_S = 5.0
MAX_MISSES = 3  # failed checks in a row
COME_S = 0.25  # between checks of one that is starting
BACK_OFF_S = (0.5, 15.0)
"""Pause before the next try: the first, and the longest one."""

TELL_S = 10.0  # between messages about one that is waited for, at first
MIN_TELLS = 4  # messages before it is given up, however soon that is

LookOver = Callable[[VllmClient, str, StartupWait], Awaitable[LoraTargets]]
"""Takes the client and the name of the base model there."""


class VllmReplica:
    def __init__(
        self,
        number: int,
        vllm: VllmConfig,
        place: VllmProcess | str,
        card: ModelCard,
        look_over: LookOver,
        *,
        owner: Path,
        on_change: Callable[[VllmReplica], None],
        on_load: Callable[[], None],
    ):
        self.number, self._vllm, self._card, self._look_over = number, vllm, card, look_over
        self._process = place if isinstance(place, VllmProcess) else None
        self._owner, self._on_change, self._on_load = owner, on_change, on_load
        self._use(place if isinstance(place, str) else "", vllm.api_key or os.environ.get("VLLM_API_KEY"))
        self.is_up = False
        self.trouble = ""
        """Why it is not up."""
        self.load = 0
        """Number of requests for it, including those that wait for a slot."""
        self.queued = 0
        """Requests that it had not begun at the last check."""
        self.base_name, self.context = "", 0
        self.abilities: LoraTargets | None = None
        self._places = asyncio.Semaphore(vllm.max_in_flight)
        self._doubts = asyncio.Event()
        self.first_try: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Whether it started at all; the exception says why not."""

    def _use(self, url: str, api_key: str | None) -> None:
        self.client = VllmClient(url, api_key, request_s=self._vllm.request_s)
        self.adapters = LoadedAdapters(
            self.client, self._owner, max_loaded=self._vllm.max_adapters, on_load=self._on_load
        )

    @property
    def url(self) -> str:
        return self.client.url

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A slot for a request; waits while all are taken."""
        self.load += 1
        try:
            async with self._places:
                if not self.is_up:
                    raise VllmLost(f"vLLM at {self.url} has ended")
                yield
        finally:
            self.load -= 1

    def doubt(self) -> None:
        """Called if a request got no answer: checks the server now rather than later."""
        self._doubts.set()

    # Life cycle

    async def live(self) -> None:
        """Runs for ever; when cancelled, it leaves nothing behind."""
        first_wait, longest_wait = BACK_OFF_S
        wait_s = first_wait
        while True:
            try:
                await self._come()
                wait_s = first_wait
                await self._stay()
            except VllmError as e:
                self._leave(self._explained(e))
            except Exception as e:
                log.exception("vLLM could not be watched")
                self._leave(f"watching vLLM at {self.url} failed: {e!r}")
            finally:
                self.is_up = False
                await self.client.close()
                if self._process is not None:
                    await self._process.stop()
            await asyncio.sleep(wait_s)
            wait_s = min(longest_wait, wait_s * 2)

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
            raise VllmUnfit(self._given_up(awaited)) from None
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
        said = f"; its log ends: {self._process.last_lines} (see {self._process.log_file})" if self._process else ""
        return f"vLLM at {self.url} was given up {after}{said}"

    async def _get_ready(self, awaited: StartupWait) -> None:
        while not await self.client.is_healthy():
            if self._process is not None and not self._process.is_alive:
                raise VllmLost("vLLM ended")
            await asyncio.sleep(COME_S)
        served = await self.client.models()
        base = next((model for model in served if model.parent is None), None)
        if base is None:
            raise VllmUnfit(f"vLLM at {self.url} serves no model")
        self.base_name, self.context = base.id, base.max_model_len or self._card.max_positions
        self.adapters.meet(model.id for model in served)
        self.abilities = await self._look_over(self.client, base.id, awaited)

    async def _start(self, process: VllmProcess) -> None:
        try:
            await process.start(self._card)
        except OSError as e:
            raise VllmUnfit(f"{self._vllm.python} cannot be run ({e.strerror})") from None
        self._use(process.url, process.api_key)

    async def _stay(self) -> None:
        """Returns when it is lost."""
        misses = 0
        ended = asyncio.create_task(self._process.ended()) if self._process is not None else None
        try:
            while True:
                await self._until_doubt(ended)
                if ended is not None and ended.done():
                    raise VllmLost(f"vLLM at {self.url} ended")
                misses = 0 if await self.client.is_healthy() else misses + 1
                self.queued = 0 if misses else await self.client.queued()
                if misses >= MAX_MISSES or (misses and self._doubts.is_set()):
                    raise VllmLost(f"vLLM at {self.url} does not answer any more")
                self._doubts.clear()
        finally:
            if ended is not None:
                ended.cancel()

    async def _until_doubt(self, ended: asyncio.Task[None] | None) -> None:
        doubts = asyncio.create_task(self._doubts.wait())
        await asyncio.wait({doubts, *filter(None, (ended,))}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        doubts.cancel()

    def _explained(self, error: VllmError) -> str:
        """Adds the reason from the log, if the server is one of ours."""
        if self._process is None or isinstance(error, VllmUnfit):
            return str(error)
        what = "broke" if self.first_try.done() else "did not start"
        return f"vLLM {what}: {self._process.last_output} (see {self._process.log_file})"

    def _leave(self, why: str) -> None:
        was_up, self.is_up, self.trouble = self.is_up, False, why
        log.warning("vLLM is not available", url=self.url, why=why)
        if not self.first_try.done():
            self.first_try.set_exception(VllmUnfit(why))
        if was_up:
            self._on_change(self)
