"""The process that masks secrets: it reads JSON from stdin and writes it to stdout without them.

Its patterns are the first message, so that they do not appear in a list of processes. It ends with its stdin.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from palestra.config.redaction import Mask
from palestra.types.timelines import EpisodeTimeline
from palestra.util.answering_child import delimited, read_message

Shown = EpisodeTimeline | list[Any]

TOO_LONG = "[redacted: episodes.mask took too long]"


class Orders(msgspec.Struct, frozen=True):
    limit_s: float
    patterns: tuple[str, ...]


class _TookTooLong(Exception):
    pass


class TimedMask(Mask):
    """Masks as a whole what it does not finish within so many seconds of computing. For the main thread only: it uses
    the system's alarm, which interrupts a search for a match."""

    def __init__(self, limit_s: float, patterns: Iterable[str]) -> None:
        super().__init__(patterns)
        self._limit_s, self._until = limit_s, 0.0
        signal.signal(signal.SIGPROF, _give_up)

    def text(self, text: str) -> str:
        left_s = self._until - time.process_time()
        if left_s <= 0:
            return TOO_LONG
        signal.setitimer(signal.ITIMER_PROF, left_s)
        try:
            return super().text(text)
        except _TookTooLong:
            self._until = 0.0
            return TOO_LONG
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def masked(self, message: bytes) -> bytes:
        value = msgspec.json.decode(message, type=Shown)
        self._until = time.process_time() + self._limit_s
        try:
            return msgspec.json.encode(self.of(value))
        except _TookTooLong:  # the alarm came between two texts
            self._until = 0.0
            return msgspec.json.encode(self.of(value))


def _give_up(_number: int, _frame: object) -> None:
    raise _TookTooLong


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes stdin at the right time
    orders = msgspec.json.decode(read_message(sys.stdin.buffer) or b"", type=Orders)
    mask = TimedMask(orders.limit_s, orders.patterns)
    while (incoming := read_message(sys.stdin.buffer)) is not None:
        sys.stdout.buffer.write(delimited(mask.masked(incoming)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
