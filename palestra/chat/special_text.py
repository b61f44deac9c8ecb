"""Texts of special tokens in messages: they are hidden while a template renders, so that they remain text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class SpecialText:
    """Finds and replaces such texts. Placeholders are letters and digits with 64 random bits: templates do not change
    them and a caller cannot guess one."""

    def __init__(self, texts: Iterable[str]) -> None:
        by_length = sorted(set(texts), key=len, reverse=True)
        # The longest first, as tokenizers match: "<|a|>b" before "<|a|>".
        self._pattern = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        # A word that begins like a token does not count as the beginning of one.
        marked = [text for text in by_length if not text[0].isalnum()]
        self._beginnings = {text[:length] for text in marked for length in range(1, len(text))}
        self._longest = max(map(len, by_length), default=0)
        self._nonce = secrets.token_hex(8)
        self._placeholder = re.compile(f"Q{self._nonce}N([0-9]+)Q", re.IGNORECASE)

    def mark(self, letter: str, number: int = 0) -> str:
        """Returns a text that occurs nowhere else."""
        return f"Q{self._nonce}{letter}{number}Q"

    def first(self, text: str) -> str | None:
        found = self._pattern.search(text)
        return found[0] if found else None

    def is_in(self, value: object) -> bool:
        """Whether any string in a nested value contains one, or ends with the beginning of one: a template may add the
        rest."""
        if isinstance(value, str):
            return self._pattern.search(value) is not None or self._open_end(value) != ""
        if isinstance(value, Mapping):
            return any(self.is_in(key) or self.is_in(item) for key, item in value.items())
        if isinstance(value, list | tuple):
            return any(self.is_in(item) for item in value)
        return False

    def hide(self, value: object, hidden: list[str]) -> Any:
        """Returns a copy with a placeholder for each; the hidden texts are appended to `hidden`."""
        if isinstance(value, str):
            bare, space = _split_end(value)
            open_end = self._open_end(value)
            shown = self._pattern.sub(lambda found: self._keep(found[0], hidden), bare.removesuffix(open_end))
            return shown + (self._keep(open_end, hidden) if open_end else "") + space
        if isinstance(value, Mapping):
            return {self.hide(key, hidden): self.hide(item, hidden) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item, hidden) for item in value]
        return value

    def show(self, text: str, hidden: Sequence[str], cut: str = "") -> str:
        """Replaces the placeholders by their texts, with `cut` after the first character of each."""
        return self._placeholder.sub(lambda found: _cut(hidden[int(found[1])], cut), text)

    def replace(self, text: str, names: Mapping[str, str]) -> str:
        return self._pattern.sub(lambda found: names[found[0]], text)

    def _keep(self, text: str, hidden: list[str]) -> str:
        hidden.append(text)
        return self.mark("N", len(hidden) - 1)

    def _open_end(self, text: str) -> str:
        """Returns the beginning of a special text that `text` ends with, ignoring spaces, because templates may strip
        those."""
        bare, _ = _split_end(text)
        lengths = range(min(self._longest - 1, len(bare)), 0, -1)
        return next((bare[-length:] for length in lengths if bare[-length:] in self._beginnings), "")


def _split_end(text: str) -> tuple[str, str]:
    bare = text.rstrip()
    return bare, text[len(bare) :]


def _cut(text: str, cut: str) -> str:
    return text[:1] + cut + text[1:]
