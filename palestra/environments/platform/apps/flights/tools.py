"""Tools of `flights`: they do what they are told; whether the policy allows it is the agent's affair."""

from __future__ import annotations

from palestra.environments.platform.apps.flights.seed import FACTS
from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.scripted_user import check_allowed, talk_tool
from palestra.environments.platform.times import moment
from palestra.environments.platform.tool_context import ToolContext, check_text
from palestra.environments.platform.tool_schemas import ToolOutput, tool

IDENTITY = ("code", "last_name")
talk_to_user = talk_tool(FACTS, IDENTITY)
PAGE = 10
MOST = 1_000_000  # cents of a payment


@tool()
def find_booking(context: ToolContext, code: str) -> ToolOutput:
    """Show a booking by its code: last name, fare, what was paid in cents, the flight."""
    found = _booking(context, code)
    return {**found, "flight": _flight(context, found["flight_id"])}


@tool()
def search_flights(
    context: ToolContext, origin: str, destination: str, day: str, cursor: str | None = None
) -> ToolOutput:
    """Find flights of a route on a day, the earliest first: free seats, price in cents, state."""
    found = moment(day, "day")[:10]
    query = (
        "SELECT * FROM flights WHERE origin = ? COLLATE NOCASE AND destination = ? COLLATE NOCASE "
        "AND substr(departs_at, 1, 10) = ? ORDER BY departs_at, id"
    )
    rows, following = context.page(query, origin, destination, found, limit=PAGE, cursor=cursor)
    return {"flights": rows, "next_cursor": following}


@tool(writes=True)
def change_flight(context: ToolContext, code: str, flight_id: int, charge_cents: int) -> ToolOutput:
    """Move a booking to another flight, and charge this amount of cents."""
    booking = _open(context, code)
    _check_cents("charge_cents", charge_cents)
    flight = _flight(context, flight_id)
    if flight["state"] != "scheduled" or not flight["seats"]:
        raise ToolError("not_available", f"flight {flight_id} is {flight['state']}, {flight['seats']} seats are free")
    check_allowed(context, (*IDENTITY, "day", "from_time"), charge_cents)
    context.run("UPDATE bookings SET flight_id = ? WHERE code = ?", flight_id, booking["code"])
    context.insert("payments", code=booking["code"], kind="charge", cents=charge_cents)
    return {"code": booking["code"], "flight": flight, "charged_cents": charge_cents}


@tool(writes=True)
def cancel_booking(context: ToolContext, code: str, refund_cents: int) -> ToolOutput:
    """Cancel a booking, and pay back this amount of cents."""
    booking = _open(context, code)
    _check_cents("refund_cents", refund_cents)
    check_allowed(context, IDENTITY, refund_cents)
    context.run("UPDATE bookings SET state = 'cancelled' WHERE code = ?", booking["code"])
    context.insert("payments", code=booking["code"], kind="refund", cents=refund_cents)
    return {"code": booking["code"], "state": "cancelled", "refunded_cents": refund_cents}


@tool(writes=True)
def transfer_to_human(context: ToolContext, code: str, reason: str) -> ToolOutput:
    """Hand the case over to a human colleague, who will call the passenger."""
    check_text("reason", reason, 500)
    booking = _booking(context, code)
    check_allowed(context, IDENTITY, None)
    context.insert("transfers", code=booking["code"], reason=reason)
    return {"transferred": booking["code"]}


def _booking(context: ToolContext, code: str) -> Row:
    query = "SELECT * FROM bookings WHERE code = ?"
    return context.found(f"there is no booking {code[:40]!r}", "ask the user for the code", query, code.strip().upper())


def _open(context: ToolContext, code: str) -> Row:
    booking = _booking(context, code)
    if booking["state"] != "booked":
        raise ToolError("already_cancelled", f"booking {booking['code']} is {booking['state']}")
    return booking


def _flight(context: ToolContext, number: int) -> Row:
    query = "SELECT * FROM flights WHERE id = ?"
    return context.found(f"there is no flight {number}", "search_flights shows ids", query, number)


def _check_cents(name: str, cents: int) -> None:
    if not 0 <= cents <= MOST:
        raise ToolError("bad_arguments", f"{name} must be 0 to {MOST}")


TOOLS = (talk_to_user, find_booking, search_flights, change_flight, cancel_booking, transfer_to_human)
