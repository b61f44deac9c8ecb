"""One server as its callers see it, over HTTP or inside the process."""

from __future__ import annotations

import logging
import re
import time

from palestra.gym.errors import BadCall, GymConfigError, GymError
from palestra.gym.servers.base import GymServer
from palestra.gym.sessions import SessionSigner
from palestra.gym.wire import GymRequest, GymResponse

log = logging.getLogger(__name__)

BAD_REQUEST = 400
ROLLOUT_PREFIX = "/ng-rollout/"
PREFIXED = re.compile(r"/ng-rollout/([A-Za-z0-9][A-Za-z0-9._-]*)(/training-token-capture)?(/.*)")
COOKIE_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class ServerEndpoint:
    __slots__ = ("server", "signer")

    def __init__(self, server: GymServer, secret: str) -> None:
        if not COOKIE_NAME.fullmatch(server.cookie_name):
            raise GymConfigError(
                f"the server name {server.name!r} cannot be part of a cookie: use letters, digits, _ - ."
            )
        self.server = server
        self.signer = SessionSigner(server.cookie_name, secret)

    async def answer(self, call: GymRequest) -> GymResponse:
        """Always returns an answer, with the session's cookie."""
        call.session_id = self.signer.session_from(call.cookies)
        try:
            _take_prefix(call)
            found = await self._counted(call)
        except BadCall as error:
            found = self._failure(call, error)
        cookies = {**found.cookies, self.signer.name: self.signer.signed(call.session_id)}
        return GymResponse(status=found.status, body=found.body, cookies=cookies, content_type=found.content_type)

    async def _counted(self, call: GymRequest) -> GymResponse:
        calls, began_s, failure = self.server.calls, time.perf_counter(), "cancelled"
        count = calls.begin(call.path)
        try:
            found = await self.server.answer(call)
            failure = None if found.status < BAD_REQUEST else str(found.status)
        except Exception as error:  # boundary: a server's own code; callers get an answer
            found = self._failure(call, error)
            known = error.failure if isinstance(error, GymError) else None
            failure = str(known.kind) if known is not None else str(found.status)
        finally:
            calls.end(count, time.perf_counter() - began_s, failure)
        return found

    def _failure(self, call: GymRequest, error: Exception) -> GymResponse:
        if isinstance(error, BadCall):
            return GymResponse(status=error.status, body={"detail": error.detail})
        failure = error.failure if isinstance(error, GymError) else None
        if failure is not None:
            log.warning("%s%s: %s: %s", self.server.name, call.path, failure.kind, failure.reason)
            return GymResponse(status=422 if failure.is_final else 500, body=failure.fields())
        log.error("%s%s broke", self.server.name, call.path, exc_info=error)
        return GymResponse(status=500, body=repr(error))


def _take_prefix(call: GymRequest) -> None:
    if not call.path.startswith(ROLLOUT_PREFIX):
        return
    found = PREFIXED.fullmatch(call.path)
    if found is None:
        raise BadCall(404, "Not Found")
    call.rollout_id, call.captures_tokens, call.path = found[1], found[2] is not None, found[3]
