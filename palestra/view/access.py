"""Who may look: everybody on this machine, others with a key. Pages of other sites may not.

Owns: the checks of Host, Origin and key, the cookie, the headers of every answer. Never touches: what is shown.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from urllib.parse import quote, urlsplit

from msgspec import Struct
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SAFE_METHODS = ("GET", "HEAD")
OPEN_PATHS = ("/login", "/static/")
"""What is shown without a key."""
MAX_BODY_BYTES = 64 << 10
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


class Access(Struct, frozen=True):
    """The rules of one dashboard."""

    key: str | None = None
    """What others have to know. Without one, only this machine is listened to."""
    hosts: tuple[str, ...] = ()
    """Host names besides this machine's own by which a browser may reach it, through a proxy."""

    @property
    def cookie_name(self) -> str:
        """Of its own for each key: cookies do not tell ports apart."""
        return f"palestra_view_{_digest(self.key or '', 'name')[:8]}"

    def cookie_value(self) -> str:
        return _digest(self.key or "", "session")

    def knows(self, key: str) -> bool:
        return self.key is not None and hmac.compare_digest(key.encode(), self.key.encode())

    def admits(self, headers: Headers) -> bool:
        """Whether a request has the key, or needs none."""
        if self.key is None:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else "")
        if given and self.knows(given):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie_name)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(cookie.value, self.cookie_value())

    def complaint(self, method: str, headers: Headers) -> str | None:
        """What is wrong with where a request comes from. Without a key, a page of another site must not be able to
        read by a host name of its own; and never may it change anything."""
        host = headers.get("host", "")
        name = _host_name(host)
        if self.key is None and not _is_local(name) and name not in self.hosts:
            return f"this dashboard answers to localhost only, not to {name[:100]!r}; behind a proxy, give --public-url"
        origin = headers.get("origin")
        source = urlsplit(origin).netloc if origin is not None else host
        if source != host and _host_name(source) not in self.hosts:
            return f"requests from pages of {source[:100]!r} are not accepted"
        if method not in SAFE_METHODS and headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "requests from pages of other sites are not accepted"
        return None


class AccessMiddleware:
    def __init__(self, app: ASGIApp, access: Access) -> None:
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

        refusal = self._refusal(scope)
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers, path = Headers(scope=scope), own_path(scope)
        if complaint := self.access.complaint(scope["method"], headers):
            return error_response(403, "forbidden", complaint)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES or "transfer-encoding" in headers:
            return error_response(413, "too_large", f"the request is longer than {MAX_BODY_BYTES} bytes")
        if self.access.admits(headers) or path.startswith(OPEN_PATHS):
            return None
        if path.startswith("/api/"):
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
