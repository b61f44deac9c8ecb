"""Finding the answer in what a model said.

Owns: boxes, labels, plain numbers. Never touches: whether the answer is right.
"""

from __future__ import annotations

import re

BOX = "\\boxed{"
_WRAPPER = re.compile(r"^\\(?:text|mathrm|mathbf|textbf|mathit)\s*\{(.*)\}$", re.DOTALL)
_LABEL = re.compile(r"[*_]{0,2}answer[*_]{0,2}\s*:[*_]{0,2}\s*(.+)", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{…}` that is closed; braces within it may be nested."""
    start = text.rfind(BOX)
    while start >= 0:
        inside = _to_closing(text, start + len(BOX))
        if inside is not None:
            return inside.strip()
        start = text.rfind(BOX, 0, start)
    return None


def unwrapped(text: str) -> str:
    """Without `\\text{…}` and dollar signs around all of it."""
    text = text.strip()
    while match := _WRAPPER.match(text):
        text = match[1].strip()
    for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$")):
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            return unwrapped(text[len(opening) : -len(closing)])
    return text


def after_label(text: str) -> str | None:
    """The rest of the line after the last `Answer:`, with or without markdown around the word."""
    found = _LABEL.findall(text)
    return found[-1].strip() if found else None


def last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def _to_closing(text: str, start: int) -> str | None:
    depth = 1
    for at in range(start, len(text)):
        if text[at] == "{":
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if depth == 0:
                return text[start:at]
    return None
