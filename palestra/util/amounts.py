"""Amounts and durations as people type and read them: `16GB`, `2M`, `30d`, `1.5 GiB`."""

from __future__ import annotations

import re

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_amount(text: str) -> int:
    """`16GB`, `16GiB`, `16g`, `2M` or a plain number. Raises ValueError."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*(?:([KMGT])(i?)B?|B)?\s*", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is not an amount; write it as 16GB, 40GiB or 2M")
    number, unit, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit.upper()) + 1 if unit else 0))


def parse_duration(text: str) -> float:
    """`90s`, `30m`, `12h`, `30d` or `2w`, in seconds. Raises ValueError."""
    found = re.fullmatch(rf"\s*([0-9]+(?:\.[0-9]*)?)\s*([{''.join(SECONDS)}])\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is not a duration; write it as 30m, 12h or 30d")
    return float(found[1]) * SECONDS[found[2]]


def bytes_text(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
