"""The initial data of a world of `stay`."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping

from palestra.environments.platform.app import SeedSize
from palestra.environments.platform.apps.stay.days import plus
from palestra.environments.platform.people import Cast
from palestra.environments.platform.seeds import numbered

CITIES = (("Lisbon", "Portugal"), ("Oslo", "Norway"), ("Kyoto", "Japan"), ("Quito", "Ecuador"), ("Tunis", "Tunisia"))
FIRST = ("Grand", "Old", "Blue", "Royal", "Garden", "Harbour", "Silver", "Little", "Northern", "Quiet")
LAST = ("Palace", "Inn", "House", "Lodge", "Rooms", "Terrace", "Court", "Anchor", "Mill", "Star")
AMENITIES = ("Breakfast", "Gym", "Parking", "Pool", "Sauna", "Wifi")
ROOMS = (("Single", 1), ("Double", 2), ("Triple", 3), ("Family", 4))
NAMES = ("Ana Ruiz", "Ben Okafor", "Chen Li", "Dora Weiss", "Emil Lund", "Farah Aziz", "Gus Porter", "Hana Sato")
PRAISE = (
    "Lovely stay.",
    "Clean and calm.",
    "Too loud at night.",
    "Great breakfast.",
    "Fair for the price.",
    "Cold room.",
)
HOTELS = {SeedSize.TINY: 4, SeedSize.SMALL: 12, SeedSize.LARGE: 40}
HORIZON = 60  # days that have prices
ME = 1


def fill(db: sqlite3.Connection, rng: random.Random, size: SeedSize) -> Mapping[str, str]:
    today = plus("2026-01-05", rng.randrange(300))
    names = rng.sample(NAMES, len(NAMES))
    return _fill(db, rng, size, today, [(name, f"{name.split()[0].lower()}@example.org") for name in names])


def fill_with(db: sqlite3.Connection, rng: random.Random, size: SeedSize, cast: Cast) -> Mapping[str, str]:
    """Fills the tables. Hosts are other people: colleagues of the user rent no rooms."""
    hosts = [(name, f"{name.split()[0].lower()}@example.org") for name in rng.sample(NAMES, len(NAMES) - 1)]
    me = cast.colleagues[0]
    return _fill(db, rng, size, cast.today.isoformat(), [(me.name, me.email), *hosts])


def _fill(
    db: sqlite3.Connection, rng: random.Random, size: SeedSize, today: str, people: list[tuple[str, str]]
) -> Mapping[str, str]:
    for number, (name, email) in enumerate(people, start=ME):
        db.execute("INSERT INTO users VALUES (?, ?, ?)", (number, name, email))
    cities = CITIES[: 2 if size is SeedSize.TINY else len(CITIES)]
    db.executemany("INSERT INTO cities (name, country) VALUES (?, ?)", cities)
    db.executemany("INSERT INTO amenities (name) VALUES (?)", [(name,) for name in AMENITIES])
    names = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], HOTELS[size])
    hotels = numbered(rng, len(names))
    for number, name in zip(hotels, names, strict=True):
        _hotel(db, rng, number, name, 1 + number % len(cities), today)
    for brand, last4 in (("Visa", rng.randrange(1000, 5000)), ("Mastercard", rng.randrange(5000, 10000))):
        db.execute("INSERT INTO cards (user_id, brand, last4) VALUES (?, ?, ?)", (ME, brand, str(last4)))
    _coupons(db, rng, today)
    _bookings(db, rng, today, hotels)
    name = db.execute("SELECT name FROM users WHERE id = ?", (ME,)).fetchone()[0]
    return {"LOGGED_IN_USER": str(ME), "LOGGED_IN_NAME": name, "CURRENT_DATE": today}


def _hotel(db: sqlite3.Connection, rng: random.Random, number: int, name: str, city: int, today: str) -> None:
    stars = rng.randint(2, 5)
    host = rng.randint(2, len(NAMES))
    db.execute("INSERT INTO hotels VALUES (?, ?, ?, ?, ?)", (number, city, name, stars, host))
    for amenity in sorted(rng.sample(range(1, len(AMENITIES) + 1), rng.randint(2, 4))):
        db.execute("INSERT INTO hotel_amenities VALUES (?, ?)", (number, amenity))
    policy = (number, int(rng.random() < 0.7), rng.choice((2, 5, 10)), rng.choice((10, 25, 50)))
    db.execute("INSERT INTO policies VALUES (?, ?, ?, ?)", policy)
    for kind, capacity in sorted(rng.sample(ROOMS, 3), key=lambda room: room[1]):
        _room(db, rng, number, kind, capacity, stars, today)
    for _ in range(rng.randint(3, 8)):
        row = (
            number,
            rng.randint(2, len(NAMES)),
            rng.randint(1, 10),
            rng.choice(PRAISE),
            plus(today, -rng.randint(1, 200)),
        )
        db.execute("INSERT INTO reviews (hotel_id, user_id, score, text, day) VALUES (?, ?, ?, ?, ?)", row)


def _room(
    db: sqlite3.Connection, rng: random.Random, hotel: int, kind: str, capacity: int, stars: int, today: str
) -> None:
    count = rng.randint(1, 4)
    inserted = db.execute(
        "INSERT INTO rooms (hotel_id, name, capacity, count) VALUES (?, ?, ?, ?)", (hotel, kind, capacity, count)
    )
    room, start = inserted.lastrowid, 0
    base = 1500 * stars + 1200 * capacity + rng.randrange(0, 3000, 50)
    while start < HORIZON:
        length = rng.randint(7, 20)
        last = plus(today, min(start + length, HORIZON) - 1)
        db.execute(
            "INSERT INTO rates VALUES (?, ?, ?, ?)", (room, plus(today, start), last, base + rng.randrange(0, 2500, 50))
        )
        start += length
    for day in sorted(rng.sample(range(HORIZON), 6)):
        db.execute("INSERT INTO sold VALUES (?, ?, ?)", (room, plus(today, day), rng.randint(1, count)))


def _coupons(db: sqlite3.Connection, rng: random.Random, today: str) -> None:
    for code in ("SPRING", "LONGSTAY", "WELCOME"):
        row = (code, rng.choice((5, 10, 15)), rng.choice((0, 20000, 60000)), plus(today, rng.choice((-5, 30, 90))))
        db.execute("INSERT INTO coupons VALUES (?, ?, ?, ?)", row)


def _bookings(db: sqlite3.Connection, rng: random.Random, today: str, hotels: range) -> None:
    """Makes past and future bookings; no two begin on the same day."""
    starts = [*rng.sample(range(-200, -3), 5), *rng.sample(range(1, 45), 4)]
    for booking, start in zip(numbered(rng, len(starts)), starts, strict=True):
        hotel, length = rng.choice(hotels), rng.randint(1, 4)
        room, capacity = rng.choice(
            db.execute("SELECT id, capacity FROM rooms WHERE hotel_id = ? ORDER BY id", (hotel,)).fetchall()
        )
        cents = length * rng.randrange(6000, 20000, 50)
        user = ME if rng.random() < 0.75 else 2
        status = "past" if start < 0 else "cancelled" if rng.random() < 0.15 else "confirmed"
        days = (plus(today, start), plus(today, start + length))
        stay = (booking, user, hotel, *days, rng.randint(1, capacity), status, cents)
        created = f"{plus(today, min(start, 0) - 9)}T12:00:00"
        db.execute(
            "INSERT INTO bookings (id, user_id, hotel_id, check_in, check_out, guests, status, total_cents, "
            "created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*stay, created),
        )
        db.execute("INSERT INTO booking_rooms VALUES (?, ?, 1)", (booking, room))
        db.execute(
            "INSERT INTO payments (booking_id, card_id, kind, cents, created_at) VALUES (?, ?, 'charge', ?, ?)",
            (booking, rng.randint(1, 2), cents, created),
        )
