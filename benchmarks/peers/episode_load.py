"""Trainers and players of the benchmark of episodes: hand-framed requests over kept connections, so that little of the
machine goes to them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

API = "/episodes/v1"
BACKLOG_AT_ONCE = 1000  # groups in one call: some 400 kB
TASK = (
    '{"id":"t","environment":"arithmetic","prompt":[{"role":"user",'
    '"content":"What is 17 + 25? Think about it step by step, then give the number alone."}],"extras":{"answer":"42"}}'
)
GROUP = '{"group_id":"%s","size":1,"task":' + TASK + "}"
END = '{"episode_id":"%s","attempt":%d,"result":{"reward":1.0,"metrics":{"turns":3}}}'


class _Ref(msgspec.Struct):
    episode_id: str
    attempt: int


class _Claimed(msgspec.Struct):
    leases: list[_Ref]


class _Ended(msgspec.Struct):
    status: str


class _EndedAll(msgspec.Struct):
    ended: list[_Ended]


class _Run(msgspec.Struct):
    delivered: int
    queued: int


_claimed = msgspec.json.Decoder(_Claimed)
_ended = msgspec.json.Decoder(_EndedAll)
_run = msgspec.json.Decoder(_Run)


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the server hung up"))

    def data_received(self, data: bytes) -> None:
        self._heard += data
        head, found, body = self._heard.partition(b"\r\n\r\n")
        if not found or len(body) < _length(head) or self._answer is None:
            return
        self._heard = b""
        if head.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 201 ")):
            self._answer.set_result(body)
        else:
            self._answer.set_exception(RuntimeError(f"{head.splitlines()[0].decode()}: {body[:300].decode()}"))

    async def ask(self, method: str, path: str, body: str = "") -> bytes:
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _length(head: bytes) -> int:
    return int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])


@dataclass(frozen=True, slots=True)
class Load:
    workers: int
    batch: int
    """Episodes in each call."""
    seconds: float
    """No worker begins another cycle after that."""
    cycles_per_s: float | None = None
    """All of them together, each in its turn. None: one after another, as fast as they are answered."""


@dataclass(slots=True)
class Played:
    cycles: int = 0
    took_s: float = 0.0
    client_cpu_s: float = 0.0
    calls: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of each, by name."""


R = TypeVar("R")
"""How a claimed one is called."""


@dataclass(slots=True)
class AnyLoad(ABC, Generic[R]):
    """A trainer and its players, at one server."""

    url: str

    @abstractmethod
    def queue(self, count: int) -> None:
        """Forgets what was played, and leaves so many queued."""

    @abstractmethod
    def player(self, client_id: str, connection: Connection) -> AnyPlayer[R]: ...

    def play(self, load: Load) -> Played:
        """Every worker registers, claims and ends, one after another."""
        return asyncio.run(self._play(load))

    async def _play(self, load: Load) -> Played:
        connections = [await self.connect() for _ in range(load.workers)]
        played = Played()
        cpu, start = time.process_time(), time.perf_counter()
        players = [self.player(f"player-{n}", one) for n, one in enumerate(connections)]
        turns = (_Turns(load, start, number) for number in range(load.workers))
        await asyncio.gather(*(one.work(load.batch, played, turn) for one, turn in zip(players, turns, strict=True)))
        played.took_s, played.client_cpu_s = time.perf_counter() - start, time.process_time() - cpu
        for connection in connections:
            connection.close()
        return played

    async def connect(self) -> Connection:
        where, loop = urlsplit(self.url), asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, where.hostname or "localhost", where.port or 80)
        return connection


@dataclass(slots=True)
class AnyPlayer(ABC, Generic[R]):
    client_id: str
    connection: Connection

    async def work(self, batch: int, played: Played, turns: _Turns) -> None:
        while await turns.next():
            begun = time.perf_counter()
            await self.register(batch)
            registered = time.perf_counter()
            claimed_ones = await self.claim(batch)
            claimed = time.perf_counter()
            if len(claimed_ones) != batch:  # everybody has registered as many before
                raise RuntimeError(f"{batch} episodes were claimed, {len(claimed_ones)} came")
            await self.end(claimed_ones)
            over = time.perf_counter()
            played.calls["register"].append(registered - begun)
            played.calls["claim"].append(claimed - registered)
            played.calls["end"].append(over - claimed)
            played.cycles += batch

    @abstractmethod
    async def register(self, count: int) -> None: ...

    @abstractmethod
    async def claim(self, count: int) -> list[R]: ...

    @abstractmethod
    async def end(self, claimed: Sequence[R]) -> None: ...


@dataclass(slots=True)
class _Turns:
    """When a player begins its cycles."""

    load: Load
    start: float
    number: int
    """Of the player."""
    _begun: int = 0

    async def next(self) -> bool:
        if self.load.cycles_per_s is not None:
            due = self.start + (self._begun * self.load.workers + self.number) / self.load.cycles_per_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self._begun += 1
        return time.perf_counter() < self.start + self.load.seconds


@dataclass(slots=True)
class EpisodeLoad(AnyLoad[_Ref]):
    """Ours, all of one run."""

    run: str
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def queue(self, count: int) -> None:
        asyncio.run(self._queue(count))

    def player(self, client_id: str, connection: Connection) -> AnyPlayer[_Ref]:
        return _Player(client_id, connection, self)

    def groups(self, count: int) -> str:
        """A body with so many new ones."""
        groups = ",".join(GROUP % f"g-{self.next_number()}" for _ in range(count))
        return f'{{"groups":[{groups}]}}'

    def next_number(self) -> int:
        return next(self._numbers)

    async def _queue(self, count: int) -> None:
        connection = await self.connect()
        settings = '{"settings":{"max_queued":1000000,"max_ready":1000000}}'
        info = _run.decode(await connection.ask("PUT", f"{API}/runs/{self.run}", settings))
        if info.delivered:
            await connection.ask("POST", f"{API}/runs/{self.run}/commit", f'{{"cursor":{info.delivered}}}')
        while (missing := count - info.queued) > 0:
            await connection.ask("POST", f"{API}/runs/{self.run}/groups", self.groups(min(missing, BACKLOG_AT_ONCE)))
            info = _run.decode(await connection.ask("GET", f"{API}/runs/{self.run}"))
        connection.close()


@dataclass(slots=True)
class _Player(AnyPlayer[_Ref]):
    load: EpisodeLoad

    async def register(self, count: int) -> None:
        await self.connection.ask("POST", f"{API}/runs/{self.load.run}/groups", self.load.groups(count))

    async def claim(self, count: int) -> list[_Ref]:
        ask = '{"client_id":"%s","claim_id":"c-%d","run":"%s","max_n":%d}'
        body = ask % (self.client_id, self.load.next_number(), self.load.run, count)
        return _claimed.decode(await self.connection.ask("POST", f"{API}/claim", body)).leases

    async def end(self, claimed: Sequence[_Ref]) -> None:
        ends = ",".join(END % (one.episode_id, one.attempt) for one in claimed)
        body = f'{{"client_id":"{self.client_id}","ends":[{ends}]}}'
        answer = await self.connection.ask("POST", f"{API}/end", body)
        if any(one.status != "accepted" for one in _ended.decode(answer).ended):
            raise RuntimeError(f"an end was not accepted: {answer[:300].decode()}")
