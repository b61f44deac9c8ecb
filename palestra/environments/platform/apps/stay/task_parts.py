"""Parts that the tasks of `stay` share: rows of a seed database, a stay to book, what a booking must leave
behind."""

from __future__ import annotations

import random

from palestra.environments.platform.app import SeedDatabase
from palestra.environments.platform.apps.stay.days import plus
from palestra.environments.platform.apps.stay.offers import Offer, fits, offers
from palestra.environments.platform.apps.stay.seed import HORIZON, ME
from palestra.environments.platform.expectations import Expected, InsertedRow
from palestra.environments.platform.task_templates import Params, SolutionCall, SolutionPart

EDGE = 6  # days before the end of the prices in which no stay begins


def today(seed: SeedDatabase) -> str:
    return seed.variables["CURRENT_DATE"]


def dollars(cents: int) -> str:
    return f"${cents // 100}.{cents % 100:02d}"


def some_stay(rng: random.Random, seed: SeedDatabase, max_guests: int = 3) -> Params:
    """Returns days, guests, a card."""
    check_in = plus(today(seed), rng.randint(2, HORIZON - EDGE))
    card = rng.choice(seed.rows("SELECT last4 FROM cards WHERE user_id = ? ORDER BY id", ME))
    return {
        "check_in": check_in,
        "check_out": plus(check_in, rng.randint(1, 4)),
        "guests": rng.randint(1, max_guests),
        "last4": card["last4"],
    }


def some_hotel(rng: random.Random, seed: SeedDatabase) -> Params:
    query = "SELECT h.id AS hotel_id, h.name AS hotel, c.name AS city FROM hotels h JOIN cities c ON c.id = city_id"
    query += " ORDER BY 1"
    return dict(rng.choice(seed.rows(query)))


def the_cheapest(seed: SeedDatabase, hotel_id: int, stay: Params) -> Offer | None:
    """Returns the cheapest offer that fits; None if there is none, or two."""
    found = [o for o in offers(seed, hotel_id, stay["check_in"], stay["check_out"]) if fits(o, 1, stay["guests"])]
    if not found or (len(found) > 1 and found[1].cents == found[0].cents):
        return None
    return found[0]


def booked(params: Params, seed: SeedDatabase, room_id: int, cents: int, guests: int | None = None) -> list[Expected]:
    """Expects one booking of one room, paid by the given card."""
    room = seed.rows("SELECT hotel_id FROM rooms WHERE id = ?", room_id)[0]
    card = seed.rows("SELECT id FROM cards WHERE user_id = ? AND last4 = ?", ME, params["last4"])[0]
    row = {
        "user_id": ME,
        "hotel_id": room["hotel_id"],
        "check_in": params["check_in"],
        "check_out": params["check_out"],
        "guests": params["guests"] if guests is None else guests,
        "status": "confirmed",
        "total_cents": cents,
        "coupon": params.get("used_coupon"),
        "special_request": "",
    }
    return [
        InsertedRow("bookings", row),
        InsertedRow("booking_rooms", {"room_id": room_id, "rooms": 1}),
        InsertedRow("payments", {"card_id": card["id"], "kind": "charge", "cents": cents}),
    ]


def booked_as_drawn(params: Params, seed: SeedDatabase) -> list[Expected]:
    return booked(params, seed, params["room_id"], params["cents"])


def find_hotel(params: Params, name: str) -> SolutionPart[Params]:
    """Returns the hotel as search_hotels shows it: its id, and what its cheapest room costs. Raises LookupError if it
    is booked out."""
    cursor: str | None = None
    while True:
        result = yield SolutionCall("search_hotels", _searched(params, cursor))
        found = next((hotel for hotel in result["hotels"] if hotel["name"] == name), None)
        if found is not None:
            return found
        cursor = result["next_cursor"]
        if cursor is None:
            raise LookupError(f"{name} has no room for these days")


def _searched(params: Params, cursor: str | None) -> Params:
    requested = {name: params[name] for name in ("city", "check_in", "check_out", "guests")}
    return requested | ({} if cursor is None else {"cursor": cursor})


def book_cheapest(
    params: Params, hotel_id: int, guests: int | None = None, coupon: str | None = None
) -> SolutionPart[Params]:
    """Returns the booking, as it is shown."""
    guests = params["guests"] if guests is None else guests
    days = {"check_in": params["check_in"], "check_out": params["check_out"]}
    rooms = yield SolutionCall("list_rooms", {"hotel_id": hotel_id, **days, "guests": guests})
    room = {"room_id": rooms["rooms"][0]["id"], **days, "rooms": 1, "guests": guests}
    quote = yield SolutionCall("quote_booking", room if coupon is None else {**room, "coupon": coupon})
    return (yield SolutionCall("confirm_booking", {"token": quote["token"], "card_last4": params["last4"]}))
