"""Makes the model calls of one attempt with the attempt's own key, and repeats them while the server or the trainer is
not available.

Owns: one connection, which errors are retried. Never touches: the content of calls.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from functools import cache
from itertools import count
from types import TracebackType

import httpx
from msgspec import Struct

from palestra.episodes import AsyncEpisode, EpisodeApiError
from palestra.types import StopReason
from palestra.types.rollouts import Message

COME_BACK = {408, 429, 500, 502, 503, 504}
OVER = {401, 409}
"""Statuses that mean that this client no longer holds the attempt."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0
CALL_S = 3600.0  # a lease does not age while its call runs, so the rollout's own time limit decides
CONNECT_S = 10.0
USED_UP = {"context_length_exceeded", "quota_exceeded"}


class CallRefused(Exception):
    """A call was refused, and repeating it will not help."""

    def __init__(self, detail: str, code: str = "") -> None:
        super().__init__(detail)
        self.is_used_up = code in USED_UP
        """Whether the episode has used up its tokens or calls; its reward so far counts."""


class CallAnswer(Struct):
    message: Message
    stop: StopReason
    tokens: int
    """Number of tokens of prompt and answer together."""
    seconds: float = 0.0
    """Duration of the try that was answered: waiting for an absent server or trainer does not count against the
    episode."""

    @property
    def text(self) -> str:
        return self.message.get("content") or ""


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading the certificates takes longer than a call


class AttemptModelCalls:
    def __init__(self, episode: AsyncEpisode) -> None:
        self._episode = episode
        self._count = 0
        self._http = httpx.AsyncClient(
            base_url=episode.base_url,
            headers={"Authorization": f"Bearer {episode.api_key}"},
            timeout=httpx.Timeout(CALL_S, connect=CONNECT_S),
            verify=_tls(),
        )

    async def chat(self, messages: list[Message], limit_s: float, **options: object) -> CallAnswer:
        """Makes a chat call. Raises CallRefused, TimeoutError if a try takes longer than `limit_s`, and EpisodeApiError
        if the attempt is over."""
        body = {"model": self._episode.model, "messages": messages, **options}
        self._count += 1
        # with the same key a repeated request is the same call
        key = f"{self._episode.id}#{self._episode.attempt}-{self._count}"
        delay_s = FIRST_DELAY_S
        for tries in count():
            waits_s = delay_s
            headers = {"Idempotency-Key": key, "X-Stainless-Retry-Count": str(tries)}
            began_s = time.perf_counter()
            try:
                async with asyncio.timeout(limit_s):
                    got = await self._http.post("/chat/completions", json=body, headers=headers)
            except httpx.TransportError:
                pass
            else:
                if got.status_code not in COME_BACK or got.headers.get("x-should-retry") == "false":
                    answer = self._read(got)
                    answer.seconds = time.perf_counter() - began_s
                    return answer
                waits_s = max(delay_s, _retry_after_s(got))
            if not self._episode.can_continue:
                raise EpisodeApiError(409, self._episode.reason, "POST /chat/completions")
            await asyncio.sleep(waits_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        raise AssertionError

    def _read(self, got: httpx.Response) -> CallAnswer:
        try:
            body = got.json()
            if got.is_success:
                choice = body["choices"][0]
                stop = StopReason.LENGTH if choice["finish_reason"] == "length" else StopReason.STOP
                message = {key: value for key, value in choice["message"].items() if value is not None}
                return CallAnswer({"role": "assistant", "content": "", **message}, stop, body["usage"]["total_tokens"])
            error = body["error"]
            detail, code = str(error["message"]), str(error.get("code") or "")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            detail, code = f"{got.status_code} {got.reason_phrase}: this is not the answer of a model endpoint", ""
        if got.status_code in OVER:
            self._episode.held_lease.lose(detail)
            raise EpisodeApiError(got.status_code, detail, "POST /chat/completions")
        raise CallRefused(detail, code)

    async def __aenter__(self) -> AttemptModelCalls:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()


def _retry_after_s(got: httpx.Response) -> float:
    try:
        return min(max(float(got.headers.get("retry-after", 0)), 0.0), 60.0)
    except ValueError:
        return 0.0
