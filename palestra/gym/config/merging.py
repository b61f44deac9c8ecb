"""Merges mappings by OmegaConf's rules, on plain mappings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

UNSET = "???"
"""The mark of a value that must be set; it never replaces a value."""

Path = tuple[str | int, ...]


def merged(below: object, above: object) -> Any:
    """Merges mappings key by key; any other value, including a list, replaces what was there."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return below if above == UNSET else above
    both = {key: merged(value, above[key]) if key in above else value for key, value in below.items()}
    return both | {key: value for key, value in above.items() if key not in below}


def without_unset(content: dict[Any, Any], below: object) -> dict[Any, Any]:
    """Returns the part of `content` that may be merged over `below`."""
    known = below if isinstance(below, dict) else {}
    return {
        key: without_unset(value, known.get(key)) if isinstance(value, dict) else value
        for key, value in content.items()
        if not (value == UNSET and key in known)
    }


def leaves(node: object, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields every value that is neither mapping nor list, with its path."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*at, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from leaves(value, (*at, index))
    else:
        yield at, node


def dotted(path: Path) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
