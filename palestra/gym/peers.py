"""Calls from one server to another by name: within the process, else over HTTP.

Within the process a call goes through the same endpoint as over HTTP, with the same cookies and the same errors, but
its body and its answer are passed as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self

from palestra.gym.errors import MODEL_PATHS, GymConfigError, UnreachableServer
from palestra.gym.http_app import ROLLOUT_PREFIX, ServerEndpoint
from palestra.gym.records import STEP_ID, GymConfig, ServerInstance, ServerKind
from palestra.gym.servers.base import GymServer
from palestra.gym.sessions import SessionSigner
from palestra.gym.wire import NO_COOKIES, Cookies, GymRequest, GymResponse, encoded
from palestra.net.http_client import CallFailed, HttpClient, NoConnection
from palestra.types.gym_failures import FailureClass
from palestra.util.backoff import Backoff
from palestra.util.json_types import JsonMapping
from palestra.util.suggest import did_you_mean

TIMEOUT_S = 3600.0  # for one answer, if the caller sets no limit; `peer_timeout_s`
RECONNECT_S = 60.0  # how long a server may be unreachable while it is restarted; `peer_reconnect_s`
RETRIES = Backoff(0.05, 2.0)
REPEATS = 2  # retries of a request whose connection broke, if it may be repeated
CONNECTIONS, CONNECTIONS_PER_HOST = 102_400, 1_024  # NeMo Gym's defaults

REPEATABLE = frozenset({"/seed_session", "/verify", "/aggregate_metrics", "/reset", "/close", "/close_session"})
"""Paths that may be repeated without harm. A tool may not: its call is not sent again once it may have begun."""


class GymPeers:
    """All servers of a gym; those of `local` are called directly."""

    def __init__(self, config: GymConfig, local: Iterable[GymServer] = ()) -> None:
        self._config = config
        self._endpoints: dict[str, ServerEndpoint] = {}
        self._client = HttpClient(
            max_connections=int(config.settings.get("global_aiohttp_connector_limit", CONNECTIONS)),
            max_connections_per_host=int(
                config.settings.get("global_aiohttp_connector_limit_per_host", CONNECTIONS_PER_HOST)
            ),
        )
        self._timeout_s = float(config.settings.get("peer_timeout_s", TIMEOUT_S))
        self._reconnect_s = float(config.settings.get("peer_reconnect_s", RECONNECT_S))
        for server in local:
            self.add(server)

    @property
    def settings(self) -> JsonMapping:
        return self._config.settings

    def signer(self, name: str, purpose: str) -> SessionSigner:
        return SessionSigner(name, self._config.secret, purpose)

    def add(self, server: GymServer) -> None:
        """Adds a server that runs in this process. Servers need their peers when they are made, so they are added one
        after another."""
        self._endpoints[server.name] = ServerEndpoint(server, self._config.secret)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def post(
        self, name: str, path: str, body: object, *, cookies: Cookies | None = None, timeout_s: float | None = None
    ) -> GymResponse:
        endpoint = self._endpoints.get(name)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if endpoint is None:
            return await self._post_far(self._instance(name), path, body, cookies, limit_s)
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await endpoint.answer(GymRequest(path=path, body=body, cookies=cookies or NO_COOKIES))
        except TimeoutError:
            if limit.expired():
                raise _too_late(name, path, limit_s) from None
            raise

    def _instance(self, name: str) -> ServerInstance:
        found = self._config.servers.get(name)
        if found is None:
            hint = did_you_mean(name, sorted(self._config.servers))
            raise GymConfigError(f"unknown server {name!r} in this gym\n  {hint}")
        return found

    # Over HTTP

    async def _post_far(
        self, peer: ServerInstance, path: str, body: object, cookies: Cookies | None, limit_s: float
    ) -> GymResponse:
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await self._persist(peer, path, encoded(body), cookies, _may_repeat(peer, path, body))
        except TimeoutError:
            if limit.expired():
                raise _too_late(peer.name, path, limit_s) from None
            raise

    async def _persist(
        self, peer: ServerInstance, path: str, data: bytes, cookies: Cookies | None, may_repeat: bool
    ) -> GymResponse:
        """Sends a request, with retries. A server that is being restarted refuses connections for a while: nothing has
        begun, so the request is sent again. A connection that breaks later may have begun something."""
        now = asyncio.get_running_loop().time
        give_up_at, repeats = now() + self._reconnect_s, 0
        for wait_s in RETRIES.pauses():
            try:
                reply = await self._client.post(peer.url + path, data, cookies=cookies)
                return GymResponse(
                    status=reply.status, body=reply.body, cookies=reply.cookies, content_type=reply.content_type
                )
            except NoConnection as error:
                if now() + wait_s > give_up_at:
                    raise UnreachableServer(peer.name, f"no connection for {self._reconnect_s:g} s: {error}") from error
            except CallFailed as error:
                if not may_repeat or repeats == REPEATS:
                    reason = f"the request to {path} was interrupted: {error}"
                    raise UnreachableServer(peer.name, reason, FailureClass.SERVER_DIED) from error
                repeats += 1
                give_up_at = now() + self._reconnect_s
            await asyncio.sleep(wait_s)
        raise AssertionError


def _may_repeat(peer: ServerInstance, path: str, body: object) -> bool:
    if path.startswith(ROLLOUT_PREFIX):
        path = "/" + path.split("/", 3)[-1]
    if peer.kind is ServerKind.MODEL:
        return True  # it stores nothing
    return path in REPEATABLE or (path == "/step" and isinstance(body, dict) and STEP_ID in body)


def _too_late(name: str, path: str, limit_s: float) -> UnreachableServer:
    kind = FailureClass.MODEL_TIMEOUT if path.endswith(MODEL_PATHS) else FailureClass.TIMEOUT
    return UnreachableServer(name, f"no answer to {path} within {limit_s:g} s", kind)
