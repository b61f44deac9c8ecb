"""Computes when people are free, in working hours. Pure functions of intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import msgspec

WORK_START_H, WORK_END_H = 9, 17
WEEKEND = 5  # Saturday, from Monday = 0


class Interval(msgspec.Struct, frozen=True):
    start: str
    end: str


def free_slots(busy: Sequence[Interval], window: Interval, minutes: int) -> list[Interval]:
    """Returns the earliest start in each gap that is long enough. `busy` is in order of start."""
    length = timedelta(minutes=minutes)
    found: list[Interval] = []
    for open_from, open_until in _working_hours(window):
        for start, end in _gaps(busy, open_from, open_until):
            if start + length <= end:
                found.append(Interval(start.isoformat(), (start + length).isoformat()))
    return found


def _working_hours(window: Interval) -> Iterator[tuple[datetime, datetime]]:
    first, last = datetime.fromisoformat(window.start), datetime.fromisoformat(window.end)
    day = first.replace(hour=0, minute=0, second=0)
    while day < last:
        start = max(first, day + timedelta(hours=WORK_START_H))
        end = min(last, day + timedelta(hours=WORK_END_H))
        if day.weekday() < WEEKEND and start < end:
            yield start, end
        day += timedelta(days=1)


def _gaps(busy: Sequence[Interval], start: datetime, end: datetime) -> Iterator[tuple[datetime, datetime]]:
    free_from = start
    for taken in busy:
        taken_from, taken_until = datetime.fromisoformat(taken.start), datetime.fromisoformat(taken.end)
        if taken_until <= free_from or taken_from >= end:
            continue
        if taken_from > free_from:
            yield free_from, taken_from
        free_from = taken_until
    if free_from < end:
        yield free_from, end
