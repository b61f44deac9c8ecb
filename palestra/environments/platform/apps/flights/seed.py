"""Worlds of `flights`: an airline's flights of two weeks, bookings, and what each passenger is going to say."""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Iterator, Mapping
from datetime import date, datetime, timedelta
from importlib.resources import files

from palestra.environments.platform import scripted_user
from palestra.environments.platform.app import SeedSize
from palestra.environments.platform.changes import Row
from palestra.environments.platform.people import LAST_NAMES, Person, draw_cast
from palestra.environments.platform.scripted_user import FactWords, UserScript, add_script
from palestra.environments.platform.seeds import CLOCK_START_S, numbered

PACKAGE = "palestra.environments.platform.apps.flights"
SCHEMA = (
    """
CREATE TABLE flights (
    id INTEGER PRIMARY KEY, origin TEXT NOT NULL, destination TEXT NOT NULL, departs_at TEXT NOT NULL,
    seats INTEGER NOT NULL, cents INTEGER NOT NULL, state TEXT NOT NULL
);
CREATE INDEX flights_by_route ON flights (origin, destination, departs_at);
CREATE TABLE bookings (
    code TEXT PRIMARY KEY, last_name TEXT NOT NULL, email TEXT NOT NULL, fare TEXT NOT NULL,
    flight_id INTEGER NOT NULL REFERENCES flights (id), paid_cents INTEGER NOT NULL, state TEXT NOT NULL
);
CREATE TABLE payments (
    id INTEGER PRIMARY KEY AUTOINCREMENT, code TEXT NOT NULL, kind TEXT NOT NULL, cents INTEGER NOT NULL
);
CREATE TABLE transfers (id INTEGER PRIMARY KEY AUTOINCREMENT, code TEXT NOT NULL, reason TEXT NOT NULL);
"""
    + scripted_user.SCHEMA
)
FIXED = {"flights"}

ROUTES = (("Lisbon", "Oslo"), ("Oslo", "Tunis"), ("Tunis", "Lisbon"), ("Lisbon", "Quito"))
DAYS = 14
PLAIN_CENTS, DEAR_CENTS = (9_000, 45_000), (65_000, 90_000)
HOURS = (6, 8, 11, 13, 16, 19, 21)
CHANGE_CENTS = {"flex": 4_000, "business": 0}
MOST_CENTS = 50_000
"""R7: a dearer change is for a human."""
OPENINGS = {
    "change": (
        "Hello, I need another flight than the one I have booked.",
        "Hi, can I fly on another day?",
        "Good evening. My plans have changed, and so must my flight.",
        "I would like to move my booking.",
    ),
    "cancel": (
        "Hello, I want to cancel my booking.",
        "I will not be flying after all. What do I get back?",
        "Please call off my flight.",
        "Hi! I have to give up my trip.",
    ),
}
CHANGES = ("flex", "business", "dearer", "grounded", "basic", "soon", "stranger", "human", "declined")
CANCELS = ("cancel_flex", "cancel_business", "cancel_grounded", "cancel_basic", "cancel_soon")
"""The kinds of cases, of changes and of cancellations; a world has some of each."""
CALLERS = {SeedSize.TINY: 1, SeedSize.SMALL: 2, SeedSize.LARGE: 4}  # of each kind

FACTS: Mapping[str, FactWords] = {
    "code": FactWords(
        re.compile(r"\b(code|booking (number|reference)|reference|confirmation number)\b", re.IGNORECASE),
        ("It is {value}.", "My booking is {value}.", "{value}.", "The code says {value}."),
    ),
    "last_name": FactWords(
        re.compile(r"\b(last name|surname|family name|your name|full name)\b", re.IGNORECASE),
        ("My last name is {value}.", "{value}.", "The name is {value}."),
    ),
    "day": FactWords(
        re.compile(r"\b(day|date|when)\b", re.IGNORECASE),
        ("On {value}.", "I want to fly on {value}.", "{value} would be right."),
    ),
    "from_time": FactWords(
        re.compile(r"\b(time|hour|o'clock|morning|evening|when|how early)\b", re.IGNORECASE),
        ("Not before {value}.", "From {value} on.", "I can be there at {value}, not earlier."),
    ),
}


def policy() -> str:
    return files(PACKAGE).joinpath("policy.md").read_text(encoding="utf-8").strip()


def fill(db: sqlite3.Connection, rng: random.Random, size: SeedSize) -> Mapping[str, str]:
    kinds = [kind for kind in (*CHANGES, *CANCELS) for _ in range(CALLERS[size])]
    rng.shuffle(kinds)
    cast = draw_cast(rng, 1, len(kinds))
    _fill_flights(db, rng, cast.today)
    codes = rng.sample(range(100_000), len(kinds))
    for number, (kind, person, code) in enumerate(zip(kinds, cast.outsiders, codes, strict=True), 1):
        _Passenger(db, rng, number, person, f"SK{code:05d}", cast.today).fill(kind)
    agent = cast.colleagues[0]
    return {"LOGGED_IN_USER": agent.email, "LOGGED_IN_NAME": agent.name, "CURRENT_DATE": cast.today.isoformat()}


def _fill_flights(db: sqlite3.Connection, rng: random.Random, today: date) -> None:
    times = [(route, day, hour) for day in range(DAYS) for route in ROUTES for hour in sorted(rng.sample(HOURS, 3))]
    for number, ((origin, destination), day, hour) in zip(numbered(rng, len(times)), times, strict=True):
        departs = f"{today + timedelta(days=day)}T{hour:02d}:{rng.choice((0, 10, 25, 40)):02d}:00"
        seats = rng.choice((0, 1, 4, 9))
        state = "cancelled" if rng.random() < 0.15 else "scheduled"
        cents = rng.randrange(*(DEAR_CENTS if rng.random() < 0.2 else PLAIN_CENTS), 50)
        row = (number, origin, destination, departs, seats, cents, state)
        db.execute("INSERT INTO flights VALUES (?, ?, ?, ?, ?, ?, ?)", row)


class _Passenger:
    def __init__(
        self, db: sqlite3.Connection, rng: random.Random, number: int, person: Person, code: str, today: date
    ) -> None:
        self._db, self._rng, self._number, self._person, self._code = db, rng, number, person, code
        self._soon = (
            datetime.combine(today, datetime.min.time()) + timedelta(days=1, seconds=CLOCK_START_S)
        ).isoformat()

    def fill(self, kind: str) -> None:
        """Makes the booking and the script of a case. Some kinds need a pair of flights that this world may not have
        for the first draws."""
        rng, is_cancel = self._rng, kind in CANCELS
        fare = self._fare(kind)
        flight, new = next(self._flights(kind, fare)) if not is_cancel else (self._flight(kind), None)
        paid = self._paid(kind, flight["cents"], new)
        row = (self._code, self._last_name, self._person.email, fare, flight["id"], paid, "booked")
        self._db.execute("INSERT INTO bookings VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        is_free = kind.endswith("grounded")
        if new is not None:
            cents = 0 if is_free or fare == "basic" else CHANGE_CENTS[fare] + max(0, new["cents"] - paid)
        else:
            cents = paid if fare == "business" or is_free else paid // 2
        facts = {"code": self._code, "last_name": self._last_name}
        if kind == "stranger":
            facts["last_name"] = rng.choice([name for name in LAST_NAMES if name != self._last_name])
        if new is not None:
            facts |= {"day": new["departs_at"][:10], "from_time": new["from_time"]}
        script = UserScript(
            kind=kind,
            name=self._person.name,
            opening=rng.choice(OPENINGS["cancel" if is_cancel else "change"]),
            facts=facts,
            patience=rng.randint(9, 14),
            most_cents=cents - 1 if kind == "declined" else None,
            case={"code": self._code, "flight": flight["id"], "new": new["id"] if new else None, "cents": cents},
        )
        add_script(self._db, self._number, script)

    @property
    def _last_name(self) -> str:
        return self._person.name.partition(" ")[2]

    def _fare(self, kind: str) -> str:
        if kind.endswith(("basic", "grounded")):
            return "basic"
        if kind in ("business", "cancel_business"):
            return "business"
        return "flex"

    def _paid(self, kind: str, cents: int, new: Row | None) -> int:
        """Returns what the booking cost: more than the new flight, unless the kind of case wants it to be less."""
        if new is None or kind in ("basic", "soon", "stranger"):
            return cents
        if kind == "human":
            return new["cents"] - self._rng.randrange(MOST_CENTS, MOST_CENTS + 9_000, 50)  # and the fee is added
        if kind in ("dearer", "declined"):
            return max(1_000, new["cents"] - self._rng.randrange(2_000, 8_000, 50))
        return new["cents"] + self._rng.randrange(0, 6_000, 50)

    def _flight(self, kind: str) -> Row:
        """Returns a flight for a booking: cancelled, about to leave, or neither."""
        query = "SELECT * FROM flights WHERE state = ? AND departs_at "
        is_soon = kind.endswith("soon")
        state = "cancelled" if kind.endswith("grounded") else "scheduled"
        return self._rng.choice(self._rows(f"{query} {'<' if is_soon else '>'} ? ORDER BY id", state, self._soon))

    def _flights(self, kind: str, fare: str) -> Iterator[tuple[Row, Row]]:
        """Yields a flight and the one that the passenger is to get for it, by the rule for the first of a day."""
        rng = self._rng
        while True:
            flight = self._flight(kind)
            others = self._rows(
                "SELECT * FROM flights WHERE origin = ? AND destination = ? AND departs_at > ? AND id != ? ORDER BY id",
                # of whole days: the first flight of a day may leave too soon for one search and be found by another
                *(flight["origin"], flight["destination"], f"{self._soon[:10]}T24", flight["id"]),
            )
            day = rng.choice(others)["departs_at"][:10]
            hour = rng.choice((6, 9, 12, 15))
            fitting = [
                one
                for one in others
                if one["departs_at"] >= f"{day}T{hour:02d}:00"
                and one["departs_at"][:10] == day
                and one["seats"]
                and one["state"] == "scheduled"
            ]
            if not fitting or flight["departs_at"][:10] == day:
                continue
            first = min(fitting, key=lambda one: one["departs_at"])
            if kind == "human" and first["cents"] < DEAR_CENTS[0]:
                continue
            yield flight, {**first, "from_time": f"{hour:02d}:00"}

    def _rows(self, query: str, *args: object) -> list[Row]:
        cursor = self._db.execute(query, args)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]
