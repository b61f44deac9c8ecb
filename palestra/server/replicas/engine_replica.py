"""A replica that is a process of our own engine, here or elsewhere: it samples from adapters that it is sent."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from palestra.server.core.background import Background
from palestra.server.core.checkpoints.adapter_transfers import AdapterTransfers, TransferredAdapter
from palestra.server.replicas.errors import ReplicaLost
from palestra.server.replicas.loaded_adapters import LoadedAdapters
from palestra.server.replicas.replica import Replica, Tell
from palestra.types.engine import (
    PART_BYTES,
    AdapterPart,
    AdapterPlaced,
    BaseModel,
    CancelSample,
    DropAdapters,
    FromWorker,
    GetAdapterPart,
    Hello,
    Leaving,
    PlaceAdapter,
    PlacedAdapter,
    Sample,
    Sampled,
    Stats,
    Stop,
    Streamed,
    ToWorker,
)

log = structlog.get_logger()

LOAD_S = 600.0  # a large adapter over a slow line


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    answer: asyncio.Future[Sampled]
    tell: Tell


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """What the replicas of a model share."""

    model: str
    transfers: AdapterTransfers
    max_in_flight: int
    max_adapters: int
    on_change: Callable[[Replica], None]
    on_load: Callable[[], None]


class EngineReplica(Replica):
    def __init__(self, number: int, where: str, context: ReplicaContext):
        super().__init__(number, max_in_flight=context.max_in_flight)
        self._where, self._transfers, self._on_change = where, context.transfers, context.on_change
        self.adapters = LoadedAdapters(self, max_loaded=context.max_adapters, on_load=context.on_load)
        self._running: dict[str, ReplicaSample] = {}
        self._placing: dict[str, asyncio.Future[None]] = {}
        self._is_leaving = False
        self._reading = Background()

    @property
    def where(self) -> str:
        return self._where

    @abstractmethod
    def _send(self, message: ToWorker) -> None:
        """Sends a message; it is dropped if there is no connection."""

    async def stop(self) -> None:
        self.is_up = False
        self._break_off("the server is being stopped")
        await self._reading.settle_down()

    # Samples

    async def sample(self, sample: Sample, adapter: str | None, tell: Tell) -> Sampled:
        if not self.is_up:
            raise ReplicaLost(self.trouble)
        weights = BaseModel() if adapter is None else PlacedAdapter(digest=adapter)
        answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._running[sample.request_id] = ReplicaSample(answer, tell)
        self._send(msgspec.structs.replace(sample, weights=weights))
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(CancelSample(request_id=sample.request_id))
            raise
        finally:
            self._running.pop(sample.request_id, None)
            self._dismiss_if_idle()

    # Adapters

    async def load_adapter(self, name: str, adapter: TransferredAdapter) -> None:
        if not self.is_up:
            raise ReplicaLost(self.trouble)
        placed = self._placing[name] = asyncio.get_running_loop().create_future()
        try:
            with self._transfers.reading(adapter.digest):
                self._send(PlaceAdapter(digest=adapter.digest))
                async with asyncio.timeout(LOAD_S):
                    await placed
        except TimeoutError:
            raise ReplicaLost(f"{self.where} did not get an adapter within {LOAD_S:g} s") from None
        finally:
            self._placing.pop(name, None)

    async def unload_adapter(self, name: str) -> None:
        self._send(DropAdapters(digests=[name]))

    async def _send_part(self, wanted: GetAdapterPart) -> None:
        with self._transfers.reading(wanted.digest) as file:
            data, size = b"", 0
            if file is not None:
                data, size = await asyncio.to_thread(_read_part, file, wanted.offset)
            self._send(
                AdapterPart(
                    transfer_id=wanted.digest,
                    digest=wanted.digest,
                    size_bytes=size,
                    offset=wanted.offset,
                    data=data,
                )
            )

    # What it says

    def greet(self, hello: Hello) -> None:
        """Greets a replica that is up and is a new process, or has forgotten its samples."""
        self.lose(f"{self.where} was started again")
        self.adapters.meet(hello.placed)
        self.is_up, self.trouble, self._is_leaving, self.queued = True, "", False, 0
        log.info("a replica is ready", replica=self.where, device=hello.card.device)
        self._on_change(self)

    def greet_again(self) -> None:
        """The connection was interrupted, and what was sent meanwhile is lost: samples go elsewhere."""
        for request_id in self._running:
            self._send(CancelSample(request_id=request_id))
        self._break_off(f"the connection to {self.where} was interrupted")

    def receive(self, message: FromWorker) -> None:
        match message:
            case Sampled(request_id=request_id):
                running = self._running.get(request_id)
                if running is not None and not running.answer.done():
                    running.answer.set_result(message)
            case Streamed():
                self._pass_on(message)
            case AdapterPlaced(digest=digest, error=error):
                placing = self._placing.get(digest)
                if placing is not None and not placing.done():
                    if error:
                        placing.set_exception(ReplicaLost(f"{self.where}: {error}"))
                    else:
                        placing.set_result(None)
            case GetAdapterPart():
                self._reading.run(self._send_part(message))
            case Stats(waiting_samples=waiting):
                self.queued = waiting
            case Leaving():
                log.info("a replica leaves", replica=self.where, samples=len(self._running))
                self.is_up, self._is_leaving, self.trouble = False, True, f"{self.where} was asked to end"
                self._on_change(self)
                self._dismiss_if_idle()

    def _pass_on(self, streamed: Streamed) -> None:
        for part in streamed.parts:
            running = self._running.get(part.request_id)
            if running is not None:
                running.tell(Streamed(parts=[part]))

    def _dismiss_if_idle(self) -> None:
        if self._is_leaving and not self._running:
            self._send(Stop())

    def lose(self, why: str) -> None:
        """Gives up on a replica that has ended or does not answer: its samples go elsewhere."""
        was_up, self.is_up, self.trouble = self.is_up, False, why
        self._break_off(why)
        if was_up:
            log.warning("a replica is lost", replica=self.where, why=why)
            self._on_change(self)

    def _break_off(self, why: str) -> None:
        for future in (*(running.answer for running in self._running.values()), *self._placing.values()):
            if not future.done():
                future.set_exception(ReplicaLost(why))


def _read_part(file: Path, offset: int) -> tuple[bytes, int]:
    """A part of a file, and the size of the whole."""
    with file.open("rb") as stream:
        stream.seek(offset)
        return stream.read(PART_BYTES), file.stat().st_size
