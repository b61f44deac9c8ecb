"""Detokenizes sampled tokens as they come, without the stop string or token that ended them."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.chat.detokenizer import IncrementalDecoder
from palestra.types import SamplingParams


class Detokenizer:
    """Detokenizes one sequence: `feed` as tokens come, `finish` once at the end; each returns the text that is
    certain."""

    def __init__(self, decoder: IncrementalDecoder, params: SamplingParams, *, shows_stop: bool):
        self._decoder, self._shows_stop = decoder, shows_stop
        self._ending, self._stops = frozenset(params.stop_token_ids or ()), params.stop_strings
        self._unbound = params.min_tokens
        """Number of further tokens in which no stop string counts."""
        self._pending = ""
        """The end of the text that may be the beginning of a stop string."""
        self.stop: str | int | None = None
        """The string or token that ended it."""

    def feed(self, tokens: Sequence[int]) -> str:
        if tokens and tokens[-1] in self._ending:
            self.stop = self.stop or tokens[-1]
            tokens = tokens[:-1]
        text = ""
        if self._unbound and self._stops:
            text = self._decoder.feed(tokens[: self._unbound])
            tokens, self._unbound = tokens[self._unbound :], max(0, self._unbound - len(tokens))
        return text + self._cut(self._decoder.feed(tokens))

    def finish(self) -> str:
        text = self._cut(self._decoder.finish())
        rest, self._pending = self._pending, ""
        return text + rest

    def _cut(self, text: str) -> str:
        if not self._stops:
            return text
        if isinstance(self.stop, str):
            return ""
        text = self._pending + text
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, self.stop = min(found)
            self._pending = ""
            return text[: place + len(self.stop)] if self._shows_stop else text[:place]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Returns how many of the last characters of `text` begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
