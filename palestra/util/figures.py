"""Numbers, times and durations as people read them."""

from __future__ import annotations

import math
from datetime import datetime

from palestra.util.safe_text import safe_text


def number_text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return safe_text(str(value), keep="")
    try:
        float(value)
    except OverflowError:
        return "inf" if value > 0 else "-inf"
    is_whole = math.isfinite(value) and value == int(value) and abs(value) < 1e9
    return str(int(value)) if is_whole else f"{value:.4g}"


def time_text(seconds: float) -> str:
    """A time by the clock of this machine; a number that is none stays a number."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return number_text(seconds)


def duration_text(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{rest} s"


def size_text(size_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def latency_text(seconds: float) -> str:
    """A short time, in milliseconds below a second."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
