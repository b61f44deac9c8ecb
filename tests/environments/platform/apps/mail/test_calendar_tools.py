"""The calendar: whose events one sees, who may change what, when people are free."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.environments.platform.apps.mail.slots import Interval, free_slots
from tests.environments.platform.apps.mail.conftest import Mailbox
from tests.properties import examples

START, END = "2026-06-01T10:00:00", "2026-06-01T11:00:00"  # a Monday
DAY = datetime.fromisoformat("2026-06-01T00:00:00")


def test_only_ones_own_events_are_listed_in_order(box: Mailbox):
    response = box.call("list_events", start=box.today, end="2027-12-31", limit=50)["events"]
    mine = box.rows(
        "SELECT id FROM events WHERE organizer = ? OR id IN (SELECT event_id FROM attendees WHERE email = ?) "
        "ORDER BY starts_at, id",
        box.me,
        box.me,
    )
    assert [event["id"] for event in response] == [row["id"] for row in mine]
    assert len(mine) < len(box.rows("SELECT id FROM events"))


def test_an_end_that_is_a_day_is_in_it(box: Mailbox):
    (row,) = box.rows("SELECT * FROM events WHERE organizer = ? ORDER BY id LIMIT 1", box.me)
    day = row["starts_at"][:10]
    assert row["id"] in {event["id"] for event in box.call("list_events", start=day, end=day, limit=50)["events"]}
    response = box.call("list_events", start=row["ends_at"], end=f"{day}T23:59", limit=50)
    assert row["id"] not in {event["id"] for event in response["events"]}


def test_an_event_is_made_and_moved(box: Mailbox):
    made = box.call(
        "create_event",
        title=" Plan ",
        start="2026-06-01 10:00",
        end=END,
        attendees=["A@b.example", box.me],
        location="Here",
    )
    assert made == {
        "id": made["id"],
        "title": "Plan",
        "start": START,
        "end": END,
        "location": "Here",
        "organizer": box.me,
        "attendees": {"a@b.example": "needs_action"},
    }
    moved = box.call("update_event", id=made["id"], start="2026-06-02T14:30")
    assert (moved["start"], moved["end"]) == ("2026-06-02T14:30:00", "2026-06-02T15:30:00")
    shorter = box.call("update_event", id=made["id"], end="2026-06-02T15:00", title="Plan B", location="")
    assert shorter == made | {
        "title": "Plan B",
        "start": "2026-06-02T14:30:00",
        "end": "2026-06-02T15:00:00",
        "location": "",
    }


@pytest.mark.parametrize(
    ("tool", "given", "code"),
    [
        ("create_event", {"title": "x", "start": END, "end": START}, "bad_date"),
        ("create_event", {"title": "x", "start": "tomorrow", "end": END}, "bad_date"),
        ("create_event", {"title": "x", "start": "1066-10-14", "end": END}, "bad_date"),
        ("create_event", {"title": " ", "start": START, "end": END}, "bad_arguments"),
        ("create_event", {"title": "x", "start": START, "end": END, "attendees": ["Bob"]}, "bad_address"),
        ("update_event", {"id": 99999, "title": "x"}, "not_found"),
        ("respond_event", {"id": 99999, "response": "accepted"}, "not_found"),
        ("respond_event", {"id": 1, "response": "maybe"}, "bad_arguments"),
        ("list_events", {"start": END, "end": START}, "bad_date"),
        ("find_free_slot", {"attendees": [], "start": START, "end": END, "minutes": 0}, "bad_arguments"),
        ("find_free_slot", {"attendees": [], "start": START, "end": "2026-12-01", "minutes": 30}, "bad_arguments"),
        ("find_free_slot", {"attendees": ["a@b.example"], "start": START, "end": END, "minutes": 30}, "no_calendar"),
    ],
)
def test_what_a_model_gets_wrong_it_is_told(box: Mailbox, tool: str, given: dict, code: str):
    assert box.refused(tool, **given)["error"] == code


def test_only_the_organizer_changes_an_event_and_only_the_invited_answer(box: Mailbox):
    (theirs,) = box.rows(
        "SELECT e.id FROM events e JOIN attendees a ON a.event_id = e.id WHERE a.email = ? ORDER BY e.id LIMIT 1",
        box.me,
    )
    (mine,) = box.rows("SELECT id FROM events WHERE organizer = ? ORDER BY id LIMIT 1", box.me)
    (foreign,) = box.rows(
        "SELECT id FROM events WHERE organizer != ? AND id NOT IN (SELECT event_id FROM attendees WHERE email = ?) "
        "ORDER BY id LIMIT 1",
        box.me,
        box.me,
    )
    assert box.refused("update_event", id=theirs["id"], title="x")["error"] == "not_allowed"
    assert box.refused("respond_event", id=mine["id"], response="accepted")["error"] == "not_allowed"
    assert box.refused("update_event", id=foreign["id"], title="x")["error"] == "not_found"
    assert box.call("respond_event", id=theirs["id"], response="tentative")["attendees"][box.me] == "tentative"


def test_who_declined_is_free(box: Mailbox):
    (person,) = box.rows("SELECT email FROM users WHERE email != ? ORDER BY id LIMIT 1", box.me)
    day = "2028-01-03"  # a Monday that nobody has plans for
    box.call("create_event", title="x", start=f"{day}T09:00", end=f"{day}T10:00")
    search = {"attendees": [person["email"]], "start": day, "end": day, "minutes": 60}
    assert box.call("find_free_slot", **search)["slots"] == [{"start": f"{day}T10:00:00", "end": f"{day}T11:00:00"}]
    box.instance.connection.execute("UPDATE events SET organizer = ? WHERE title = 'x'", (person["email"],))
    box.instance.connection.execute(
        "INSERT INTO attendees SELECT id, ?, 'declined' FROM events WHERE title = 'x'", (box.me,)
    )
    assert box.call("find_free_slot", **(search | {"attendees": []}))["slots"][0]["start"] == f"{day}T09:00:00"
    assert box.call("find_free_slot", **search)["slots"][0]["start"] == f"{day}T10:00:00"


def at(minute: int) -> str:
    return (DAY + timedelta(minutes=minute)).isoformat()


spans = st.tuples(st.integers(0, 7 * 96), st.integers(1, 16)).map(lambda s: (15 * s[0], 15 * (s[0] + s[1])))


@examples(60)
@given(st.lists(spans, max_size=12), spans, st.sampled_from([15, 30, 60, 120]))
def test_slots_are_free_and_none_is_missed(busy: list[tuple[int, int]], window: tuple[int, int], minutes: int):
    """Against every quarter of an hour of a week, looked at one by one."""
    taken = {quarter for start, end in busy for quarter in range(start, end, 15)}

    def is_free(start: int) -> bool:
        quarters = range(start, start + minutes, 15)
        return all(
            q not in taken and window[0] <= q < window[1] and 9 * 60 <= q % 1440 < 17 * 60 and q // 1440 < 5
            for q in quarters
        )

    def opens(start: int) -> bool:
        """Whether the quarter before is not free time."""
        q = start - 15
        return q in taken or q < window[0] or q % 1440 < 9 * 60

    expected = [at(start) for start in range(0, 7 * 1440, 15) if is_free(start) and opens(start)]
    given_busy = [Interval(at(start), at(end)) for start, end in sorted(busy)]
    found = free_slots(given_busy, Interval(at(window[0]), at(window[1])), minutes)
    assert [slot.start for slot in found] == expected
    assert all(
        slot.end == (datetime.fromisoformat(slot.start) + timedelta(minutes=minutes)).isoformat() for slot in found
    )
