"""One HTTP exchange with one server, on connections that stay open."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import msgspec

from palestra.episodes.client import loop_thread
from palestra.episodes.client.api import ApiCall
from palestra.episodes.client.errors import ServerSilent

CONNECT_S = 3.0  # a wrong address is reported within 5 s
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=8, keepalive_expiry=15.0)
"""Few idle connections are kept, because httpx looks at all of them with each request: a call beside 15 others took 4.3
ms of CPU with 16 kept connections, and 3.1 ms with 8. They are kept for less time than a call waits, so that after a
call that was lost with its connection no other old connection is tried."""
THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
CUT_OFF = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)

# httpx logs every request at INFO, including heartbeats. This filter drops those of this thread.
logging.getLogger("httpx").addFilter(lambda record: record.threadName != loop_thread.NAME)


class ExchangeBroken(Exception):
    """An exchange failed; the server may have done the work nevertheless."""

    def __init__(self, reason: str, *, is_reached: bool):
        super().__init__(reason)
        self.reason, self.is_reached = reason, is_reached
        """Whether a server was reached at all."""


class HttpExchange:
    """Sends requests to one server. Use it on the shared event loop only."""

    def __init__(self, url: str, key: str | None, *, tls: ssl.SSLContext | None, proxy: str | None):
        check_url(url)
        self.url, self._tls, self._proxy = url.rstrip("/"), tls, proxy
        self._headers = {"Accept": "application/json", "User-Agent": "palestra-episodes"}
        if key:
            self._headers["X-API-Key"] = key
        self._http = self._open()
        self._owner = os.getpid()

    def _open(self) -> httpx.AsyncClient:
        parts = urlsplit(self.url)
        if parts.scheme == "https":
            self._tls = self._tls or ssl.create_default_context()
        trusted = self._tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without TLS the certificates need not be read
        try:
            return httpx.AsyncClient(
                headers=self._headers,
                verify=trusted,
                limits=LIMITS,
                proxy=self._proxy or None,
                trust_env=self._proxy is None and parts.hostname not in THIS_MACHINE,
            )
        except httpx.InvalidURL as error:
            raise ValueError(f"the proxy is not a URL: {error}") from None

    async def send(self, call: ApiCall[Any]) -> httpx.Response:
        """Sends a call. Raises ExchangeBroken. A kept connection may be dead already, so a request that is cut off is
        sent once more on another connection."""
        request = self._request(call)
        try:
            try:
                return await self._client.send(request)
            except CUT_OFF:
                return await self._client.send(request)
        except httpx.RequestError as error:
            raise self._error_of(error) from error

    @asynccontextmanager
    async def stream(self, call: ApiCall[Any]) -> AsyncIterator[httpx.Response]:
        """Gives the answer while it arrives. Raises ExchangeBroken, also while the answer is read."""
        try:
            answer = await self._client.send(self._request(call), stream=True)
            try:
                yield answer
            finally:
                await answer.aclose()
        except httpx.RequestError as error:
            raise self._error_of(error) from error

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def _client(self) -> httpx.AsyncClient:
        if self._owner != os.getpid():  # after a fork the connections belong to the parent
            self._http, self._owner = self._open(), os.getpid()
        return self._http

    def _request(self, call: ApiCall[Any]) -> httpx.Request:
        target = f"{call.path}?{urlencode(call.query)}" if call.query else call.path
        has_body = call.body is not None
        return self._client.build_request(
            call.method,
            self.url + target,
            content=msgspec.json.encode(call.body) if has_body else None,
            headers={"Content-Type": "application/json"} if has_body else None,
            timeout=httpx.Timeout(call.timeout_s, connect=CONNECT_S, pool=None),
        )

    def _error_of(self, error: httpx.RequestError) -> ExchangeBroken | ServerSilent:
        cause = _first_cause(error)
        if isinstance(cause, ssl.SSLCertVerificationError):  # retrying does not change a certificate
            hint = "tls=ssl.create_default_context(cafile=…) trusts another certificate"
            return ServerSilent(f"{self.url} is not trusted: {cause.verify_message}; {hint}")
        is_reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError)
        return ExchangeBroken(_error_text(error, cause), is_reached=is_reached)


async def lines(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Yields lines as they arrive. Raises ExchangeBroken for an incomplete line at the end."""
    rest = b""
    async for part in answer.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line
    if rest:
        raise ExchangeBroken("the last line has no end", is_reached=True)


def check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises where it is no number
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of a server; it looks like http://127.0.0.1:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"{parts.hostname}: a server's URL has no user, '?' or '#'; keys go into key=…")


def _first_cause(error: BaseException) -> BaseException:
    """Returns the first cause: below httpx there are httpcore, anyio and asyncio."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below.exceptions[0] if isinstance(below, BaseExceptionGroup) else below
    return error


def _error_text(error: httpx.RequestError, cause: BaseException) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "timed out"
    if isinstance(cause, OSError) and cause.errno and cause.errno > 0:  # asyncio has its own wording; take the system's
        return f"[Errno {cause.errno}] {os.strerror(cause.errno)}"
    return str(cause if isinstance(cause, OSError) else error) or type(error).__name__
