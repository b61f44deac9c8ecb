"""Tools for the calendar. The user sees the events that they organise or are invited to; of other people only whether
they are busy."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from palestra.environments.platform.apps.mail.lookups import addresses, check_room
from palestra.environments.platform.apps.mail.slots import Interval, free_slots
from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.times import between, later, moment, span
from palestra.environments.platform.tool_context import ToolContext
from palestra.environments.platform.tool_schemas import ToolOutput, tool

MAX_TITLE = 200  # characters, of a location, too
LONGEST_SEARCH = timedelta(days=31)  # for a free slot
MAX_SLOTS = 10
UNANSWERED = "needs_action"

MINE = "(e.organizer = ? OR EXISTS (SELECT 1 FROM attendees a WHERE a.event_id = e.id AND a.email = ?))"
BUSY = """
SELECT e.starts_at, e.ends_at FROM events e
WHERE e.starts_at < ? AND e.ends_at > ? AND (e.organizer IN ({marks}) OR EXISTS
    (SELECT 1 FROM attendees a WHERE a.event_id = e.id AND a.response != 'declined' AND a.email IN ({marks})))
ORDER BY e.starts_at, e.id
"""


@tool()
def list_events(context: ToolContext, start: str, end: str, limit: int = 10, cursor: str | None = None) -> ToolOutput:
    """List my events between two dates, in order of start."""
    first, last = span(start, end)
    rows, following = context.page(
        f"SELECT e.* FROM events e WHERE e.starts_at < ? AND e.ends_at > ? AND {MINE} ORDER BY e.starts_at, e.id",
        last,
        first,
        context.me,
        context.me,
        limit=limit,
        cursor=cursor,
    )
    return {"events": [_shown(context, row) for row in rows], **({"next_cursor": following} if following else {})}


def _shown(context: ToolContext, row: Row) -> ToolOutput:
    attendees = context.rows("SELECT email, response FROM attendees WHERE event_id = ? ORDER BY email", row["id"])
    return {
        "id": row["id"],
        "title": row["title"],
        "start": row["starts_at"],
        "end": row["ends_at"],
        "location": row["location"],
        "organizer": row["organizer"],
        "attendees": {one["email"]: one["response"] for one in attendees},
    }


@tool(writes=True)
def create_event(
    context: ToolContext, title: str, start: str, end: str, attendees: list[str] | None = None, location: str = ""
) -> ToolOutput:
    """Put an event into my calendar and invite attendees by address."""
    invited = [one for one in addresses(attendees or []) if one != context.me]
    check_room(context, "events")
    first, last = _times(start, end)
    made = context.insert(
        "events",
        organizer=context.me,
        title=_short("title", title),
        starts_at=first,
        ends_at=last,
        location=_short("location", location) if location else "",
    )
    for email in invited:
        context.insert("attendees", event_id=made, email=email, response=UNANSWERED)
    return _shown(context, _event(context, made))


@tool(writes=True)
def update_event(
    context: ToolContext,
    id: int,
    title: str | None = None,
    start: str | None = None,
    end: str | None = None,
    location: str | None = None,
) -> ToolOutput:
    """Change an event I organise; a new start alone keeps its length."""
    row = _event(context, id)
    if row["organizer"] != context.me:
        raise ToolError(
            "not_allowed", f"event {id} is organised by {row['organizer']}", "only its organizer changes it"
        )
    if title is None and start is None and end is None and location is None:
        raise ToolError("bad_arguments", "nothing to change", "give title, start, end or location")
    first, last = _new_times(row, start, end)
    context.run(
        "UPDATE events SET title = ?, starts_at = ?, ends_at = ?, location = ? WHERE id = ?",
        row["title"] if title is None else _short("title", title),
        first,
        last,
        row["location"] if location is None else location and _short("location", location),
        id,
    )
    return _shown(context, _event(context, id))


def _new_times(row: Row, start: str | None, end: str | None) -> tuple[str, str]:
    if start is not None and end is None:
        first = moment(start, "start")
        return first, later(first, between(row["starts_at"], row["ends_at"]))
    return _times(start or row["starts_at"], end or row["ends_at"])


def _times(start: str, end: str) -> tuple[str, str]:
    first, last = moment(start, "start"), moment(end, "end")
    if first >= last:
        raise ToolError("bad_date", f"end must be after start, found {first} to {last}", "write both with their time")
    return first, last


@tool(writes=True)
def respond_event(context: ToolContext, id: int, response: Literal["accepted", "declined", "tentative"]) -> ToolOutput:
    """Answer an invitation."""
    row = _event(context, id)
    if not context.run("UPDATE attendees SET response = ? WHERE event_id = ? AND email = ?", response, id, context.me):
        raise ToolError("not_allowed", f"you organise event {id}", "only who is invited answers")
    return _shown(context, row)


@tool()
def find_free_slot(context: ToolContext, attendees: list[str], start: str, end: str, minutes: int) -> ToolOutput:
    """Find working time (Mon-Fri 9:00-17:00) when attendees and I are free."""
    first, last = span(start, end)
    if not 5 <= minutes <= 480:
        raise ToolError("bad_arguments", "minutes must be 5 to 480")
    if between(first, last) > LONGEST_SEARCH:
        raise ToolError("bad_arguments", f"at most {LONGEST_SEARCH.days} days at once", "choose a nearer end")
    people = list(dict.fromkeys([context.me, *addresses(attendees)]))
    for email in people:
        if context.value("SELECT 1 FROM users WHERE email = ?", email) is None:
            raise ToolError("no_calendar", f"{email} shares no calendar", "only colleagues do")
    slots = free_slots(_busy(context, people, first, last), Interval(first, last), minutes)
    return {"slots": [{"start": slot.start, "end": slot.end} for slot in slots[:MAX_SLOTS]]}


def _busy(context: ToolContext, people: list[str], first: str, last: str) -> list[Interval]:
    marks = ", ".join("?" * len(people))
    rows = context.rows(BUSY.format(marks=marks), last, first, *people, *people)
    return [Interval(row["starts_at"], row["ends_at"]) for row in rows]


def _event(context: ToolContext, number: int) -> Row:
    missing, hint = f"there is no event {number} in your calendar", "list_events(start, end) shows ids"
    query = f"SELECT e.* FROM events e WHERE e.id = ? AND {MINE}"
    return context.found(missing, hint, query, number, context.me, context.me)


def _short(argument: str, text: str) -> str:
    found = text.strip()
    if not 0 < len(found) <= MAX_TITLE:
        raise ToolError("bad_arguments", f"{argument} must have 1 to {MAX_TITLE} characters")
    return found
