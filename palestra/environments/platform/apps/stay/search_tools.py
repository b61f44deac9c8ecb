"""Tools that read: hotels, rooms, reviews, cards, bookings."""

from __future__ import annotations

from typing import Literal

from palestra.environments.platform.apps.stay.days import checked_stay
from palestra.environments.platform.apps.stay.offers import fee, fits, offers, review_score
from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext, page_start
from palestra.environments.platform.tool_schemas import ToolOutput, tool

PAGE = 10
MAX_GUESTS = 20


@tool()
def search_hotels(
    context: ToolContext,
    city: str,
    check_in: str,
    check_out: str,
    guests: int,
    stars_min: int | None = None,
    amenities: list[str] | None = None,
    price_max: int | None = None,
    sort: Literal["price", "stars", "reviews"] = "price",
    cursor: str | None = None,
) -> ToolOutput:
    """Find hotels with a free room; price_max is cents for the whole stay."""
    checked_stay(check_in, check_out, context.today)
    check_guests(guests)
    place = context.first("SELECT id FROM cities WHERE name = ? COLLATE NOCASE", city)
    if place is None:
        known = ", ".join(row["name"] for row in context.rows("SELECT name FROM cities ORDER BY name"))
        raise ToolError("unknown_city", f"there is no city {city!r}", f"cities: {known}")
    requested = {_amenity(context, name) for name in amenities or ()}
    found = []
    for hotel in context.rows("SELECT id, name, stars FROM hotels WHERE city_id = ? ORDER BY id", place["id"]):
        cheapest = next((o for o in offers(context, hotel["id"], check_in, check_out) if fits(o, 1, guests)), None)
        if cheapest is None or hotel["stars"] < (stars_min or 0) or not requested <= _amenities(context, hotel["id"]):
            continue
        if price_max is None or cheapest.cents <= price_max:
            found.append(hotel | {"review_score": review_score(context, hotel["id"]), "from_cents": cheapest.cents})
    keys = {"price": lambda h: h["from_cents"], "stars": lambda h: -h["stars"], "reviews": lambda h: -h["review_score"]}
    found.sort(key=lambda hotel: (keys[sort](hotel), hotel["id"]))
    return paged(found, cursor, "hotels")


@tool()
def get_hotel(context: ToolContext, id: int) -> ToolOutput:
    """Show a hotel: stars, amenities, reviews, cancellation policy."""
    hotel = found_hotel(context, id)
    policy = context.rows("SELECT is_refundable, free_days, fee_percent FROM policies WHERE hotel_id = ?", id)[0]
    return {
        "id": id,
        "name": hotel["name"],
        "city": hotel["city"],
        "stars": hotel["stars"],
        "amenities": sorted(_amenities(context, id)),
        "review_score": review_score(context, id),
        "refundable": bool(policy["is_refundable"]),
        "free_cancellation_days": policy["free_days"],
        "late_fee_percent": policy["fee_percent"],
    }


@tool()
def list_rooms(context: ToolContext, hotel_id: int, check_in: str, check_out: str, guests: int) -> ToolOutput:
    """List rooms of a hotel that are free and fit, the cheapest first."""
    checked_stay(check_in, check_out, context.today)
    check_guests(guests)
    found_hotel(context, hotel_id)
    rooms = [offer for offer in offers(context, hotel_id, check_in, check_out) if fits(offer, 1, guests)]
    result = (
        {"id": o.room_id, "name": o.name, "sleeps": o.capacity, "total_cents": o.cents, "free": o.free} for o in rooms
    )
    return {"rooms": [*result]}


@tool()
def get_reviews(
    context: ToolContext, hotel_id: int, sort: Literal["newest", "best", "worst"] = "newest", cursor: str | None = None
) -> ToolOutput:
    """Read reviews of a hotel."""
    found_hotel(context, hotel_id)
    order = {"newest": "day DESC", "best": "score DESC", "worst": "score"}[sort]
    query = f"SELECT score, text, day FROM reviews WHERE hotel_id = ? ORDER BY {order}, id"
    rows, following = context.page(query, hotel_id, limit=PAGE, cursor=cursor)
    return {"reviews": rows, "next_cursor": following}


@tool()
def list_bookings(context: ToolContext, status: Literal["confirmed", "cancelled", "past"] | None = None) -> ToolOutput:
    """List your bookings, the earliest check-in first."""
    rows = context.rows(
        "SELECT b.id, h.name AS hotel, check_in, check_out, guests, status, total_cents FROM bookings b "
        "JOIN hotels h ON h.id = b.hotel_id WHERE user_id = ? ORDER BY check_in, b.id",
        context.me,
    )
    return {"bookings": [row for row in rows if status is None or row["status"] == status]}


@tool()
def get_booking(context: ToolContext, id: int) -> ToolOutput:
    """Show a booking, and what changing or cancelling it costs today."""
    return shown_booking(context, own_booking(context, id))


@tool()
def list_cards(context: ToolContext) -> ToolOutput:
    """List your cards."""
    return {"cards": context.rows("SELECT brand, last4 FROM cards WHERE user_id = ? ORDER BY id", context.me)}


# Shared with the tools that write


def found_hotel(context: ToolContext, hotel_id: int) -> Row:
    query = "SELECT h.*, c.name AS city FROM hotels h JOIN cities c ON c.id = city_id WHERE h.id = ?"
    return context.found(f"there is no hotel {hotel_id}", "search_hotels finds ids", query, hotel_id)


def own_booking(context: ToolContext, booking_id: int) -> Row:
    query = "SELECT * FROM bookings WHERE id = ? AND user_id = ?"
    return context.found(
        f"you have no booking {booking_id}", "list_bookings shows yours", query, booking_id, context.me
    )


def shown_booking(context: ToolContext, booking: Row) -> dict[str, object]:
    rooms = context.rows(
        "SELECT room_id, rooms FROM booking_rooms WHERE booking_id = ? ORDER BY room_id", booking["id"]
    )
    shown = {
        k: booking[k] for k in ("id", "hotel_id", "check_in", "check_out", "guests", "status", "total_cents", "coupon")
    }
    shown |= {"rooms": rooms, "special_request": booking["special_request"]}
    if booking["status"] == "confirmed":
        shown["fee_cents"] = fee(
            context, booking["hotel_id"], booking["check_in"], booking["total_cents"], context.today
        )
    return shown


def check_guests(guests: int) -> None:
    if not 1 <= guests <= MAX_GUESTS:
        raise ToolError("bad_arguments", f"guests must be 1 to {MAX_GUESTS}")


def paged(rows: list[Row], cursor: str | None, name: str) -> ToolOutput:
    start = page_start(cursor)
    following = str(start + PAGE) if len(rows) > start + PAGE else None
    return {name: rows[start : start + PAGE], "next_cursor": following}


def _amenity(context: ToolContext, name: str) -> str:
    found = context.value("SELECT name FROM amenities WHERE name = ? COLLATE NOCASE", name)
    if found is None:
        known = ", ".join(row["name"] for row in context.rows("SELECT name FROM amenities ORDER BY name"))
        raise ToolError("unknown_amenity", f"there is no amenity {name!r}", f"amenities: {known}")
    return found


def _amenities(context: ToolContext, hotel_id: int) -> set[str]:
    query = "SELECT name FROM amenities JOIN hotel_amenities ON amenity_id = id WHERE hotel_id = ?"
    return {row["name"] for row in context.rows(query, hotel_id)}
