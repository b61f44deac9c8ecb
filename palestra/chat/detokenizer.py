"""Tokens as text while they are drawn.

Owns: characters that several tokens make up, special tokens that are text to whoever reads on. Never touches: what the
text means.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from palestra.chat.tokenizer import ChatTokenizer

UNKNOWN = "\ufffd"
"""Stands for bytes that are no character; at the end of a text, for one that may not be complete."""
LONG = 32  # tokens: a character has a few at most, so what is longer holds bytes that never become one
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte, in vocabularies that fall back to them. What several of them mean is known when the last is."""


class IncrementalDecoder:
    """`feed` as tokens come, `finish` once at their end: joined, what `decode` makes of them all.

    Special tokens are dropped, as `decode` does it, but not those in `keep`: unless told otherwise, think tags and
    what the tokenizer's tool format is written with.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, keep_special: bool = False, keep: Collection[str] | None = None):
        self._tokenizer = tokenizer
        keep = tokenizer.spoken_tags if keep is None else keep
        self._dropped = frozenset() if keep_special else tokenizer.special_ids(but=keep)
        self._window: list[int] = []
        """Tokens that are not told yet, behind some that are: the beginning of a text may be decoded differently."""
        self._behind = 0
        self._emitted = ""
        """What the window says so far."""

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

    def finish(self) -> str:
        rest = self._decode(self._window)[len(self._emitted) :]
        self._window, self._behind, self._emitted = [], 0, ""
        return rest

    def _let_go(self, text: str) -> str:
        """All but the last tokens, where these and those before them have no character in common."""
        for cut in range(len(self._window) - 1, self._behind, -1):
            first, second = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if first + second == text:
                certain = first[len(self._emitted) :]
                self._window, self._behind, self._emitted = self._window[cut:], 0, ""
                return certain
        return ""

    def _move(self, start: int) -> None:
        """All is told; the next tokens are decoded behind those from `start`."""
        self._window = self._window[start:]
        self._behind = len(self._window)
        self._emitted = self._decode(self._window)

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special=False)
