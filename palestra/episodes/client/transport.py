"""One HTTP exchange with one server, on connections that stay open.

Owns: sockets, TLS, proxies, timeouts. Never touches: what is said, and whether to say it again.
"""

from __future__ import annotations

import base64
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

CONNECT_S = 3.0  # an address where nobody is, is told within 5 s
MAX_IDLE = 64
"""Connections kept for later; as many as are needed at once are opened."""
PART_BYTES = 1 << 16
PORTS = {"http": 80, "https": 443}

BROKEN = (OSError, HTTPException)
"""What an exchange that came to nothing raises; the server may have done what was asked."""


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    """Path and query, from the server's URL on."""
    body: bytes | None
    timeout_s: float
    """Between two signs of life."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    reason: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class Transport:
    """Calls may come from any thread: each takes an idle connection, or opens one."""

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None, proxy: str | None = None):
        self.parts = _server(url)
        if self.parts.username is not None or self.parts.query or self.parts.fragment:
            raise ValueError(f"{self.parts.hostname}: a server's URL has no user, '?' or '#'; keys go into key=…")
        self.url = url.rstrip("/")
        self._tls = tls
        self._proxy = _server(proxy) if proxy else None if proxy == "" else _usual_proxy(self.parts)
        self._lock = threading.Lock()  # of the two below
        self._idle: list[HTTPConnection] = []
        self._is_closed = False

    def connect(self) -> None:
        """Opens a connection for the next exchange. Raises one of BROKEN where nobody listens."""
        connection = self._open()
        connection.connect()
        self._keep(connection)

    def exchange(self, request: Request, headers: Mapping[str, str]) -> HttpAnswer:
        """Raises one of BROKEN. A kept connection that the server has closed meanwhile is replaced: requests here may
        be repeated."""
        kept = self._take()
        if kept is not None:
            try:
                return self._once(kept, request, headers)
            except TimeoutError:
                self._drop_idle()  # a network that forgot one connection may have forgotten all
                raise
            except BROKEN:
                self._drop_idle()  # most likely it was restarted, and the others are as dead
        return self._once(self._open(), request, headers)

    @contextmanager
    def stream(self, request: Request, headers: Mapping[str, str]) -> Iterator[HTTPResponse]:
        """The answer while it comes, on a connection of its own. Raises one of BROKEN, also while it is read."""
        connection = self._open()
        try:
            yield self._ask(connection, request, headers)
        finally:
            connection.close()

    def close(self) -> None:
        """Calls under way still end."""
        with self._lock:
            self._is_closed = True
        self._drop_idle()

    def _once(self, connection: HTTPConnection, request: Request, headers: Mapping[str, str]) -> HttpAnswer:
        try:
            told = whole(self._ask(connection, request, headers))
        except BaseException:  # half an exchange must never be continued by the next call
            connection.close()
            raise
        self._keep(connection)
        return told

    def _ask(self, connection: HTTPConnection, request: Request, headers: Mapping[str, str]) -> HTTPResponse:
        if connection.sock is None:
            connection.connect()
        if connection.sock is not None:
            connection.sock.settimeout(request.timeout_s)
        all_headers = {**self._proxy_headers(), **headers}
        connection.request(request.method, self._target(request.target), request.body, all_headers)
        return connection.getresponse()

    def _open(self) -> HTTPConnection:
        host, port = _address(self._proxy or self.parts)
        if self.parts.scheme == "http":
            return HTTPConnection(host, port, timeout=CONNECT_S)
        with self._lock:  # reading the system's certificates takes a while: once is enough
            self._tls = self._tls or ssl.create_default_context()
        connection = HTTPSConnection(host, port, timeout=CONNECT_S, context=self._tls)
        if self._proxy:
            connection.set_tunnel(*_address(self.parts), headers=_proxy_login(self._proxy))
        return connection

    def _target(self, path: str) -> str:
        path = self.parts.path.rstrip("/") + path
        is_relayed = self._proxy is not None and self.parts.scheme == "http"
        return f"http://{self.parts.netloc}{path}" if is_relayed else path

    def _proxy_headers(self) -> dict[str, str]:
        is_relayed = self._proxy is not None and self.parts.scheme == "http"
        return _proxy_login(self._proxy) if self._proxy and is_relayed else {}

    def _take(self) -> HTTPConnection | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, connection: HTTPConnection) -> None:
        with self._lock:
            if connection.sock is not None and not self._is_closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _drop_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            with suppress(OSError):
                connection.close()


def whole(answer: HTTPResponse) -> HttpAnswer:
    told = {name.lower(): value for name, value in answer.getheaders()}
    return HttpAnswer(answer.status, answer.reason, told, answer.read())


def lines(answer: HTTPResponse) -> Iterator[bytes]:
    """As they come. What breaks off raises one of BROKEN; the library's own lines end there without a word."""
    rest = b""
    while part := answer.read1(PART_BYTES) if answer.chunked else answer.read(PART_BYTES):
        *whole_ones, rest = (rest + part).split(b"\n")
        yield from whole_ones
    if rest or answer.length:
        raise IncompleteRead(rest, answer.length)


def _server(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises where it is no number
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of a server; it looks like http://127.0.0.1:8000")
    return parts


def _address(parts: SplitResult) -> tuple[str, int]:
    return parts.hostname or "", parts.port or PORTS[parts.scheme]


def _usual_proxy(parts: SplitResult) -> SplitResult | None:
    """As HTTP_PROXY, HTTPS_PROXY and NO_PROXY say; never for this machine."""
    host = parts.hostname or ""
    url = getproxies().get(parts.scheme)
    if not url or host in ("localhost", "127.0.0.1", "::1") or proxy_bypass(host):
        return None
    return _server(url if "://" in url else f"http://{url}")


def _proxy_login(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    login = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}
