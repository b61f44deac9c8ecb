"""Calendars of a world: everybody's meetings of some working days, on the half hour.

Some meetings of the owner overlap on purpose.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from datetime import date, timedelta

import msgspec

from palestra.environments.platform.apps.mail import words
from palestra.environments.platform.apps.mail.slots import WEEKEND, WORK_END_H, WORK_START_H
from palestra.environments.platform.people import Person

HALF_HOURS = 2 * (WORK_END_H - WORK_START_H)
RESPONSES = ("accepted", "accepted", "accepted", "tentative", "declined", "needs_action")


class Meeting(msgspec.Struct, frozen=True):
    organizer: Person
    invited: list[Person]
    day: date
    start: int
    """Half hours since the beginning of work."""
    length: int


def fill_calendar(
    connection: sqlite3.Connection, rng: random.Random, people: list[Person], today: date, days: int
) -> None:
    meetings = [meeting for day in _days(today, days) for meeting in _meetings(rng, people, day)]
    meetings.sort(key=lambda m: (m.day, m.start))
    for number, meeting in enumerate(meetings, 1):
        title = rng.choice(words.MEETINGS).format(project=rng.choice(words.PROJECTS))
        times = (_moment(meeting.day, meeting.start), _moment(meeting.day, meeting.start + meeting.length))
        row = (number, meeting.organizer.email, title, *times, rng.choice(words.ROOMS))
        connection.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?)", row)
        attendees = [(number, person.email, rng.choice(RESPONSES)) for person in meeting.invited]
        connection.executemany("INSERT INTO attendees VALUES (?, ?, ?)", attendees)


def _days(today: date, count: int) -> list[date]:
    """Returns working days, from today on."""
    following = (today + timedelta(days=number) for number in range(2 * count + 2))
    return [day for day in following if day.weekday() < WEEKEND][:count]


def _meetings(rng: random.Random, people: list[Person], day: date) -> Iterator[Meeting]:
    owner, *others = people
    for person in others:
        if rng.random() < 0.7:
            yield _meeting(rng, person, people, day)
    for _ in range(rng.randrange(1, 3)):
        yield _meeting(rng, owner, others, day)


def _meeting(rng: random.Random, organizer: Person, people: list[Person], day: date) -> Meeting:
    length = rng.choice((1, 1, 2, 2, 3))
    start = rng.randrange(HALF_HOURS - length + 1)
    candidates = [person for person in people if person != organizer]
    invited = rng.sample(candidates, rng.randrange(1, min(3, len(candidates)) + 1))
    return Meeting(organizer, invited, day, start, length)


def _moment(day: date, half_hours: int) -> str:
    return f"{day}T{WORK_START_H + half_hours // 2:02d}:{half_hours % 2 * 30:02d}:00"
