"""Masks secrets in what is shown, without blocking the server.

While a regular expression is searched, Python can do nothing else, and a harmless one (`[a-z]+@[a-z]+`) takes hours for
a text that was made for it. So the patterns of the config, and long texts, are handled in a process of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from palestra.config.redaction import Mask
from palestra.server.broker.mask_child import Orders
from palestra.server.core.errors import Refusal
from palestra.types.timelines import EpisodeTimeline
from palestra.util.answering_child import AnsweringChild, ChildDied

S = TypeVar("S", EpisodeTimeline, list[Any])

CHILD = "palestra.server.broker.mask_child"
LIMIT_S = 5.0  # seconds of computing, for all texts of one value; a MiB of ordinary text takes a tenth of a second
SHORT_BYTES = 1 << 16  # keys in a text of this size are found in some milliseconds


class Masking:
    def __init__(self, patterns: Sequence[str] = (), limit_s: float = LIMIT_S):
        """`limit_s`: texts that are not masked by then are blacked out as a whole."""
        self._patterns = tuple(patterns)
        self._keys = Mask()
        self._child = AnsweringChild(CHILD, msgspec.json.encode(Orders(limit_s, self._patterns)))

    async def of(self, value: S) -> S:
        """Masks a value, as `Mask.of` does."""
        data = msgspec.json.encode(value)
        if not self._patterns and len(data) <= SHORT_BYTES:
            return self._keys.of(value)
        try:
            return msgspec.json.decode(await self._child.ask(data), type=type(value))
        except ChildDied:
            raise Refusal(
                503, "the process that blacks out secrets has died; send the request again", retry_after_s=1.0
            ) from None

    async def close(self) -> None:
        await self._child.close()
