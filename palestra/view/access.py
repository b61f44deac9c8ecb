"""Access to the dashboard: free on this machine, by a key from elsewhere, and never from pages of other sites."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import Protocol
from urllib.parse import quote, urlsplit

from msgspec import Struct
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SAFE_METHODS = ("GET", "HEAD")
LOGIN, STATIC = "/login", "/static/"
"""What is shown without a key."""
API_PATHS = ("/api/", "/v1/")
"""What programs call, and never shows a page; a server has its own model endpoint below the second."""
OTHER_SITE = "requests from pages of other sites are not accepted"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class LoginRefused(Exception):
    """Says why a key does not open the dashboard."""


class PageAccess(Protocol):
    """The rules of a dashboard, as the middleware and the login page ask for them."""

    @property
    def cookie_name(self) -> str: ...
    @property
    def max_body_bytes(self) -> int: ...
    @property
    def login_hint(self) -> str:
        """Says where a user finds a key; text between backticks becomes code."""
        ...

    def complaint(self, method: str, headers: Headers) -> str | None:
        """Returns what is wrong with the origin of a request; None: nothing."""
        ...

    async def admits(self, scope: Scope) -> bool:
        """Whether a request may see what needs a key."""
        ...

    async def log_in(self, key: str) -> str:
        """The value of the cookie for this key. Raises LoginRefused."""
        ...


class Access(Struct, frozen=True):
    """The rules of `palestra view`: one key, or none on this machine."""

    key: str | None = None
    """The key that other machines must give. Without one, only this machine may connect."""
    hosts: tuple[str, ...] = ()
    """Host names besides this machine's own by which a browser may reach it, through a proxy."""
    max_body_bytes: int = 64 << 10
    login_hint: str = (
        "This dashboard is open to those who have its key. It was printed where `palestra view` was started."
    )

    @property
    def cookie_name(self) -> str:
        """Each key has a cookie of its own, since cookies do not distinguish ports."""
        return f"palestra_view_{_digest(self.key or '', 'name')[:8]}"

    async def log_in(self, key: str) -> str:
        if not self._knows(key):
            raise LoginRefused("This is not the key.")
        return self._cookie_value()

    async def admits(self, scope: Scope) -> bool:
        """Whether a request has the key, or needs none."""
        if self.key is None:
            return True
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
        if given and self._knows(given):
            return True
        return hmac.compare_digest(read_cookie(headers, self.cookie_name), self._cookie_value())

    def _cookie_value(self) -> str:
        return _digest(self.key or "", "session")

    def _knows(self, key: str) -> bool:
        return self.key is not None and hmac.compare_digest(key.encode(), self.key.encode())

    def complaint(self, method: str, headers: Headers) -> str | None:
        """Returns why a request is refused: a page of another site must never change anything, nor read here without a
        key."""
        host = headers.get("host", "")
        name = _host_name(host)
        if self.key is None and not _is_local(name) and name not in self.hosts:
            return f"this dashboard answers to localhost only, not to {name[:100]!r}; behind a proxy, give --public-url"
        origin = headers.get("origin")
        source = _net_location(origin) if origin is not None else host
        if source != host and _host_name(source) not in self.hosts:
            return f"requests from pages of {source[:100]!r} are not accepted"
        return OTHER_SITE if is_forged(method, headers) else None


def is_forged(method: str, headers: Headers) -> bool:
    """Whether the browser says that a page of another site wants to change something."""
    return method not in SAFE_METHODS and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")


def read_cookie(headers: Headers, name: str) -> str:
    """The value of a cookie; empty if it was not sent."""
    found = cookie_parser(headers.get("cookie", "")).get(name, "")  # in spite of other programs' cookies on this host
    return found if found.isascii() else ""


class AccessMiddleware:
    def __init__(self, app: ASGIApp, access: PageAccess) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = await self._refusal(scope)
        await (refusal or self.app)(scope, receive, send_with_headers)

    async def _refusal(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), own_path(scope)
        if complaint := self.access.complaint(scope["method"], headers):
            return error_response(403, "forbidden", complaint)
        length, most = headers.get("content-length", "0"), self.access.max_body_bytes
        if not length.isdecimal() or int(length) > most or "transfer-encoding" in headers:
            return error_response(413, "too_large", f"the request is longer than {most} bytes")
        if path == LOGIN or path.startswith(STATIC) or await self.access.admits(scope):
            return None
        if path.startswith(API_PATHS):
            return error_response(401, "key_needed", "a key is needed: send it as X-API-Key")
        depth = path.count("/") - 1
        here = f"{path.lstrip('/')}?{scope['query_string'].decode('latin-1')}".rstrip("?")
        return RedirectResponse(f"{'../' * depth or './'}login?next={quote(here, safe='')}", status_code=303)


def own_path(scope: Scope) -> str:
    """The path below the dashboard, wherever it is mounted."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def error_response(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)


def is_local_address(host: str) -> bool:
    """Whether a server that listens at this address is reached from this machine only."""
    return _is_local(host)


def _digest(key: str, purpose: str) -> str:
    return hmac.new(key.encode(), f"palestra view {purpose}".encode(), hashlib.sha256).hexdigest()


def _net_location(url: str) -> str:
    try:
        return urlsplit(url).netloc
    except ValueError:
        return ""


def _host_name(address: str) -> str:
    try:
        return urlsplit(f"//{address}").hostname or ""
    except ValueError:
        return ""


def _is_local(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
