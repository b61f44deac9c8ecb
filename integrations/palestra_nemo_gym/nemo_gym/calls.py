"""Calls over HTTP that end: each has a time limit, each retry a bound."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from dataclasses import dataclass, field
from typing import Any, Unpack

import orjson
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientResponseError,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    DummyCookieJar,
    TCPConnector,
)
from aiohttp.client import _RequestOptions
from pydantic import BaseModel

from nemo_gym.global_config import get_global_config_dict

log = logging.getLogger(__name__)

TIMEOUT_S = 3600.0  # of one answer; `peer_timeout_s`
RECONNECT_S = 60.0  # how long a server may be away, being started again; `peer_reconnect_s`
CONNECT_S = 10.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
KEEP_ALIVE_S = 15.0  # below the 30 s of the servers: no race for a closing connection
MAX_NUM_TRIES = 3
NUM_WORKERS_VARIABLE = "NEMO_GYM_FASTAPI_NUM_WORKERS"


class GlobalAIOHTTPAsyncClientConfig(BaseModel):
    """The gym's settings that say how calls are made."""

    global_aiohttp_connector_limit: int = 100 * 1024
    global_aiohttp_connector_limit_per_host: int = 1024
    global_aiohttp_client_request_debug: bool = False
    global_aiohttp_tcp_keepalive_idle_seconds: int = 60
    global_aiohttp_tcp_keepalive_interval_seconds: int = 10
    global_aiohttp_tcp_keepalive_probes: int = 3
    peer_timeout_s: float = TIMEOUT_S
    peer_reconnect_s: float = RECONNECT_S


@dataclass(slots=True)
class _Current:
    """What this process calls with. A client cannot outlive its loop."""

    client: ClientSession | None = None
    loop: asyncio.AbstractEventLoop | None = None
    settings: GlobalAIOHTTPAsyncClientConfig = field(default_factory=GlobalAIOHTTPAsyncClientConfig)


_current = _Current()


def get_global_aiohttp_client(*_: object, **__: object) -> ClientSession:
    client = _current.client
    if client is not None and not client.closed and _current.loop is asyncio.get_running_loop():
        return client
    found = get_global_config_dict()
    given = {name: found.get(name) for name in GlobalAIOHTTPAsyncClientConfig.model_fields}
    settings = {name: value for name, value in given.items() if value is not None}
    return set_global_aiohttp_client(GlobalAIOHTTPAsyncClientConfig.model_validate(settings))


def set_global_aiohttp_client(cfg: GlobalAIOHTTPAsyncClientConfig) -> ClientSession:
    workers = int(os.environ.get(NUM_WORKERS_VARIABLE, "1"))
    _current.settings, _current.loop = cfg, asyncio.get_running_loop()
    _current.client = ClientSession(
        connector=TCPConnector(
            limit=cfg.global_aiohttp_connector_limit // workers,
            limit_per_host=cfg.global_aiohttp_connector_limit_per_host // workers,
            keepalive_timeout=KEEP_ALIVE_S,
            socket_factory=_socket,
        ),
        timeout=ClientTimeout(total=cfg.peer_timeout_s, sock_connect=CONNECT_S),
        cookie_jar=DummyCookieJar(),
    )
    return _current.client


def is_global_aiohttp_client_setup() -> bool:
    return _current.client is not None


def is_global_aiohttp_client_request_debug_enabled() -> bool:
    return _current.settings.global_aiohttp_client_request_debug


async def close_client() -> None:
    client, _current.client = _current.client, None
    if client is not None:
        await client.close()


def _socket(address: Any) -> socket.socket:
    """One that notices when the machine at its other end is gone."""
    made = socket.socket(family=address[0], type=address[1], proto=address[2])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _current.settings.global_aiohttp_tcp_keepalive_idle_seconds),
        ("TCP_KEEPINTVL", _current.settings.global_aiohttp_tcp_keepalive_interval_seconds),
        ("TCP_KEEPCNT", _current.settings.global_aiohttp_tcp_keepalive_probes),
    ):
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


async def request(
    method: str, url: str, _internal: bool = False, _tries: int = MAX_NUM_TRIES, **kwargs: Unpack[_RequestOptions]
) -> ClientResponse:
    """An answer of any status. A server that is being started again is waited for, `peer_reconnect_s` long; a call
    that broke on its way is made again, `_tries` in all. Raises ClientError or TimeoutError."""
    if kwargs.get("json") is not None:
        kwargs["data"] = orjson.dumps(kwargs.pop("json"), option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
        headers: Any = kwargs.get("headers") or {}
        kwargs["headers"] = {**headers, "Content-Type": "application/json"}
    client = get_global_aiohttp_client()
    now = asyncio.get_running_loop().time
    give_up_at, wait_s, tries = now() + _current.settings.peer_reconnect_s, FIRST_WAIT_S, 0
    while True:
        try:
            return await client.request(method=method, url=url, **kwargs)
        except (ClientConnectorError, ConnectionTimeoutError):  # nothing has begun
            if now() + wait_s > give_up_at:
                raise
        except ClientError as error:
            tries += 1
            if tries >= _tries:
                raise
            log.warning("%s %s was interrupted (%r), try %d of %d", method, url, error, tries + 1, _tries)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


async def raise_for_status(response: ClientResponse) -> None:
    """Raises ClientResponseError with what was answered as `response_content`."""
    if response.ok:
        return
    content = await response.content.read()
    if is_global_aiohttp_client_request_debug_enabled():
        log.warning("%s answered %d: %s", response.request_info.url, response.status, content.decode(errors="replace"))
    try:
        response.raise_for_status()
    except ClientResponseError as error:
        error.response_content = content  # pyright: ignore[reportAttributeAccessIssue]
        raise


async def get_response_json(response: ClientResponse) -> object:
    return orjson.loads(await response.read())
