"""Finds the answer in a model's text."""

from __future__ import annotations

import re

BOX = "\\boxed{"
MAX_WRAPPERS = 20
_DOLLARS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
_WRAPPER = re.compile(r"^\\(?:text|mathrm|mathbf|textbf|mathit)\s*\{(.*)\}$", re.DOTALL)
_LABEL = re.compile(r"[*_]{0,2}answer[*_]{0,2}\s*:[*_]{0,2}\s*(.+)", re.IGNORECASE)
_BRACE = re.compile(r"\\boxed\{|[{}]")
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last closed `\boxed{…}`; braces within it may be nested. It takes one pass: a model
    that writes `\boxed{` ten thousand times must not delay other rollouts."""
    opened: list[int | None] = []  # where the inside of each open brace begins, if it belongs to a box
    found: tuple[int, int] | None = None
    for match in _BRACE.finditer(text):
        if match[0] != "}":
            opened.append(match.end() if match[0] == BOX else None)
        elif opened and (start := opened.pop()) is not None and (found is None or start > found[0]):
            found = start, match.start()
    return text[slice(*found)].strip() if found else None


def unwrapped(text: str) -> str:
    r"""Removes `\text{…}` and dollar signs around the whole text."""
    text = text.strip()
    for _ in range(MAX_WRAPPERS):
        inside = _inside(text)
        if inside is None:
            break
        text = inside.strip()
    return text


def after_label(text: str) -> str | None:
    """Returns the rest of the line after the last `Answer:`, with or without markdown around the word."""
    found = _LABEL.findall(text)
    return found[-1].strip() if found else None


def last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def _inside(text: str) -> str | None:
    """Returns the text inside one wrapper around the whole text."""
    if match := _WRAPPER.match(text):
        return match[1]
    for opening, closing in _DOLLARS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            return text[len(opening) : -len(closing)]
    return None
