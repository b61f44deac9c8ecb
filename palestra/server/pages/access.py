"""Access to the pages of a server: whoever may use its API may see them, in a browser by a cookie."""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import Scope

from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import TRAINERS, Caller
from palestra.server.http.auth import CACHE_S, CACHE_SIZE, Authenticator
from palestra.store import Store
from palestra.store.queries.keys import find_key, get_key
from palestra.store.records import Key, Rights
from palestra.view.access import OTHER_SITE, LoginRefused, is_forged, read_cookie

LOOKERS = (*TRAINERS, Rights.METRICS)
LOGIN_S = 30 * 86400
MAX_DIGITS = 12  # of a key's number and of a time in seconds
CALLER = "palestra.caller"
"""Where the caller is in the scope of a request that was admitted."""


class ServerAccess:
    """The rules of view's middleware, and in place of the server's authenticator on routes that pages share with the
    API."""

    max_body_bytes = 4 << 20  # a long conversation of the playground
    login_hint = "Open to those who have a key of this server: `palestra key create` beside it makes one."

    def __init__(self, authenticator: Authenticator, store: Store, secret: str):
        self._authenticator, self._store = authenticator, store
        self._secret = hashlib.sha256(b"page cookies\0" + secret.encode()).digest()
        self.cookie_name = f"palestra_ui_{self._mac('name')[:8]}"  # cookies do not tell the ports of a host apart
        self._known: dict[str, tuple[float, Caller | None]] = {}

    def complaint(self, method: str, headers: Headers) -> str | None:
        try:
            self._authenticator.check_origin(headers)
        except Refusal as refusal:
            return refusal.detail
        return OTHER_SITE if is_forged(method, headers) else None

    async def admits(self, scope: Scope) -> bool:
        try:
            caller = await self._identify(HTTPConnection(scope))
        except Refusal:
            return False
        scope[CALLER] = caller
        return True

    async def log_in(self, key: str) -> str:
        found = await self._store.read(lambda conn: find_key(conn, key, now=time.time()))
        if found is None:
            raise LoginRefused("This key is not valid, or was revoked.")
        if found.rights not in LOOKERS:
            raise LoginRefused(f"This key has the right '{found.rights}'; pages need {' or '.join(LOOKERS)}.")
        return self._cookie(found.key_id, found.key_hash, int(time.time()) + LOGIN_S)

    async def admit(self, connection: HTTPConnection, *, rights: tuple[Rights, ...] = TRAINERS) -> Caller:
        """The caller whom the middleware has found, as `Authenticator.admit` returns it."""
        caller: Caller = connection.scope[CALLER]
        if caller.right not in rights:
            raise Refusal(403, f"this key has the right '{caller.right}'; this page needs {' or '.join(rights)}")
        return caller

    async def admit_player(self, connection: HTTPConnection, *, rights: tuple[Rights, ...]) -> Caller:
        return await self.admit(connection, rights=rights)

    async def _identify(self, connection: HTTPConnection) -> Caller:
        """Identifies a visitor by a good cookie, else by a key as for the API, or by the rule where none is needed."""
        cookie = read_cookie(connection.headers, self.cookie_name)
        caller = await self._by_cookie(cookie) if cookie else None
        return caller or await self._authenticator.admit(connection, rights=LOOKERS)

    async def _by_cookie(self, cookie: str) -> Caller | None:
        now = time.monotonic()
        looked_at, caller = self._known.get(cookie, (-CACHE_S, None))
        if now - looked_at < CACHE_S:
            return caller
        number, _, rest = cookie.partition(".")
        until = rest.partition(".")[0]
        caller = None
        is_formed = all(part.isdecimal() and len(part) < MAX_DIGITS for part in (number, until))
        if is_formed and int(until) > time.time():
            key = await self._store.read(lambda conn: get_key(conn, int(number), now=time.time()))
            if key is not None and self._proves(cookie, key, int(until)):
                caller = Caller(key.owner, key.rights, key)
                self._authenticator.note_use(key)
        if len(self._known) >= CACHE_SIZE:
            self._known.clear()
        self._known[cookie] = (now, caller)
        return caller

    def _proves(self, cookie: str, key: Key, until: int) -> bool:
        """Whether a cookie was made for this key as it is, or as it was before it was rotated a while ago."""
        old = key.old_hash if (key.old_until or 0.0) > time.time() else None
        return any(
            one is not None and hmac.compare_digest(self._cookie(key.key_id, one, until), cookie)
            for one in (key.key_hash, old)
        )

    def _cookie(self, key_id: int, key_hash: str, until: int) -> str:
        """Names the key and proves that the caller has had it, but does not contain it. It ends with the key."""
        return f"{key_id}.{until}.{self._mac(f'{key_hash} {until}')}"

    def _mac(self, text: str) -> str:
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()


def caller_of(request: Request) -> Caller:
    return request.scope[CALLER]


async def _trainer(request: Request) -> Caller:
    return await request.app.state.authenticator.admit(request)


async def _admin(request: Request) -> Caller:
    return await request.app.state.authenticator.admit(request, rights=(Rights.ADMIN,))


LookerNow = Annotated[Caller, Depends(caller_of)]
TrainerNow = Annotated[Caller, Depends(_trainer)]
AdminNow = Annotated[Caller, Depends(_admin)]
