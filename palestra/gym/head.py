"""The head server of a gym: it lists the servers and their config.

The whole config has keys and tokens: it is given to callers on this machine, and to those that send the admin key.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.gym.config import to_yaml
from palestra.gym.records import GymConfig
from palestra.util.json_types import JsonObject

HEALTH = ("/", "/health", "/healthz", "/livez")
NO_KEY = "requests from another machine need the gym's admin key: Authorization: Bearer KEY (gym.admin_key)"


def head_app(
    config: GymConfig,
    admin_key: str | None,
    instances: Callable[[], list[JsonObject]],
    is_ready: Callable[[], bool],
) -> Starlette:
    """`instances` returns the present list of servers, `is_ready` whether all are healthy."""

    async def health(_: Request) -> Response:
        return _described({"status": "ok"})

    async def readyz(_: Request) -> Response:
        return _described({"status": "ok"}) if is_ready() else _described({"status": "starting"}, 503)

    async def server_instances(_: Request) -> Response:
        return _described(instances())

    async def global_config(request: Request) -> Response:
        if not (_is_from_here(request) or _has_key(request, admin_key)):
            raise HTTPException(401, NO_KEY, {"www-authenticate": "Bearer"})
        return _described(to_yaml(config.settings))

    routes = [
        *(Route(path, health) for path in HEALTH),
        Route("/readyz", readyz),
        Route("/server_instances", server_instances),
        Route("/global_config_dict_yaml", global_config),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refused})


def _described(body: object, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = orjson.dumps({"detail": error.detail})
    return Response(body, error.status_code, error.headers, "application/json")


def _has_key(request: Request, admin_key: str | None) -> bool:
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    given = given or request.headers.get("x-api-key", "")
    return admin_key is not None and hmac.compare_digest(given.encode(), admin_key.encode())


def _is_from_here(request: Request) -> bool:
    """Whether a request comes from this machine. Its host name counts, too: a web page can make a local browser send
    requests, but under the page's own name. Forwarded requests do not count."""
    headers = request.headers
    client, own = ((request.scope.get(one) or ("",))[0] for one in ("client", "server"))
    name = headers.get("host", "").rpartition("@")[2]
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    was_passed_on = "forwarded" in headers or "x-forwarded-for" in headers
    is_here = is_loopback(client) or (client == own != "")
    return is_here and (is_loopback(name) or name == own) and not was_passed_on


def is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
