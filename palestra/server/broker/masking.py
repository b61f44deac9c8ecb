"""Masks secrets in what is shown, without blocking the server.

Owns: the process that does it, if that may take long. Never touches: what is a secret (`config.redaction`).

While a regular expression is searched, Python can do nothing else, and a harmless one (`[a-z]+@[a-z]+`) takes hours for
a text that was made for it. So the patterns of the config, and long texts, are handled in a process of their own.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from palestra.config.redaction import Mask
from palestra.server.broker.mask_child import LENGTH_BYTES, Orders, message
from palestra.server.core.errors import Refusal
from palestra.types.timelines import EpisodeTimeline
from palestra.util.processes import PIPE, kill, spawn

S = TypeVar("S", EpisodeTimeline, list[Any])

CHILD = "palestra.server.broker.mask_child"
LIMIT_S = 5.0  # seconds of computing, for all texts of one value; a MiB of ordinary text takes a tenth of a second
SHORT_BYTES = 1 << 16  # keys in a text of this size are found in some milliseconds


class Masking:
    def __init__(self, patterns: Sequence[str] = (), limit_s: float = LIMIT_S):
        """What is not masked after `limit_s` is masked as a whole."""
        self._patterns, self._limit_s = tuple(patterns), limit_s
        self._keys = Mask()
        self._child: Process | None = None
        self._turn = asyncio.Lock()
        """Protects the child, which answers one request at a time, in order."""

    async def of(self, value: S) -> S:
        """Masks a value, as `Mask.of` does."""
        data = msgspec.json.encode(value)
        if not self._patterns and len(data) <= SHORT_BYTES:
            return self._keys.of(value)
        async with self._turn:
            try:
                return msgspec.json.decode(await self._request(message(data)), type=type(value))
            except (asyncio.IncompleteReadError, ConnectionError):
                await self._end()
                raise Refusal(
                    503, "the process that blacks out secrets has died; send the request again", retry_after_s=1.0
                ) from None
            except BaseException:
                await self._end()  # its answer may still come, and would be taken for the next one's
                raise

    async def close(self) -> None:
        async with self._turn:
            await self._end()

    async def _request(self, data: bytes) -> bytes:
        if self._child is None or self._child.returncode is not None:
            self._child = await spawn(sys.executable, "-m", CHILD, stdin=PIPE, stdout=PIPE, stderr=None)
            data = message(msgspec.json.encode(Orders(self._limit_s, self._patterns))) + data
        source, sink = self._child.stdout, self._child.stdin
        assert source is not None
        assert sink is not None
        sink.write(data)
        await sink.drain()
        length = int.from_bytes(await source.readexactly(LENGTH_BYTES), "big")
        return await source.readexactly(length)

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await kill(child)
