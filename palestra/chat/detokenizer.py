"""Converts tokens to text while they are sampled."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from palestra.chat.tokenizer import ChatTokenizer

UNKNOWN = "\ufffd"
"""The replacement for bytes that are no character; at the end of a text, for a character that may be incomplete."""
LONG = 32  # tokens: a character has a few at most, so a longer sequence contains bytes that will never become one
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte, in vocabularies with byte fallback. What several of them mean is known when the last one is."""


class IncrementalDecoder:
    """Call `feed` as tokens arrive and `finish` once at the end; joined, the texts are what `decode` returns for all
    tokens.

    Special tokens are dropped, as by `decode`, except for those in `keep`; by default these are think tags and the tags
    of the tokenizer's tool format.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, keep_special: bool = False, keep: Collection[str] | None = None):
        self._tokenizer = tokenizer
        keep = tokenizer.spoken_tags if keep is None else keep
        self._dropped = frozenset() if keep_special else tokenizer.special_ids(but=keep)
        self._window: list[int] = []
        """Tokens that were not emitted yet, after some that were: the beginning of a text may be decoded
        differently."""
        self._behind = 0
        self._emitted = ""
        """Text of the window that was emitted so far."""

    def feed(self, tokens: Sequence[int]) -> str:
        new = [token for token in tokens if token not in self._dropped]
        self._window += new
        if not new or BYTE.fullmatch(self._tokenizer.token_name(new[-1])):
            return ""
        text = self._decode(self._window)
        if text.endswith(UNKNOWN):
            return self._let_go(text) if len(self._window) - self._behind > LONG else ""
        certain = text[len(self._emitted) :]
        self._move(self._behind)
        return certain

    @property
    def is_within_character(self) -> bool:
        """Whether the tokens so far end inside of a character, or may do so."""
        return len(self._window) > self._behind

    def finish(self) -> str:
        rest = self._decode(self._window)[len(self._emitted) :]
        self._window, self._behind, self._emitted = [], 0, ""
        return rest

    def _let_go(self, text: str) -> str:
        """Drops all but the last tokens, if these share no character with those before them."""
        for cut in range(len(self._window) - 1, self._behind, -1):
            first, second = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if first + second == text:
                certain = first[len(self._emitted) :]
                self._window, self._behind, self._emitted = self._window[cut:], 0, ""
                return certain
        return ""

    def _move(self, start: int) -> None:
        """Notes that everything is emitted; the next tokens are decoded after those from `start` on."""
        self._window = self._window[start:]
        self._behind = len(self._window)
        self._emitted = self._decode(self._window)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special=False)


def token_ranges(
    tokenizer: ChatTokenizer, tokens: Sequence[int], *, keep_special: bool = False
) -> list[tuple[int, int]]:
    """Returns the characters of the text that each token has a part in: start and end. Tokens of one character have
    the same."""
    decoder, ranges = IncrementalDecoder(tokenizer, keep_special=keep_special, keep=()), []
    start = length = 0
    for place, token in enumerate(tokens, 1):
        length += len(decoder.feed([token]))
        if not decoder.is_within_character:
            ranges += [(start, length)] * (place - len(ranges))
            start = length
    end = length + len(decoder.finish())
    return ranges + [(start, end)] * (len(tokens) - len(ranges))
