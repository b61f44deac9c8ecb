"""Times that a model writes, as the world stores them: ISO, to the second, without a zone, so that they can be compared
as text.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from palestra.environments.platform.errors import ToolError

HINT = "write 2026-03-04 or 2026-03-04T14:30"
YEARS = range(1970, 2101)
DAY_LENGTH = len("2026-03-04")


def moment(text: str, argument: str, *, at_end: bool = False) -> str:
    """`at_end`: a date without a time means the whole day, up to the next midnight."""
    try:
        found = datetime.fromisoformat(written := text.strip())
    except ValueError:
        raise ToolError("bad_date", f"{argument}: {text[:40]!r} is no date or time", HINT) from None
    if found.tzinfo is not None:
        raise ToolError("bad_date", f"{argument}: times here have no zone", HINT)
    if found.year not in YEARS:
        raise ToolError("bad_date", f"{argument}: the year must be {YEARS[0]} to {YEARS[-1]}", HINT)
    if at_end and len(written) <= DAY_LENGTH:
        found += timedelta(days=1)
    return found.replace(microsecond=0).isoformat()


def span(start: str, end: str) -> tuple[str, str]:
    """Returns both times, checked; an `end` that is a date is included."""
    first, last = moment(start, "start"), moment(end, "end", at_end=True)
    if first >= last:
        raise ToolError("bad_date", f"end must be after start, found {first} to {last}", "swap them or choose others")
    return first, last


def later(text: str, by: timedelta) -> str:
    return (datetime.fromisoformat(text) + by).isoformat()


def between(start: str, end: str) -> timedelta:
    return datetime.fromisoformat(end) - datetime.fromisoformat(start)
