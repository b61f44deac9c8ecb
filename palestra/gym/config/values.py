"""Parses overrides from the command line, in Hydra's grammar: `k=v`, `+k=v`, `++k=v`, `~k`, and the forms of `v`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from palestra.config.redaction import redact
from palestra.gym.config.text import MASK, is_secret_name
from palestra.gym.errors import GymConfigError

_KEY = re.compile(r"(?P<how>\+\+|\+|~|)(?P<key>[^\s=+~][^\s=]*)(?P<rest>=.*)?", re.DOTALL)
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")
_FLOAT = re.compile(r"[+-]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_WORDS = {"null": None, "true": True, "false": False}
_CLOSING = {"[": "]", "{": "}", "(": ")"}


class OverrideKind(StrEnum):
    CHANGE = ""
    ADD = "+"
    SET = "++"
    DELETE = "~"


@dataclass(frozen=True, slots=True)
class GymOverride:
    how: OverrideKind
    key: str
    """The key with dots."""
    value: Any
    text: str
    """The override as it was typed, without secrets, for messages."""

    @classmethod
    def parse(cls, text: str) -> GymOverride:
        found = _KEY.fullmatch(text)
        if found is None or (found["rest"] is None and found["how"] != OverrideKind.DELETE):
            raise GymConfigError(f"{redact(text)!r}: an override is key=value, +key=value, ++key=value or ~key")
        shown = f"{found['how']}{found['key']}={MASK}" if is_secret_name(found["key"]) else redact(text)
        value = None if found["rest"] is None else parsed(found["rest"][1:], shown)
        return cls(OverrideKind(found["how"]), found["key"], value, shown)


def parsed(text: str, whole: str) -> object:
    """Parses one value. `whole` is the override, for messages."""
    reader = _Reader(text, whole)
    value = reader.value("")
    if not reader.at_end:
        raise reader.error("more than one value: write [a,b] for a list, '…' for text")
    return value


class _Reader:
    def __init__(self, text: str, whole: str) -> None:
        self.text, self.whole, self.at = text, whole, 0

    @property
    def at_end(self) -> bool:
        self._skip_space()
        return self.at >= len(self.text)

    def error(self, problem: str) -> GymConfigError:
        return GymConfigError(f"{self.whole!r}: {problem}")

    def value(self, ends: str) -> Any:
        """`ends` are the characters, in addition to the comma, at which a bare word stops."""
        self._skip_space()
        first = self.text[self.at : self.at + 1]
        if first == "[":
            return self._sequence()
        if first == "{":
            return self._mapping()
        if first and first in "'\"":
            return self._quoted(first)
        return _meaning(self._bare(ends))

    def _skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def _take(self, wanted: str) -> bool:
        self._skip_space()
        is_there = self.text.startswith(wanted, self.at)
        self.at += len(wanted) if is_there else 0
        return is_there

    def _sequence(self) -> list[Any]:
        self._take("[")
        entries: list[Any] = []
        while not self._take("]"):
            if entries and not self._take(","):
                raise self.error("the list is not closed by ]")
            entries.append(self.value("]"))
        return entries

    def _mapping(self) -> dict[Any, Any]:
        self._take("{")
        entries: dict[Any, Any] = {}
        while not self._take("}"):
            if entries and not self._take(","):
                raise self.error("the mapping is not closed by }")
            key = self.value(":}")
            if not self._take(":"):
                raise self.error("entries of a mapping are key:value")
            entries[key] = self.value("}")
        return entries

    def _quoted(self, quote: str) -> str:
        self.at += 1
        taken: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in {quote, "\\"}:
                char = self.text[self.at + 1]
                self.at += 1
            elif char == quote:
                self.at += 1
                return "".join(taken)
            taken.append(char)
            self.at += 1
        raise self.error(f"the quote {quote} is not closed")

    def _bare(self, ends: str) -> str:
        """Reads up to a comma or an end; text in brackets, as in `${oc.env:A,b}`, is part of it."""
        start, open_brackets = self.at, [""]
        while self.at < len(self.text):
            char = self.text[self.at]
            if len(open_brackets) == 1 and (char == "," or char in ends):
                break
            if char in _CLOSING:
                open_brackets.append(_CLOSING[char])
            elif char == open_brackets[-1]:
                open_brackets.pop()
            self.at += 1
        if len(open_brackets) > 1:
            raise self.error(f"a bracket is not closed by {open_brackets[-1]}")
        word = self.text[start : self.at].strip()
        if not word and (ends or self.at < len(self.text)):
            raise self.error("a value is missing beside a comma or a bracket")
        return word


def _meaning(word: str) -> object:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _INTEGER.fullmatch(word):
        return int(word)
    return float(word) if _FLOAT.fullmatch(word) else word
