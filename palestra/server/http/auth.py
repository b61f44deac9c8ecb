"""Authentication: the loopback rule, keys, and which host names a browser may use.

On a loopback address without keys everyone is one owner and any key is accepted. As soon as there are keys, or on any
other address, a valid key is needed.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import math
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from urllib.parse import SplitResult, urlsplit

from starlette.requests import HTTPConnection

from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import EPISODE_PREFIX, LOCAL_ADMIN, TRAINERS, AttemptRef, Caller
from palestra.store import Store
from palestra.store.queries.keys import find_key, list_keys
from palestra.store.records import Key, Rights

CACHE_S = 2.0  # a revoked key works no longer than this
CACHE_SIZE = 4096


class Authenticator:
    def __init__(
        self,
        store: Store,
        find_attempt: Callable[[str], AttemptRef | None],
        key_uses: dict[int, float],
        *,
        is_loopback: bool,
        require_key: bool,
    ):
        self._store, self._is_loopback, self._require_key = store, is_loopback, require_key
        self._find_attempt, self._key_uses = find_attempt, key_uses
        self._known: dict[str, tuple[float, Caller | None]] = {}
        self._has_keys: tuple[float, bool] = (-math.inf, False)
        self._looking: asyncio.Future[bool] | None = None

    async def admit(self, connection: HTTPConnection, *, rights: tuple[Rights, ...] = TRAINERS) -> Caller:
        headers, came_at = connection.headers, time.monotonic()
        self.check_origin(headers)
        # What is read from here on is recent enough, however long the database takes.
        while (caller := self._identify(headers, came_at)) is None:
            await self._learn(_key_in(headers))
        if caller.right not in rights:
            raise Refusal(403, f"this key has the right '{caller.right}'; this call needs {' or '.join(rights)}")
        return caller

    async def admit_player(self, connection: HTTPConnection, *, rights: tuple[Rights, ...]) -> Caller:
        """Admits a player, also with the key of an attempt."""
        return as_player(await self.admit(connection, rights=(*rights, Rights.EPISODE)))

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuses requests that a web page in the user's browser makes under another host name, if there are no
        keys."""
        address = headers.get("host", "")
        if self._is_loopback and not _is_local(address):
            host = _split(f"//{address}").hostname or ""
            raise Refusal(403, f"this server answers to localhost only, not to {host[:100]!r}")
        origin = headers.get("origin")
        if origin is not None and ("host" not in headers or _split(origin).netloc != address):
            raise Refusal(403, f"requests from pages of {origin[:100]!r} are not accepted")

    def _identify(self, headers: Mapping[str, str], now: float) -> Caller | None:
        """Returns the caller; None: not known, or not recently enough."""
        key = _key_in(headers)
        if key.startswith(EPISODE_PREFIX):
            attempt = self._find_attempt(key)
            if attempt is None:
                raise Refusal(401, "this episode key is not valid, or no longer; claim another episode")
            traceparent = headers.get("traceparent", "")
            return Caller(attempt.owner, Rights.EPISODE, attempt=attempt, traceparent=traceparent)
        if self._is_loopback and not self._require_key:
            looked_at, has_keys = self._has_keys
            if now - looked_at > CACHE_S:
                return None
            if not has_keys:
                return LOCAL_ADMIN
        if not key:
            raise Refusal(401, "a key is needed: send it as X-API-Key (make one with: palestra key create)")
        looked_at, caller = self._known.get(_name_of(key), (-math.inf, None))
        if now - looked_at > CACHE_S:
            return None
        if caller is None:
            raise Refusal(401, "this key is not valid, or was revoked; make one with: palestra key create")
        return caller

    async def _learn(self, key: str) -> None:
        """Reads what `_identify` did not know."""
        if self._is_loopback and not self._require_key and not await self._keys_exist():
            return
        if key:
            await self._look_up(key)

    async def _look_up(self, key: str) -> None:
        now, name = time.monotonic(), _name_of(key)
        record = await self._store.read(lambda connection: find_key(connection, key, now=time.time()))
        if len(self._known) >= CACHE_SIZE:
            self._known.clear()
        self._known[name] = (now, None if record is None else Caller(record.owner, record.rights, record))
        if record is not None:
            self.note_use(record)

    def note_use(self, key: Key) -> None:
        self._key_uses[key.key_id] = time.time()

    async def _keys_exist(self) -> bool:
        """Whether there are keys, including revoked ones: revoking the last key must not open the server to
        everyone."""
        now = time.monotonic()
        if now - self._has_keys[0] > CACHE_S:
            if self._looking is None:  # many callers may ask at once; one reads for all of them
                reading = self._store.read(lambda c: bool(list_keys(c, revoked=True)))
                self._looking = asyncio.ensure_future(reading)
            looking = self._looking
            try:
                self._has_keys = (now, await asyncio.shield(looking))
            finally:
                if looking.done():
                    self._looking = None
        return self._has_keys[1]


def as_player(caller: Caller) -> Caller:
    """A stored key with the rights of an attempt belongs to no attempt."""
    if caller.right is Rights.EPISODE and caller.attempt is None:
        raise Refusal(403, "this key has the right 'episode' but belongs to no episode; only claims make such keys")
    return caller


def _name_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _key_in(headers: Mapping[str, str]) -> str:
    if key := headers.get("x-api-key", ""):
        return key
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        raise Refusal(403, f"{url[:100]!r} is not a host name") from None


@lru_cache(maxsize=256)
def _is_local(address: str) -> bool:
    """Whether an address, with or without a port, is local."""
    host = _split(f"//{address}").hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.endswith(".localhost")
