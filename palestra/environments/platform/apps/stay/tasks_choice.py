"""Tasks of `stay` where the agent has to weigh one thing against another."""

from __future__ import annotations

import random

from palestra.environments.platform.app import SeedDatabase, TemplateMaker
from palestra.environments.platform.apps.stay.days import between, plus
from palestra.environments.platform.apps.stay.offers import Offer, discount, fee, fits, offer_of, offers, review_score
from palestra.environments.platform.apps.stay.seed import ME
from palestra.environments.platform.apps.stay.task_parts import (
    book_cheapest,
    booked,
    booked_as_drawn,
    dollars,
    find_hotel,
    some_hotel,
    some_stay,
    the_cheapest,
    today,
)
from palestra.environments.platform.apps.stay.tasks_plain import CONFIRMED
from palestra.environments.platform.expectations import Expected, InsertedRow, UpdatedRow
from palestra.environments.platform.task_templates import AnswerKind, ExpectedAnswer, Params, Solution, SolutionCall

template = TemplateMaker("palestra.environments.platform.apps.stay")

# The best-reviewed hotel that qualifies


def _best_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    params = some_stay(rng, seed) | {"city": some_hotel(rng, seed)["city"]}
    amenity = rng.choice(seed.rows("SELECT id, name FROM amenities ORDER BY id"))
    limit = rng.randrange(20000, 60000, 1000)
    query = (
        "SELECT h.id, h.name FROM hotels h JOIN cities c ON c.id = city_id JOIN hotel_amenities a ON a.hotel_id = h.id "
        "WHERE c.name = ? AND amenity_id = ? ORDER BY h.id"
    )
    able = [
        (review_score(seed, hotel["id"]), hotel)
        for hotel in seed.rows(query, params["city"], amenity["id"])
        if (offer := _first(seed, hotel["id"], params)) is not None and offer.cents <= limit
    ]
    able.sort(key=lambda one: -one[0])
    if len(able) < 2 or able[0][0] == able[1][0]:
        return None
    best = able[0][1]
    offer = the_cheapest(seed, best["id"], params)
    if offer is None:
        return None
    found = {"hotel_id": best["id"], "hotel": best["name"], "room_id": offer.room_id, "cents": offer.cents}
    return params | found | {"amenity": amenity["name"].lower(), "limit": dollars(limit), "limit_cents": limit}


def _first(seed: SeedDatabase, hotel_id: int, stay: Params) -> Offer | None:
    return next(
        (o for o in offers(seed, hotel_id, stay["check_in"], stay["check_out"]) if fits(o, 1, stay["guests"])), None
    )


@template("2", params=_best_params, expect=booked_as_drawn, max_turns=8)
def best_reviewed(params: Params) -> Solution:
    requested = {name: params[name] for name in ("city", "check_in", "check_out", "guests")}
    requested |= {"amenities": [params["amenity"]], "price_max": params["limit_cents"], "sort": "reviews"}
    result = yield SolutionCall("search_hotels", requested)
    yield from book_cheapest(params, result["hotels"][0]["id"])


# Move a booking, if that is cheap


def _move_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    found = seed.rows(CONFIRMED, ME, today(seed))
    if not found:
        return None
    booking = rng.choice(found)
    length = between(booking["check_in"], booking["check_out"])
    check_in = plus(booking["check_in"], rng.choice((1, 2, 3, 7)))
    room = seed.rows("SELECT room_id FROM booking_rooms WHERE booking_id = ?", booking["id"])[0]["room_id"]
    offer = offer_of(seed, room, check_in, plus(check_in, length), without=booking["id"])
    cost = fee(seed, booking["hotel_id"], booking["check_in"], booking["total_cents"], today(seed))
    limit = rng.choice((0, 2000, 5000, 10000))
    if offer is None or not fits(offer, 1, booking["guests"]) or cost == limit:
        return None
    return {
        "booking": booking["id"],
        "check_in": check_in,
        "check_out": plus(check_in, length),
        "limit": dollars(limit),
        "limit_cents": limit,
        "fee": cost,
        "total": offer.cents,
    }


def _moved(params: Params, seed: SeedDatabase) -> list[Expected]:
    if params["fee"] > params["limit_cents"]:
        return []
    booking = seed.rows("SELECT * FROM bookings WHERE id = ?", params["booking"])[0]
    card = seed.rows("SELECT card_id FROM payments WHERE booking_id = ? ORDER BY id", booking["id"])[0]["card_id"]
    days = {"check_in": params["check_in"], "check_out": params["check_out"], "total_cents": params["total"]}
    expected: list[Expected] = [UpdatedRow("bookings", (booking["id"],), days)]
    for kind, cents in (("fee", params["fee"]), ("difference", params["total"] - booking["total_cents"])):
        if cents:
            row = {"booking_id": booking["id"], "card_id": card, "kind": kind, "cents": cents}
            expected.append(InsertedRow("payments", row))
    return expected


@template(
    "2",
    params=_move_params,
    expect=_moved,
    answer=lambda params: ExpectedAnswer(AnswerKind.MONEY, params["fee"]),
    max_turns=6,
)
def move_if_cheap(params: Params) -> Solution:
    result = yield SolutionCall("get_booking", {"id": params["booking"]})
    if result["fee_cents"] <= params["limit_cents"]:
        days = {"check_in": params["check_in"], "check_out": params["check_out"]}
        yield SolutionCall("change_booking", {"id": params["booking"], **days})
    yield SolutionCall(
        "submit_final_answer", {"answer": f"{result['fee_cents'] // 100}.{result['fee_cents'] % 100:02d}"}
    )


# A coupon, if it helps


def _coupon_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    params = some_hotel(rng, seed) | some_stay(rng, seed)
    offer = the_cheapest(seed, params["hotel_id"], params)
    if offer is None:
        return None
    code = rng.choice(seed.rows("SELECT code FROM coupons ORDER BY code"))["code"]
    off = discount(seed, code, offer.cents, today(seed))
    used = code if off else None
    return params | {"room_id": offer.room_id, "cents": offer.cents - (off or 0), "coupon": code, "used_coupon": used}


@template("2", params=_coupon_params, expect=booked_as_drawn, max_turns=9)
def coupon_if_it_helps(params: Params) -> Solution:
    hotel = yield from find_hotel(params, params["hotel"])
    yield from book_cheapest(params, hotel["id"], coupon=params["used_coupon"])


# Two rooms for different parties


def _two_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    params = some_hotel(rng, seed) | some_stay(rng, seed)
    small, large = params | {"guests": 1}, params | {"guests": rng.choice((2, 3))}
    one, other = the_cheapest(seed, params["hotel_id"], small), the_cheapest(seed, params["hotel_id"], large)
    if one is None or other is None or one.room_id == other.room_id:
        return None
    found = {"guests": large["guests"], "room_1": one.room_id, "cents_1": one.cents}
    return params | found | {"room_2": other.room_id, "cents_2": other.cents}


@template(
    "3",
    params=_two_params,
    expect=lambda params, seed: [
        *booked(params, seed, params["room_1"], params["cents_1"], guests=1),
        *booked(params, seed, params["room_2"], params["cents_2"]),
    ],
    max_turns=12,
)
def two_rooms(params: Params) -> Solution:
    hotel = yield from find_hotel(params, params["hotel"])
    yield from book_cheapest(params, hotel["id"], guests=1)
    yield from book_cheapest(params, hotel["id"], guests=params["guests"])


# Refundable, if that is not much dearer


def _refundable_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    params = some_stay(rng, seed)
    city = some_hotel(rng, seed)["city"]
    hotels = seed.rows(
        "SELECT h.id, h.name, is_refundable FROM hotels h JOIN cities c ON c.id = city_id "
        "JOIN policies ON hotel_id = h.id WHERE c.name = ? ORDER BY h.id",
        city,
    )
    flexible, strict = ([h for h in hotels if bool(h["is_refundable"]) is kind] for kind in (True, False))
    if not flexible or not strict:
        return None
    one, other = rng.choice(flexible), rng.choice(strict)
    offer, plain = the_cheapest(seed, one["id"], params), the_cheapest(seed, other["id"], params)
    extra = rng.randrange(1000, 12000, 500)
    if offer is None or plain is None or offer.cents - plain.cents == extra:
        return None
    is_worth = offer.cents - plain.cents <= extra
    chosen = offer if is_worth else plain
    found = {"city": city, "hotel": one["name"], "other": other["name"], "extra": dollars(extra), "extra_cents": extra}
    return params | found | {"room_id": chosen.room_id, "cents": chosen.cents}


@template("3", params=_refundable_params, expect=booked_as_drawn, max_turns=12)
def refundable_rule(params: Params) -> Solution:
    hotel = yield from find_hotel(params, params["hotel"])
    other = yield from find_hotel(params, params["other"])
    is_worth = hotel["from_cents"] - other["from_cents"] <= params["extra_cents"]
    yield from book_cheapest(params, (hotel if is_worth else other)["id"])


CHOICES = (best_reviewed, move_if_cheap, coupon_if_it_helps, two_rooms, refundable_rule)
