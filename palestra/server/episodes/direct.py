"""Claim, heartbeat, end, release and register without FastAPI and ASGI: the same functions, rights and refusals.

Owns: finding them by their path, who may call them. Never touches: what they do, connections.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect

from palestra.server.auth import TRAINERS, Doorkeeper, as_player
from palestra.server.direct_answers import DirectCall, Exchange
from palestra.server.episodes import calls
from palestra.server.episodes import wire as w
from palestra.server.episodes.access import PLAYERS
from palestra.server.episodes.bodies import Reader
from palestra.server.episodes.routes import GROUPS, PREFIX, RUN, RUN_CHARACTERS, RUN_IN_PATH
from palestra.server.hub import Hub
from palestra.server.logs import current_request
from palestra.store.records import Rights
from palestra.types.episodes import ClaimRequest

MAX_RUNS = 1024  # whose calls are kept ready

Told = tuple[int, bytes, list[tuple[bytes, bytes]]]
"""Status, body, headers."""


class DirectEpisodes:
    def __init__(self, hub: Hub, doorkeeper: Doorkeeper, failed: Callable[[str, BaseException], Told]) -> None:
        """`failed`: what is told of an error, by the path it happened at."""
        self.hub, self.doorkeeper, self.failed = hub, doorkeeper, failed
        self.waiting: set[asyncio.Task[msgspec.Struct]] = set()
        players = (*PLAYERS, Rights.EPISODE)
        found = (
            _Call(self, f"{PREFIX}/claim", Reader(ClaimRequest), PLAYERS, calls.claim),
            _Call(self, f"{PREFIX}/heartbeat", Reader(w.Heartbeat), players, calls.heartbeat),
            _Call(self, f"{PREFIX}/end", Reader(w.Ends), players, calls.end),
            _Call(self, f"{PREFIX}/release", Reader(w.Release), players, calls.release),
        )
        self._calls = {call.route.encode(): call for call in found}
        self._register = _Call(self, f"{PREFIX}{RUN}{GROUPS}", Reader(w.NewGroups), TRAINERS, calls.register)
        before, _, after = self._register.route.partition(RUN_IN_PATH)
        plain = RUN_CHARACTERS.replace("#", "")  # as it is, it would end the path
        self._register_path = re.compile(f"{before}({plain}){after}".encode())
        self._registers: dict[bytes, DirectCall] = {}
        """By paths that were asked for."""

    def find(self, url: bytes) -> DirectCall | None:
        return self._calls.get(url) or self._registers.get(url) or self._register_to(url)

    def _register_to(self, url: bytes) -> DirectCall | None:
        if (found := self._register_path.fullmatch(url)) is None:
            return None
        if len(self._registers) >= MAX_RUNS:
            self._registers.clear()
        call = self._registers[url] = replace(self._register, run=found[1].decode())
        return call


@dataclass(frozen=True, slots=True)
class _Call:
    desk: DirectEpisodes
    route: str
    read: Callable[[bytes], msgspec.Struct]
    rights: tuple[Rights, ...]
    function: Callable[[calls.Asking, Any], calls.Answer]
    run: str = ""

    def begin(self, exchange: Exchange) -> bool:
        hub = self.desk.hub
        try:
            caller = self.desk.doorkeeper.admit_now(exchange.headers, self.rights, time.monotonic())
            if caller is None:
                return False
            if caller.right is Rights.EPISODE:
                caller = as_player(caller)
            asking = calls.Asking(hub, caller, exchange.address, self.run)
            body = self.read(exchange.body)
        except Exception as error:
            self._fail(exchange, error)
            return True
        try:
            answer = self.function(asking, body)
        except Exception as error:  # it waits too: what it speaks of may be new
            answer = partial(_raise, error)
        if isinstance(answer, calls.Later):
            self._answer_later(exchange, answer)
        else:
            hub.episodes.broker.saving.when_saved(partial(self._tell, exchange, answer))
        return True

    def _tell(self, exchange: Exchange, answer: Callable[[], msgspec.Struct], error: BaseException | None) -> None:
        token = current_request.set(exchange.marks)
        try:
            if error is not None:
                raise error
            told = msgspec.json.encode(answer())
        except Exception as failure:
            self._fail(exchange, failure)
        else:
            exchange.reply(200, told)
        finally:
            current_request.reset(token)

    def _answer_later(self, exchange: Exchange, answer: calls.Later) -> None:
        task = asyncio.get_running_loop().create_task(answer.work)
        self.desk.waiting.add(task)
        task.add_done_callback(partial(self._told_later, exchange))
        if answer.is_for_caller:
            exchange.on_gone = task.cancel

    def _told_later(self, exchange: Exchange, task: asyncio.Task[msgspec.Struct]) -> None:
        self.desk.waiting.discard(task)
        error = ClientDisconnect() if task.cancelled() else task.exception()
        self._tell(exchange, task.result, error)

    def _fail(self, exchange: Exchange, error: BaseException) -> None:
        exchange.reply(*self.desk.failed(self.route, error))


def _raise(error: Exception) -> Any:
    raise error
