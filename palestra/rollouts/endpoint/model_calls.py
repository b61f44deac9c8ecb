"""Makes chat calls to a model endpoint for one rollout, and repeats them while the endpoint is not available."""

from __future__ import annotations

import asyncio
import ssl
import time
from functools import cache
from types import TracebackType
from typing import Protocol

import httpx

from palestra.net.chat_apis import CallAnswer, ChatApi, NotAnAnswer, error_of
from palestra.types.rollouts import Message
from palestra.util.backoff import Backoff, retry_after_s

COME_BACK = {408, 429, 500, 502, 503, 504, 529}  # 529: Anthropic is overloaded
OVER = {401, 409}
"""Statuses that mean that the caller may make no calls any more: its key is not valid, or its attempt is over."""
RETRIES = Backoff(0.2, 5.0)
CALL_S = 3600.0  # a lease does not age while its call runs, so the rollout's own time limit decides
CONNECT_S = 10.0
USED_UP = {"context_length_exceeded", "quota_exceeded"}


class CallRefused(Exception):
    """A call was refused, and repeating it will not help."""

    def __init__(self, detail: str, code: str = "") -> None:
        super().__init__(detail)
        self.is_used_up = code in USED_UP
        """Whether the episode has used up its tokens or calls; its reward so far counts."""


class ModelCaller(Protocol):
    """The caller: an attempt of an episode, or an evaluation."""

    @property
    def base_url(self) -> str: ...

    @property
    def api_key(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def api(self) -> ChatApi: ...

    @property
    def call_name(self) -> str:
        """Begins the idempotency keys of its calls, so that a repeated request is the same call."""
        ...

    def check(self, waited_s: float) -> None:
        """Called before a call is repeated that has waited this long. Raises an error if it should not be."""
        ...

    def over(self, status: int, detail: str) -> Exception:
        """Returns the error to raise after an answer with one of the statuses `OVER`."""
        ...


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading the certificates takes longer than a call


class ModelCalls:
    def __init__(self, caller: ModelCaller) -> None:
        self._caller = caller
        self._count = 0
        self._http = httpx.AsyncClient(
            base_url=caller.base_url,
            headers=caller.api.headers(caller.api_key),
            timeout=httpx.Timeout(CALL_S, connect=CONNECT_S),
            verify=_tls(),
        )

    async def chat(self, messages: list[Message], limit_s: float, **options: object) -> CallAnswer:
        """Makes a chat call. Raises CallRefused, TimeoutError if a try takes longer than `limit_s`, and the caller's
        own error if it may make no calls any more."""
        api = self._caller.api
        body = api.body(self._caller.model, messages, options)
        self._count += 1
        key = f"{self._caller.call_name}-{self._count}"
        first_s = time.perf_counter()
        for tries, waits_s in enumerate(RETRIES.pauses()):
            headers = {"Idempotency-Key": key, "X-Stainless-Retry-Count": str(tries)}
            began_s = time.perf_counter()
            try:
                async with asyncio.timeout(limit_s):
                    got = await self._http.post(api.path, json=body, headers=headers)
            except httpx.TransportError:
                pass
            else:
                if got.status_code not in COME_BACK or got.headers.get("x-should-retry") == "false":
                    answer = self._read(got)
                    answer.seconds = time.perf_counter() - began_s
                    return answer
                waits_s = max(waits_s, retry_after_s(got.headers.get("retry-after")))
            self._caller.check(time.perf_counter() - first_s)
            await asyncio.sleep(waits_s)
        raise AssertionError

    def _read(self, got: httpx.Response) -> CallAnswer:
        try:
            body = got.json()
            if got.is_success:
                return self._caller.api.answer(body)
            error = error_of(body)
        except (ValueError, NotAnAnswer):
            error = None
        no_answer = f"{got.status_code} {got.reason_phrase}: this is not the answer of a model endpoint"
        detail, code = error or (no_answer, "")
        if got.status_code in OVER:
            raise self._caller.over(got.status_code, detail)
        raise CallRefused(detail, code)

    async def __aenter__(self) -> ModelCalls:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()
