"""An endpoint of one or several equivalent URLs: where a session's calls go, and how often they are tried.

A session has a replica of its own, by a hash of its id. A call is tried `max_attempts` times, and once more for each
further replica:

no answer       tried at once at another replica that is up, else after a pause
a status        those in BUSY as often as allowed, 500 three times, others once; after those in AWAY at another replica
a time limit    never tried again: the replica may still be computing

A replica that gave no connection, no answer in time or a status in AWAY is not used for DOWN_S seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic, time
from typing import Any

import orjson

from palestra.gym.errors import BadAnswer, PeerFailed, UnreachableServer
from palestra.gym.models.settings import CommonSettings
from palestra.gym.wire import encoded
from palestra.net.http_client import AnswerTooLarge, CallFailed, HttpClient, HttpReply, NoConnection
from palestra.types.gym_failures import FailureClass
from palestra.util.backoff import Backoff, retry_after_s
from palestra.util.json_types import JsonObject, JsonPayload

logger = logging.getLogger(__name__)

BUSY = frozenset({429, 502, 503, 504, 520})
AWAY = frozenset({502, 503})
"""Statuses of a replica that is unavailable: others are used meanwhile."""
BESIDE = frozenset({"/tokenize"})
"""Paths that are not below the API's version."""
BROKEN_TRIES = 3  # of a status 500: a second one is seldom an accident, a third never
DOWN_S = 5.0  # a replica that gave no connection is not used for so long
MAX_WAIT_S = 15.0
MAX_ANSWER_BYTES = 1 << 28
TRANSPORT_LOG = "NEMO_GYM_VLLM_TRANSPORT_LOG"
"""An environment variable that names a file for every request and answer, to find out what an endpoint really
returned."""


@dataclass(slots=True)
class UpstreamReplica:
    url: str
    down_until: float = 0.0


class Upstream:
    def __init__(self, urls: list[str], headers: Mapping[str, str], settings: CommonSettings) -> None:
        self.replicas = [UpstreamReplica(url.rstrip("/")) for url in urls]
        self.counts: Counter[str] = Counter()
        """`calls`, `retries`, `failed`, `affinity_lost` (calls that went elsewhere than their session's replica)."""
        self._client = HttpClient(timeout_s=settings.request_timeout_s, headers=headers)
        self._settings = settings
        self._backoff = Backoff(settings.retry_wait_s, MAX_WAIT_S, spread=0.5)
        bound = settings.max_concurrent_requests
        self._gate: AbstractAsyncContextManager[Any] = nullcontext() if bound is None else asyncio.Semaphore(bound)
        self._log = os.environ.get(TRANSPORT_LOG)

    async def close(self) -> None:
        await self._client.close()

    async def post(self, session_id: str, path: str, body: JsonPayload) -> JsonObject:
        """Returns the answer, a JSON object. Raises PeerFailed, UnreachableServer."""
        payload = encoded(body)
        self.counts["calls"] += 1
        try:
            async with self._gate:
                replica, reply = await self._tried(self._home(session_id), path, payload)
        except Exception:  # boundary: only counted, then raised
            self.counts["failed"] += 1
            raise
        return _parsed(replica.url, path, reply.body)

    async def _tried(self, home: int, path: str, payload: bytes) -> tuple[UpstreamReplica, HttpReply]:
        attempts, limit = 0, self._settings.max_attempts + len(self.replicas) - 1
        while True:
            replica = self._pick(home, attempts)
            attempts += 1
            try:
                reply = await self._sent(replica, path, payload)
            except AnswerTooLarge as e:
                raise BadAnswer(replica.url, path, str(e), e.beginning) from None
            except CallFailed as e:  # another replica may be tried at once
                # otherwise an idle connection may have been closed just then
                if attempts > 1 or isinstance(e, NoConnection):
                    replica.down_until = monotonic() + DOWN_S
                if attempts >= limit:
                    reason = f"{e}; {attempts} attempts"
                    raise UnreachableServer(replica.url, reason, FailureClass.MODEL_UNREACHABLE) from None
                wait_s = 0.0 if self._is_any_up() else self._backoff.after(attempts)
            else:
                if self._log is not None:
                    await asyncio.to_thread(_append, self._log, replica.url + path, payload, reply)
                if 200 <= reply.status < 300:
                    return replica, reply
                if attempts >= min(limit, _tries(reply.status, limit)):
                    kind = FailureClass.MODEL_RATE_LIMITED if reply.status == 429 else FailureClass.MODEL_ERROR
                    raise PeerFailed(replica.url, path, reply.status, reply.body, kind)
                wait_s = max(self._backoff.after(attempts), retry_after_s(reply.headers.get("retry-after")))
                if reply.status in AWAY and len(self.replicas) > 1:
                    replica.down_until = monotonic() + DOWN_S
                    wait_s = 0.0 if self._is_any_up() else wait_s
            self.counts["retries"] += 1
            await asyncio.sleep(wait_s)

    async def _sent(self, replica: UpstreamReplica, path: str, payload: bytes) -> HttpReply:
        base = replica.url.removesuffix("/v1") if path in BESIDE else replica.url
        try:
            return await self._client.post(base + path, payload, max_bytes=MAX_ANSWER_BYTES)
        except TimeoutError:  # it may still be computing: a second attempt would only add load
            replica.down_until = monotonic() + DOWN_S
            reason = f"{path} was not answered within {self._settings.request_timeout_s:g} s"
            raise UnreachableServer(replica.url, reason, FailureClass.MODEL_TIMEOUT) from None

    # Which replica

    def _home(self, session_id: str) -> int:
        """Returns the same replica for a session in every process and after every restart, because its prefix is in
        that replica's cache."""
        if len(self.replicas) == 1:
            return 0
        return int.from_bytes(sha256(session_id.encode()).digest()[:8], "big") % len(self.replicas)

    def _pick(self, home: int, attempts: int) -> UpstreamReplica:
        """Returns the session's own replica unless it is down; then the next one that is not, or each in turn if all
        are."""
        now, count = monotonic(), len(self.replicas)
        for step in range(count):
            at = (home + step) % count
            if self.replicas[at].down_until <= now:
                break
        else:
            at = (home + attempts) % count
        if at != home:
            self.counts["affinity_lost"] += 1
        return self.replicas[at]

    def _is_any_up(self) -> bool:
        now = monotonic()
        return any(one.down_until <= now for one in self.replicas)


def _append(log: str, url: str, payload: bytes, reply: HttpReply) -> None:
    line = {"at": time(), "url": url, "status": reply.status}
    line |= {"request": payload.decode(), "response": reply.body.decode(errors="replace")}
    try:
        with Path(log).open("ab") as file:
            file.write(encoded(line) + b"\n")
    except OSError as e:
        logger.warning("%s: %s", log, e)


def _tries(status: int, limit: int) -> int:
    """Returns how often a call is sent that gets this status each time."""
    return limit if status in BUSY else BROKEN_TRIES if status == 500 else 1


def _parsed(url: str, path: str, data: bytes) -> JsonObject:
    try:
        answer = orjson.loads(data)
    except ValueError:
        raise BadAnswer(url, path, "the answer is not JSON", data) from None
    if not isinstance(answer, dict):
        raise BadAnswer(url, path, "the answer is not a JSON object", data)
    return answer
