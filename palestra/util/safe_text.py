"""Text of models and environments in a form that is safe to show."""

from __future__ import annotations

import unicodedata


def safe_text(text: str, keep: str = "\n\t") -> str:
    """Text of models and environments in a form that is safe to print: control codes, bidirectional overrides and other
    invisible characters become escapes, so nothing moves the cursor or imitates other text."""
    return "".join(char if char in keep or is_visible(char) else escaped(char) for char in text)


def is_visible(char: str) -> bool:
    return unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
