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
    is_whole = math.isfinite(value) and value == int(value) and abs(value) < 1e9
    return str(int(value)) if is_whole else f"{value:.4g}"


def time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def duration_text(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s" if rest >= 60 else f"{rest} s"
