"""The key of an attempt: derived, so that a repeated claim and a restarted server get the same one."""

from __future__ import annotations

import hashlib
from binascii import b2a_base64
from collections import OrderedDict

from palestra.server.core.owners.callers import EPISODE_PREFIX, AttemptRef

BLOCK = 64  # block size of SHA-256 in bytes
_URL_SAFE = bytes.maketrans(b"+/", b"-_")
MAX_VOID = 100_000  # about 40 MB; older keys become unknown


class EpisodeKeys:
    """Nothing can be read from a key, and none can be made without the server's secret."""

    def __init__(self, secret: str):
        # The two halves of HMAC-SHA256 with the secret already hashed: OpenSSL's function looks its parts up again for
        # each.
        key = hashlib.sha256(b"episode keys\0" + secret.encode()).digest().ljust(BLOCK, b"\0")
        self._inner, self._outer = (hashlib.sha256(bytes(one ^ mask for one in key)) for mask in (0x36, 0x5C))
        # Found by a hash of the key, so that the time of a look-up reveals nothing about the key.
        self._live: dict[bytes, AttemptRef] = {}
        self._names: dict[AttemptRef, bytes] = {}
        """The names from which the keys were derived."""
        self._void: OrderedDict[bytes, AttemptRef] = OrderedDict()

    def make(self, attempt: AttemptRef) -> str:
        signed = f"{attempt.owner}\0{attempt.episode_id}\0{attempt.attempt}"
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(signed.encode())
        outer.update(inner.digest())
        mark = outer.digest()
        return EPISODE_PREFIX + b2a_base64(mark, newline=False).translate(_URL_SAFE, b"=").decode()

    def open(self, attempt: AttemptRef) -> str:
        key = self.make(attempt)
        name = self._names[attempt] = _hash(key)
        self._live[name] = attempt
        return key

    def void(self, attempt: AttemptRef) -> None:
        """Makes a key void: it allows nothing any more, but its holder is told why."""
        name = self._names.pop(attempt, None) or _hash(self.make(attempt))
        self._live.pop(name, None)
        self._void[name] = attempt
        if len(self._void) > MAX_VOID:
            self._void.popitem(last=False)

    def find(self, key: str) -> AttemptRef | None:
        name = _hash(key)
        return self._live.get(name) or self._void.get(name)

    def is_live(self, attempt: AttemptRef) -> bool:
        return attempt in self._names

    def clear(self) -> None:
        self._live.clear()
        self._names.clear()
        self._void.clear()


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode(errors="replace"), digest_size=16).digest()
