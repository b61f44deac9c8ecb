"""Days and nights, as texts that sort."""

from __future__ import annotations

from datetime import date, timedelta

from palestra.environments.platform.errors import ToolError

MAX_NIGHTS = 30


def plus(day: str, days: int) -> str:
    return (date.fromisoformat(day) + timedelta(days=days)).isoformat()


def between(first: str, last: str) -> int:
    return (date.fromisoformat(last) - date.fromisoformat(first)).days


def nights(check_in: str, check_out: str) -> list[str]:
    return [plus(check_in, n) for n in range(between(check_in, check_out))]


def checked_stay(check_in: str, check_out: str, today: str) -> list[str]:
    """Returns the nights of a valid stay."""
    for name, day in (("check_in", check_in), ("check_out", check_out)):
        try:
            if date.fromisoformat(day).isoformat() != day:
                raise ValueError
        except ValueError:
            raise ToolError("bad_date", f"{name} must be a day as 2026-03-14, found {day!r}") from None
    if check_in < today:
        raise ToolError("bad_date", f"check_in {check_in} has passed", f"today is {today}")
    if not 1 <= between(check_in, check_out) <= MAX_NIGHTS:
        raise ToolError("bad_date", f"a stay has 1 to {MAX_NIGHTS} nights; check_out is the day of leaving")
    return nights(check_in, check_out)
