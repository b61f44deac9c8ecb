"""The head of a gym: where others learn which servers there are and how they are configured.

Owns: its routes, who may see secrets. Never touches: the servers.

The whole config has keys and tokens: it is given to callers on this machine, and to those that send the admin key.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import orjson

from palestra.gym.config import to_yaml
from palestra.gym.records import GymConfig

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
HEALTH = frozenset({"/", "/health", "/healthz", "/livez"})


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: Any


class Head:
    """ASGI. `instances` gives the list of servers as it is now, `is_ready` whether all are healthy."""

    def __init__(
        self,
        config: GymConfig,
        admin_key: str | None,
        instances: Callable[[], list[dict[str, Any]]],
        is_ready: Callable[[], bool],
    ) -> None:
        self._config = config
        self._admin_key = admin_key
        self._instances = instances
        self._is_ready = is_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = self._answer(scope)
        body = orjson.dumps(answer.body)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if answer.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, scope: Scope) -> _Answer:
        path = scope["path"]
        if scope["method"] not in ("GET", "HEAD"):
            return _Answer(405, {"detail": "Method Not Allowed"})
        if path in HEALTH:
            return _Answer(200, {"status": "ok"})
        if path == "/readyz":
            is_ready = self._is_ready()
            return _Answer(200 if is_ready else 503, {"status": "ok" if is_ready else "starting"})
        if path == "/server_instances":
            return _Answer(200, self._instances())
        if path == "/global_config_dict_yaml":
            return self._config_answer(scope)
        return _Answer(404, {"detail": "Not Found"})

    def _config_answer(self, scope: Scope) -> _Answer:
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not (_is_from_here(scope, headers) or self._has_key(headers)):
            detail = "from another machine this needs the gym's admin key: Authorization: Bearer KEY (gym.admin_key)"
            return _Answer(401, {"detail": detail})
        return _Answer(200, to_yaml(self._config.settings))

    def _has_key(self, headers: dict[bytes, str]) -> bool:
        given = headers.get(b"authorization", "").removeprefix("Bearer ").strip() or headers.get(b"x-api-key", "")
        return self._admin_key is not None and hmac.compare_digest(given.encode(), self._admin_key.encode())


def _is_from_here(scope: Scope, headers: dict[bytes, str]) -> bool:
    """The name it was called by counts, too: a web page can make a browser here ask, but by the page's own name. And
    nobody passed it on for another."""
    client, own = (scope.get("client") or ("",))[0], (scope.get("server") or ("",))[0]
    name = headers.get(b"host", "").rpartition("@")[2]
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    was_passed_on = b"forwarded" in headers or b"x-forwarded-for" in headers
    is_here = is_loopback(client) or (client == own != "")
    return is_here and (is_loopback(name) or name == own) and not was_passed_on


def is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
