"""Functions that a verifier uses without importing them: how texts and numbers are compared."""

from __future__ import annotations

import json
import re
import string
from typing import Any

TASK_SUCCESSFUL_SCORE = 1
TASK_FAILED_SCORE = 0

_BLANKS = str.maketrans(string.punctuation, " " * len(string.punctuation))


def normalized_contains(target: str, blob: Any) -> bool:
    """Compares without regard to case, punctuation and spaces."""
    return _normal(target) in _normal(_text_of(blob))


def normalized_string_comparison(target: str, blob: Any) -> bool:
    return _normal(target) == _normal(_text_of(blob))


def extract_numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text.replace(",", ""))]


def contains_number(text: str, target_number: Any) -> bool:
    try:
        target = float(target_number.replace(",", "") if isinstance(target_number, str) else target_number)
    except (ValueError, TypeError):
        return False
    return target in extract_numbers(text)


def _text_of(content: Any) -> str:
    return json.dumps(content, sort_keys=True) if isinstance(content, dict | list) else str(content)


def _normal(text: str) -> str:
    return "".join(text.lower().translate(_BLANKS).split())
