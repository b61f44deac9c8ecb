"""Tasks on one's calendar: answer an invitation, find a time for three, resolve a clash."""

from __future__ import annotations

import random
from datetime import date, timedelta
from itertools import combinations

from palestra.environments.platform.app import SeedDatabase, TemplateMaker
from palestra.environments.platform.apps.mail import words
from palestra.environments.platform.apps.mail.calendar_tools import BUSY
from palestra.environments.platform.apps.mail.expected import any_one, colleagues, scheduled, sent
from palestra.environments.platform.apps.mail.slots import Interval, free_slots
from palestra.environments.platform.changes import Row
from palestra.environments.platform.expectations import Expected, FreeText, UpdatedRow
from palestra.environments.platform.task_templates import Params, Solution, SolutionCall
from palestra.environments.platform.times import between

template = TemplateMaker("palestra.environments.platform.apps.mail")

RESPONSES = {"Accept": "accepted", "Decline": "declined", "Tentatively accept": "tentative"}


def _my_events(seed: SeedDatabase, day: str) -> list[Row]:
    """Returns the user's events with the user's response; none for those that the user organises."""
    me = seed.variables["LOGGED_IN_USER"]
    return seed.rows(
        "SELECT e.*, a.response FROM events e LEFT JOIN attendees a ON a.event_id = e.id AND a.email = ? "
        "WHERE substr(e.starts_at, 1, 10) = ? AND (e.organizer = ? OR a.email IS NOT NULL) ORDER BY e.starts_at, e.id",
        me,
        day,
        me,
    )


def any_day(rng: random.Random, seed: SeedDatabase) -> str:
    """Returns a day after today with events."""
    days = seed.rows(
        "SELECT DISTINCT substr(starts_at, 1, 10) AS day FROM events WHERE starts_at > ? ORDER BY day",
        seed.variables["CURRENT_DATE"] + "T24",
    )
    return rng.choice(days)["day"]


def day_slots(seed: SeedDatabase, people: list[str], day: str, minutes: int, without: int = 0) -> list[Interval]:
    """Returns free times in working hours. `without` is an event that does not count."""
    window = Interval(f"{day}T00:00:00", (date.fromisoformat(day) + timedelta(days=1)).isoformat() + "T00:00:00")
    query = BUSY.format(marks=", ".join("?" * len(people))).replace("WHERE", f"WHERE e.id != {without} AND", 1)
    rows = seed.rows(query, window.end, window.start, *people, *people)
    return free_slots([Interval(row["starts_at"], row["ends_at"]) for row in rows], window, minutes)


# An invitation


def _invitation(rng: random.Random, seed: SeedDatabase) -> Params | None:
    day = any_day(rng, seed)
    events = _my_events(seed, day)
    event = any_one(rng, [event for event in events if event["response"] == "needs_action"])
    if event is None or [other["title"] for other in events].count(event["title"]) != 1:
        return None
    (organizer,) = (person["name"] for person in colleagues(seed) if person["email"] == event["organizer"])
    verb = rng.choice(sorted(RESPONSES))
    return {
        "day": day,
        "title": event["title"],
        "name": organizer,
        "id": event["id"],
        "me": seed.variables["LOGGED_IN_USER"],
        "verb": verb,
        "doing": verb.lower(),
        "response": RESPONSES[verb],
    }


def _responded(params: Params, _seed: SeedDatabase) -> list[Expected]:
    return [UpdatedRow("attendees", (params["id"], params["me"]), {"response": params["response"]})]


@template("1", params=_invitation, expect=_responded, max_turns=6)
def respond_invite(params: Params) -> Solution:
    result = yield SolutionCall("list_events", {"start": params["day"], "end": params["day"], "limit": 50})
    (requested,) = (event["id"] for event in result["events"] if event["title"] == params["title"])
    yield SolutionCall("respond_event", {"id": requested, "response": params["response"]})


# The first time that suits three


def _meeting_of_three(rng: random.Random, seed: SeedDatabase) -> Params | None:
    first, second = rng.sample(colleagues(seed), 2)
    day, minutes = any_day(rng, seed), rng.choice((30, 60, 90))
    people = [seed.variables["LOGGED_IN_USER"], first["email"], second["email"]]
    slots = day_slots(seed, people, day, minutes)
    if not slots or slots[0].start.endswith("T09:00:00"):
        return None  # that would need no search
    return {
        "first": first["name"],
        "second": second["name"],
        "attendees": [first["email"], second["email"]],
        "day": day,
        "minutes": minutes,
        "title": rng.choice(words.MEETINGS).format(project=rng.choice(words.PROJECTS)),
        "location": rng.choice(words.ROOMS),
        "start": slots[0].start,
        "end": slots[0].end,
    }


def _created(params: Params, seed: SeedDatabase) -> list[Expected]:
    names = ("title", "start", "end", "location", "attendees")
    return scheduled(seed, **{name: params[name] for name in names})


@template("2", params=_meeting_of_three, expect=_created, max_turns=8)
def first_free_slot(params: Params) -> Solution:
    emails: list[str] = []
    for name in (params["first"], params["second"]):
        result = yield SolutionCall("search_contacts", {"query": name})
        emails.append(result["contacts"][0]["email"])
    search = {"attendees": emails, "start": params["day"], "end": params["day"], "minutes": params["minutes"]}
    result = yield SolutionCall("find_free_slot", search)
    slot = result["slots"][0]
    event = {"title": params["title"], "location": params["location"], "attendees": emails}
    yield SolutionCall("create_event", event | {"start": slot["start"], "end": slot["end"]})


# A clash


def _clash(rng: random.Random, seed: SeedDatabase) -> Params | None:
    me, day = seed.variables["LOGGED_IN_USER"], any_day(rng, seed)
    events = _my_events(seed, day)
    pairs = [
        (one, other)
        for one, other in combinations(events, 2)
        if one["starts_at"] < other["ends_at"] and other["starts_at"] < one["ends_at"]
    ]
    mine = [event for pair in pairs for event in pair if event["organizer"] == me]
    if len(pairs) != 1 or len(mine) != 1 or any(event["response"] == "declined" for event in events):
        return None
    event = mine[0]
    invited = [
        r["email"] for r in seed.rows("SELECT email FROM attendees WHERE event_id = ? ORDER BY email", event["id"])
    ]
    minutes = between(event["starts_at"], event["ends_at"]).seconds // 60
    slots, without = (day_slots(seed, [me, *invited], day, minutes, number) for number in (0, event["id"]))
    if not slots or without[0] != slots[0]:
        return None  # free only because the event itself is moved: people could not agree on that
    return {
        "day": day,
        "me": me,
        "id": event["id"],
        "attendees": invited,
        "start": slots[0].start,
        "end": slots[0].end,
        "subject": rng.choice(words.NOTICE_SUBJECTS),
        "text": rng.choice(words.NOTICES),
    }


def _resolved(params: Params, seed: SeedDatabase) -> list[Expected]:
    change = UpdatedRow("events", (params["id"],), {"starts_at": params["start"], "ends_at": params["end"]})
    return [change, *sent(seed, params["attendees"], FreeText(params["subject"]), FreeText(params["text"]))]


@template("3", params=_clash, expect=_resolved, max_turns=8)
def resolve_clash(params: Params) -> Solution:
    result = yield SolutionCall("list_events", {"start": params["day"], "end": params["day"], "limit": 50})
    pairs = combinations(result["events"], 2)
    clash = next(pair for pair in pairs if pair[0]["start"] < pair[1]["end"] and pair[1]["start"] < pair[0]["end"])
    (event,) = (event for event in clash if event["organizer"] == params["me"])
    minutes = between(event["start"], event["end"]).seconds // 60
    invited = list(event["attendees"])
    search = {"attendees": invited, "start": params["day"], "end": params["day"], "minutes": minutes}
    result = yield SolutionCall("find_free_slot", search)
    yield SolutionCall("update_event", {"id": event["id"], "start": result["slots"][0]["start"]})
    yield SolutionCall("send_message", {"to": invited, "subject": params["subject"], "body": params["text"]})


CALENDAR_TASKS = (respond_invite, first_free_slot, resolve_clash)
