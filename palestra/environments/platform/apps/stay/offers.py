"""Prices of rooms, their availability, and the price of cancelling, in one place.

Tools use the instance's tables, task templates those of the seed database: both have `rows(query, *args)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from palestra.environments.platform.apps.stay.days import between, nights
from palestra.environments.platform.changes import Row


class StayRows(Protocol):
    def rows(self, query: str, *args: object) -> Sequence[Row]: ...


class Offer(msgspec.Struct, frozen=True):
    room_id: int
    hotel_id: int
    name: str
    capacity: int
    free: int
    """Number of free rooms of this kind, over all nights."""
    cents: int
    """Price of one room for all nights."""


def offers(db: StayRows, hotel_id: int, check_in: str, check_out: str) -> list[Offer]:
    """Returns offers, the cheapest first."""
    found = [
        _offer(db, room, check_in, check_out)
        for room in db.rows("SELECT * FROM rooms WHERE hotel_id = ? ORDER BY id", hotel_id)
    ]
    return sorted((offer for offer in found if offer is not None), key=lambda offer: (offer.cents, offer.room_id))


def offer_of(db: StayRows, room_id: int, check_in: str, check_out: str, without: int | None = None) -> Offer | None:
    """`without` is a booking that is to be moved, and does not count."""
    room = db.rows("SELECT * FROM rooms WHERE id = ?", room_id)
    return _offer(db, room[0], check_in, check_out, without) if room else None


def _offer(db: StayRows, room: Row, check_in: str, check_out: str, without: int | None = None) -> Offer | None:
    """Returns an offer; None if there is no price for one of the nights."""
    days = nights(check_in, check_out)
    prices = db.rows(
        "SELECT first_day, last_day, cents FROM rates WHERE room_id = ? AND first_day <= ? AND last_day >= ?",
        room["id"],
        days[-1],
        days[0],
    )
    cents = [next((p["cents"] for p in prices if p["first_day"] <= day <= p["last_day"]), None) for day in days]
    if None in cents:
        return None
    taken = _taken(db, room["id"], days, without)
    free = room["count"] - max(taken.values(), default=0)
    total = sum(price for price in cents if price is not None)
    return Offer(room["id"], room["hotel_id"], room["name"], room["capacity"], max(0, free), total)


def _taken(db: StayRows, room_id: int, days: Sequence[str], without: int | None) -> dict[str, int]:
    sold = db.rows("SELECT day, rooms FROM sold WHERE room_id = ? AND day BETWEEN ? AND ?", room_id, days[0], days[-1])
    taken = {row["day"]: row["rooms"] for row in sold}
    booked = db.rows(
        "SELECT check_in, check_out, r.rooms FROM booking_rooms r JOIN bookings b ON b.id = r.booking_id "
        "WHERE r.room_id = ? AND b.status = 'confirmed' AND b.id IS NOT ? AND check_in <= ? AND check_out > ?",
        room_id,
        without,
        days[-1],
        days[0],
    )
    for one in booked:
        for day in days:
            if one["check_in"] <= day < one["check_out"]:
                taken[day] = taken.get(day, 0) + one["rooms"]
    return taken


def fits(offer: Offer, rooms: int, guests: int) -> bool:
    return offer.free >= rooms and offer.capacity * rooms >= guests


def discount(db: StayRows, code: str, cents: int, today: str) -> int | None:
    """Returns what a coupon takes off; None if it is not valid."""
    found = db.rows("SELECT * FROM coupons WHERE code = ?", code)
    if not found or found[0]["expires"] < today or cents < found[0]["min_cents"]:
        return None
    return cents * found[0]["percent"] // 100


def fee(db: StayRows, hotel_id: int, check_in: str, cents: int, today: str) -> int:
    """Returns the fee for cancelling or moving a booking today. If it is not refundable, this is the whole price."""
    policy = db.rows("SELECT * FROM policies WHERE hotel_id = ?", hotel_id)[0]
    if not policy["is_refundable"]:
        return cents
    return 0 if between(today, check_in) >= policy["free_days"] else cents * policy["fee_percent"] // 100


def review_score(db: StayRows, hotel_id: int) -> float:
    """Returns the score with one decimal; 0 without reviews."""
    return db.rows("SELECT round(coalesce(avg(score), 0), 1) AS s FROM reviews WHERE hotel_id = ?", hotel_id)[0]["s"]
