"""How deep JSON may be nested.

Owns: the bound. Never touches: what becomes of what is deeper.
"""

from typing import Any

MAX_DEPTH = 100  # nobody means more; a few hundred, and whatever recurses over it fails


def is_too_deep(value: object) -> bool:
    """Level by level: nothing here recurses."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _items(outer) if isinstance(inner, dict | list)]
    return bool(level)


def _items(outer: object) -> Any:
    return outer.values() if isinstance(outer, dict) else outer
