"""The HTTP client of gyms: for calls between servers, to model endpoints and to the agents that play rows.

It is aiohttp, which nothing else of ours imports but the client of vLLM. With many calls in flight httpx takes ten to
forty times its CPU for each: 9.5 ms beside 0.24 ms with 64 of them (`benchmarks/http_clients.py`, two cores, aarch64).
A whole rollout with one tool call over HTTP takes 4 to 5 ms (`benchmarks/gym.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import orjson
from msgspec import Struct

from palestra.net.cookies import cookie_header, cookies_of

if TYPE_CHECKING:
    import aiohttp
    from multidict import CIMultiDictProxy

NO_HEADERS: Mapping[str, str] = {}
CONNECT_S = 10.0
KEEP_ALIVE_S = 15.0  # below the 30 s of the servers: no race for a closing connection
JSON_TYPE = "application/json"


class CallFailed(Exception):
    """The call got no complete answer."""


class NoConnection(CallFailed):
    """No connection could be made, so nothing was sent."""


class CallBroken(CallFailed):
    """The call was interrupted; the server may have started to work on it."""


class ConnectionClosed(CallBroken):
    """The other side went away, perhaps a moment before an idle connection was used again."""


class AnswerTooLarge(CallFailed):
    def __init__(self, limit: int, beginning: bytes) -> None:
        super().__init__(f"the answer is larger than {limit} bytes")
        self.beginning = beginning


class HttpReply(Struct, frozen=True):
    status: int
    body: bytes
    headers: CIMultiDictProxy[str]

    @property
    def content_type(self) -> str:
        return self.headers.get("Content-Type", JSON_TYPE)

    @property
    def cookies(self) -> dict[str, str]:
        """The cookies that the answer sets."""
        found: dict[str, str] = {}
        for header in self.headers.getall("Set-Cookie", ()):
            found |= cookies_of(header.partition(";")[0])
        return found

    def json(self) -> Any:
        """Raises ValueError."""
        return orjson.loads(self.body)


class HttpClient:
    """Opens connections as they are needed. Keeps no cookies: a session belongs to a call, not to a client."""

    def __init__(
        self,
        *,
        timeout_s: float | None = None,
        connect_s: float | None = CONNECT_S,
        max_connections: int = 0,
        max_connections_per_host: int = 0,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        """`timeout_s` is for a whole call; of connections, 0 means as many as there are calls."""
        self._timeout_s, self._connect_s = timeout_s, connect_s
        self._max_connections, self._max_connections_per_host = max_connections, max_connections_per_host
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(
        self, url: str, *, headers: Mapping[str, str] = NO_HEADERS, timeout_s: float | None = None
    ) -> HttpReply:
        """Raises CallFailed, TimeoutError."""
        return await self._call("GET", url, None, headers, timeout_s, None)

    async def probe(self, url: str, *, timeout_s: float) -> HttpReply:
        """Status and headers of whoever answers there; no body is read, no certificate checked, no redirect followed.
        Raises CallFailed, TimeoutError."""
        return await self._call("GET", url, None, None, timeout_s, None, is_probe=True)

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        cookies: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_bytes: int | None = None,
    ) -> HttpReply:
        """JSON. Redirects are not followed: they would lead to an address that was not configured. Raises CallFailed,
        TimeoutError."""
        headers = {"Cookie": cookie_header(cookies)} if cookies else None
        return await self._call("POST", url, body, headers, timeout_s, max_bytes)

    async def _call(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str] | None,
        timeout_s: float | None,
        max_bytes: int | None,
        is_probe: bool = False,
    ) -> HttpReply:
        import aiohttp

        session = self._opened()
        limit = session.timeout if timeout_s is None else aiohttp.ClientTimeout(timeout_s, sock_connect=self._connect_s)
        follows = method == "GET" and not is_probe
        try:
            async with session.request(
                method, url, data=body, headers=headers, timeout=limit, allow_redirects=follows, ssl=not is_probe
            ) as response:
                if is_probe:
                    return HttpReply(response.status, b"", response.headers)
                read = await response.read() if max_bytes is None else await _read(response, max_bytes)
                return HttpReply(response.status, read, response.headers)
        except aiohttp.ConnectionTimeoutError:
            raise NoConnection(f"no connection within {self._connect_s:g} s") from None
        except TimeoutError:
            raise
        except aiohttp.ClientConnectorError as error:
            raise NoConnection(_error_text(error)) from error
        except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, OSError) as error:
            raise ConnectionClosed(_error_text(error)) from error
        except (aiohttp.ClientError, ValueError) as error:  # of addresses and headers
            raise CallBroken(_error_text(error)) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._max_connections,
                    limit_per_host=self._max_connections_per_host,
                    keepalive_timeout=KEEP_ALIVE_S,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Content-Type": JSON_TYPE, **self._headers},
                timeout=aiohttp.ClientTimeout(self._timeout_s, sock_connect=self._connect_s),
            )
        return self._session


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    if response.content_length is not None and response.content_length <= limit:
        return await response.read()
    read = bytearray()
    async for chunk in response.content.iter_any():
        read += chunk
        if len(read) > limit:
            raise AnswerTooLarge(limit, bytes(read[:300]))
    return bytes(read)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
