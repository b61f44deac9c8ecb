"""Tasks of `stay` with one thing to do or to find."""

from __future__ import annotations

import random

from palestra.environments.platform.app import SeedDatabase, SeedSize, TemplateMaker
from palestra.environments.platform.apps.stay.booking_tools import DEFAULT_LIST
from palestra.environments.platform.apps.stay.offers import fee
from palestra.environments.platform.apps.stay.seed import ME
from palestra.environments.platform.apps.stay.task_parts import (
    book_cheapest,
    booked_as_drawn,
    find_hotel,
    some_hotel,
    some_stay,
    the_cheapest,
    today,
)
from palestra.environments.platform.expectations import Expected, FreeText, InsertedRow, UpdatedRow
from palestra.environments.platform.task_templates import AnswerKind, ExpectedAnswer, Params, Solution, SolutionCall

template = TemplateMaker("palestra.environments.platform.apps.stay")

CONFIRMED = "SELECT * FROM bookings WHERE user_id = ? AND status = 'confirmed' AND check_in >= ? ORDER BY check_in, id"


# Save a hotel


@template(
    "0",
    params=some_hotel,
    expect=lambda params, _seed: [
        InsertedRow("wishlists", {"user_id": ME, "list": DEFAULT_LIST, "hotel_id": params["hotel_id"]})
    ],
    size=SeedSize.TINY,
    max_turns=3,
)
def save_hotel(params: Params) -> Solution:
    yield SolutionCall("save_to_wishlist", {"hotel_id": params["hotel_id"]})


# Cancel a booking


def _own_booking(rng: random.Random, seed: SeedDatabase) -> Params | None:
    found = seed.rows(CONFIRMED, ME, today(seed))
    return {"booking": rng.choice(found)["id"]} if found else None


def cancelled(params: Params, seed: SeedDatabase) -> list[Expected]:
    booking = seed.rows("SELECT * FROM bookings WHERE id = ?", params["booking"])[0]
    cost = fee(seed, booking["hotel_id"], booking["check_in"], booking["total_cents"], today(seed))
    expected: list[Expected] = [UpdatedRow("bookings", (booking["id"],), {"status": "cancelled"})]
    if booking["total_cents"] > cost:
        paid = seed.rows("SELECT card_id FROM payments WHERE booking_id = ? ORDER BY id", booking["id"])[0]
        row = {
            "booking_id": booking["id"],
            "card_id": paid["card_id"],
            "kind": "refund",
            "cents": cost - booking["total_cents"],
        }
        expected.append(InsertedRow("payments", row))
    return expected


@template("0", params=_own_booking, expect=cancelled, size=SeedSize.TINY, max_turns=3)
def cancel_booking(params: Params) -> Solution:
    yield SolutionCall("cancel_booking", {"id": params["booking"]})


# Book the cheapest room of a hotel


def _cheapest_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    params = some_hotel(rng, seed) | some_stay(rng, seed)
    offer = the_cheapest(seed, params["hotel_id"], params)
    return None if offer is None else params | {"room_id": offer.room_id, "cents": offer.cents}


@template("1", params=_cheapest_params, expect=booked_as_drawn, max_turns=8)
def cheapest_room(params: Params) -> Solution:
    hotel = yield from find_hotel(params, params["hotel"])
    yield from book_cheapest(params, hotel["id"])


# Write to the host of the next stay

TEXTS = (
    "We arrive after ten in the evening.",
    "Please keep a quiet room for us.",
    "Is there a place for two bicycles?",
    "We bring a small dog.",
    "One of us needs a cot.",
    "Could we check in early?",
)


def _next_stay(rng: random.Random, seed: SeedDatabase) -> Params | None:
    found = seed.rows(CONFIRMED, ME, today(seed))
    if len(found) < 2:
        return None
    return {"booking": found[0]["id"], "text": rng.choice(TEXTS)}


@template(
    "1",
    params=_next_stay,
    expect=lambda params, _seed: [
        InsertedRow("messages", {"booking_id": params["booking"], "sender_id": ME, "text": FreeText(params["text"])})
    ],
    max_turns=5,
)
def message_host(params: Params) -> Solution:
    result = yield SolutionCall("list_bookings", {"status": "confirmed"})
    yield SolutionCall("message_host", {"booking_id": result["bookings"][0]["id"], "text": params["text"]})


# How much was spent


def _spent_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    rows = seed.rows("SELECT check_in, total_cents FROM bookings WHERE user_id = ? AND status = 'past'", ME)
    if len(rows) < 2:
        return None
    month = rng.choice(rows)["check_in"][:7]
    total = sum(row["total_cents"] for row in rows if row["check_in"] >= f"{month}-01")
    return {"since": f"{month}-01", "cents": total}


@template(
    "2", params=_spent_params, answer=lambda params: ExpectedAnswer(AnswerKind.MONEY, params["cents"]), max_turns=5
)
def spent(params: Params) -> Solution:
    result = yield SolutionCall("list_bookings", {"status": "past"})
    total = sum(one["total_cents"] for one in result["bookings"] if one["check_in"] >= params["since"])
    yield SolutionCall("submit_final_answer", {"answer": f"{total // 100}.{total % 100:02d}"})


PLAIN = (save_hotel, cancel_booking, cheapest_room, message_host, spent)
