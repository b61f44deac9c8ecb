"""Finds the end of a JSON object or list while it is being generated."""

from __future__ import annotations

import re

from msgspec import Struct

_BETWEEN = re.compile(r"[ \t\n\r,:+\-.0-9A-Za-z]*")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')


class EndedJson(Struct, frozen=True):
    text: str
    """The text with the spaces before it; if it is broken, up to the first character that JSON cannot have there."""
    rest: str
    is_broken: bool


class JsonEnd:
    """Finds the end; each character is examined once, however the text is cut into pieces."""

    def __init__(self, beginning: str = "") -> None:
        self._parts = [beginning]
        self._depth = len(beginning)
        """Number of open brackets."""
        self._in_string = False
        self._is_escaped = False

    @property
    def fed(self) -> str:
        return "".join(self._parts)

    def feed(self, text: str) -> EndedJson | None:
        """Takes the next piece; None: the JSON is not complete yet."""
        self._parts.append(text)
        at = 0 if self._depth else len(text) - len(text.lstrip())
        while at < len(text):
            if self._depth and not self._is_escaped:
                plain = (_IN_STRING if self._in_string else _BETWEEN).match(text, at)
                at = plain.end() if plain else at
            if at < len(text) and not self._is_legal(text[at]):
                return self._ended(len(text) - at, is_broken=True)
            at += 1
            if self._depth == 0:
                return self._ended(len(text) - at)
        return None

    def _is_legal(self, char: str) -> bool:
        """Takes a structural character; returns whether it is allowed here."""
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._in_string = char != '"'
            self._is_escaped = char == "\\"
            return char in '"\\'
        elif char in "{[":
            self._depth += 1
        elif not self._depth:
            return False
        elif char in "}]":
            self._depth -= 1
        else:
            self._in_string = True
            return char == '"'
        return True

    def _ended(self, rest: int, is_broken: bool = False) -> EndedJson:
        fed = self.fed
        return EndedJson(fed[: len(fed) - rest], fed[len(fed) - rest :], is_broken)
