"""Tools that write: quotes, bookings, wishes, messages. Money moves with them."""

from __future__ import annotations

from datetime import datetime, timedelta

from palestra.environments.platform.apps.stay.days import checked_stay
from palestra.environments.platform.apps.stay.offers import Offer, discount, fee, fits, offer_of
from palestra.environments.platform.apps.stay.search_tools import check_guests, found_hotel, own_booking, shown_booking
from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext
from palestra.environments.platform.tool_schemas import ToolOutput, tool

QUOTE_MINUTES = 30
MAX_ROOMS = 5
DEFAULT_LIST = "favourites"


@tool(writes=True)
def quote_booking(
    context: ToolContext,
    room_id: int,
    check_in: str,
    check_out: str,
    rooms: int,
    guests: int,
    coupon: str | None = None,
) -> ToolOutput:
    """Get a price and a token to confirm it with, valid 30 minutes."""
    checked_stay(check_in, check_out, context.today)
    check_guests(guests)
    if not 1 <= rooms <= MAX_ROOMS:
        raise ToolError("bad_arguments", f"rooms must be 1 to {MAX_ROOMS}")
    offer = _offered(context, room_id, check_in, check_out, rooms, guests)
    cents = offer.cents * rooms
    if coupon is not None:
        off = discount(context, coupon, cents, context.today)
        if off is None:
            raise ToolError("bad_coupon", f"coupon {coupon!r} does not count for this stay", "quote without it")
        cents -= off
    token = f"q{context.value('SELECT count(*) FROM _quotes') + 1}"
    expires = (datetime.fromisoformat(context.now) + timedelta(minutes=QUOTE_MINUTES)).isoformat()
    context.insert(
        "_quotes",
        token=token,
        room_id=room_id,
        check_in=check_in,
        check_out=check_out,
        rooms=rooms,
        guests=guests,
        coupon=coupon,
        cents=cents,
        expires_at=expires,
    )
    return {"token": token, "total_cents": cents, "expires_at": expires}


@tool(writes=True)
def confirm_booking(context: ToolContext, token: str, card_last4: str, special_request: str = "") -> ToolOutput:
    """Book what was quoted, paid by a card of yours."""
    quote = context.first("SELECT * FROM _quotes WHERE token = ?", token)
    if quote is None or quote["expires_at"] < context.now:
        raise ToolError("bad_token", f"{token!r} is no quote, or has expired", "quote_booking gives a new one")
    card = _card(context, card_last4)
    offer = _offered(context, quote["room_id"], quote["check_in"], quote["check_out"], quote["rooms"], quote["guests"])
    booking_id = context.insert(
        "bookings",
        user_id=int(context.me),
        hotel_id=offer.hotel_id,
        check_in=quote["check_in"],
        check_out=quote["check_out"],
        guests=quote["guests"],
        status="confirmed",
        total_cents=quote["cents"],
        coupon=quote["coupon"],
        special_request=special_request,
        created_at=context.now,
    )
    context.insert("booking_rooms", booking_id=booking_id, room_id=quote["room_id"], rooms=quote["rooms"])
    _pay(context, booking_id, card["id"], "charge", quote["cents"])
    context.run("DELETE FROM _quotes WHERE token = ?", token)
    return shown_booking(context, own_booking(context, booking_id))


@tool(writes=True)
def change_booking(
    context: ToolContext, id: int, check_in: str | None = None, check_out: str | None = None, guests: int | None = None
) -> ToolOutput:
    """Move a booking or change its guests; the fee and the difference are paid by its card."""
    booking = _confirmed(context, id)
    first, last = check_in or booking["check_in"], check_out or booking["check_out"]
    people = booking["guests"] if guests is None else guests
    checked_stay(first, last, context.today)
    check_guests(people)
    (room,) = context.rows("SELECT room_id, rooms FROM booking_rooms WHERE booking_id = ?", id)
    offer = _offered(context, room["room_id"], first, last, room["rooms"], people, without=id)
    cost = fee(context, booking["hotel_id"], booking["check_in"], booking["total_cents"], context.today)
    total = offer.cents * room["rooms"]
    if booking["coupon"]:
        total -= discount(context, booking["coupon"], total, context.today) or 0
    changed = "UPDATE bookings SET check_in = ?, check_out = ?, guests = ?, total_cents = ? WHERE id = ?"
    context.run(changed, first, last, people, total, id)
    card_id = _card_of(context, id)
    if cost:
        _pay(context, id, card_id, "fee", cost)
    if total != booking["total_cents"]:
        _pay(context, id, card_id, "difference", total - booking["total_cents"])
    return shown_booking(context, own_booking(context, id)) | {"paid_fee_cents": cost}


@tool(writes=True)
def cancel_booking(context: ToolContext, id: int) -> ToolOutput:
    """Cancel a booking; the policy's fee is kept."""
    booking = _confirmed(context, id)
    cost = fee(context, booking["hotel_id"], booking["check_in"], booking["total_cents"], context.today)
    context.run("UPDATE bookings SET status = 'cancelled' WHERE id = ?", id)
    if booking["total_cents"] > cost:
        _pay(context, id, _card_of(context, id), "refund", cost - booking["total_cents"])
    return shown_booking(context, own_booking(context, id)) | {"refunded_cents": booking["total_cents"] - cost}


@tool(writes=True)
def save_to_wishlist(context: ToolContext, hotel_id: int, list: str = DEFAULT_LIST) -> ToolOutput:
    """Save a hotel to a list of yours."""
    hotel = found_hotel(context, hotel_id)
    if not 0 < len(list) <= 40:
        raise ToolError("bad_arguments", "the name of a list has 1 to 40 characters")
    context.run("INSERT INTO wishlists VALUES (?, ?, ?) ON CONFLICT DO NOTHING", int(context.me), list, hotel_id)
    return {"list": list, "saved": hotel["name"]}


@tool(writes=True)
def message_host(context: ToolContext, booking_id: int, text: str) -> ToolOutput:
    """Write to the host of a booking."""
    own_booking(context, booking_id)
    if not text.strip():
        raise ToolError("bad_arguments", "the text is empty")
    context.insert("messages", booking_id=booking_id, sender_id=int(context.me), text=text, created_at=context.now)
    return {"booking_id": booking_id, "sent": text}


def _offered(
    context: ToolContext,
    room_id: int,
    check_in: str,
    check_out: str,
    rooms: int,
    guests: int,
    without: int | None = None,
) -> Offer:
    offer = offer_of(context, room_id, check_in, check_out, without)
    if offer is None:
        raise ToolError("not_found", f"there is no room {room_id} for these days", "list_rooms shows what is free")
    if not fits(offer, rooms, guests):
        raise ToolError("not_available", f"{offer.name}: {offer.free} free, {offer.capacity} guests each", "list_rooms")
    return offer


def _confirmed(context: ToolContext, booking_id: int) -> Row:
    booking = own_booking(context, booking_id)
    if booking["status"] != "confirmed" or booking["check_in"] < context.today:
        raise ToolError("too_late", f"booking {booking_id} is {booking['status']}, check-in {booking['check_in']}")
    return booking


def _card(context: ToolContext, last4: str) -> Row:
    card = context.first("SELECT * FROM cards WHERE user_id = ? AND last4 = ?", context.me, last4)
    if card is None:
        raise ToolError("bad_card", f"you have no card ending in {last4!r}", "list_cards shows yours")
    return card


def _card_of(context: ToolContext, booking_id: int) -> int:
    return context.value("SELECT card_id FROM payments WHERE booking_id = ? ORDER BY id LIMIT 1", booking_id)


def _pay(context: ToolContext, booking_id: int, card_id: int, kind: str, cents: int) -> None:
    context.insert("payments", booking_id=booking_id, card_id=card_id, kind=kind, cents=cents, created_at=context.now)
