"""What a task takes for its target, found again in another way: by looking at every row of the seed."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from datetime import datetime, timedelta

from palestra.environments.platform import PlatformTask
from tests.environments.platform.apps.mail.conftest import MAIL, TEMPLATES, counted, tasks

MINUTE = timedelta(minutes=1)


def every_mail(task: PlatformTask) -> list[dict]:
    return task.seed.rows("SELECT m.*, f.name AS folder FROM messages m JOIN folders f ON f.id = m.folder_id")


def busy_minutes(task: PlatformTask, people: set[str], without: int = 0) -> set[datetime]:
    """Minute by minute, by everybody's own events and those they did not decline."""
    invited = defaultdict(set)
    for row in task.seed.rows("SELECT * FROM attendees"):
        if row["response"] != "declined":
            invited[row["event_id"]].add(row["email"])
    found: set[datetime] = set()
    for event in task.seed.rows("SELECT * FROM events WHERE id != ?", without):
        if people & {event["organizer"], *invited[event["id"]]}:
            at, end = datetime.fromisoformat(event["starts_at"]), datetime.fromisoformat(event["ends_at"])
            while at < end:
                found.add(at)
                at += MINUTE
    return found


def first_free(task: PlatformTask, people: set[str], minutes: int, without: int = 0) -> str:
    busy, nine = busy_minutes(task, people, without), datetime.fromisoformat(f"{task.params['day']}T09:00:00")
    starts = (nine + n * MINUTE for n in range(480 - minutes + 1))
    return next(at for at in starts if not any(at + n * MINUTE in busy for n in range(minutes))).isoformat()


@counted
def test_the_first_free_slot_is_the_first(count: int):
    for task in tasks(TEMPLATES["first_free_slot"], count):
        params = task.params
        people = {task.variables["LOGGED_IN_USER"], *params["attendees"]}
        assert params["start"] == first_free(task, people, params["minutes"])
        assert datetime.fromisoformat(params["end"]) - datetime.fromisoformat(params["start"]) == timedelta(
            minutes=params["minutes"]
        )


@counted
def test_a_clash_is_the_only_one_and_has_one_way_out(count: int):
    for task in tasks(TEMPLATES["resolve_clash"], count):
        me, params = task.variables["LOGGED_IN_USER"], task.params
        mine = task.seed.rows(
            "SELECT * FROM events WHERE starts_at LIKE ? AND (organizer = ? OR id IN "
            "(SELECT event_id FROM attendees WHERE email = ?))",
            f"{params['day']}%",
            me,
            me,
        )
        at = defaultdict(set)
        for event in mine:
            moment, end = datetime.fromisoformat(event["starts_at"]), datetime.fromisoformat(event["ends_at"])
            while moment < end:
                at[moment].add(event["id"])
                moment += MINUTE
        clashes = {frozenset(ids) for ids in at.values() if len(ids) > 1}
        assert len(clashes) == 1
        organised = [event for event in mine if event["id"] in next(iter(clashes)) and event["organizer"] == me]
        assert [event["id"] for event in organised] == [params["id"]]
        span = datetime.fromisoformat(params["end"]) - datetime.fromisoformat(params["start"])
        people, minutes = {me, *params["attendees"]}, span.seconds // 60
        assert params["start"] == first_free(task, people, minutes) == first_free(task, people, minutes, params["id"])
        assert params["start"] != organised[0]["starts_at"]


@counted
def test_the_only_mail_and_the_latest_one_are(count: int):
    for task in tasks(TEMPLATES["move_only"], count):
        assert [m["id"] for m in every_mail(task) if m["sender_name"] == task.params["name"]] == [task.params["id"]]
    for task in tasks(TEMPLATES["reply_latest"], count):
        theirs = {m["sent_at"]: m["id"] for m in every_mail(task) if m["sender_name"] == task.params["name"]}
        assert theirs[max(theirs)] == task.params["id"]


@counted
def test_the_largest_invoice_is_the_largest(count: int):
    for task in tasks(TEMPLATES["forward_largest"], count):
        amounts = Counter()
        for mail in every_mail(task):
            found = re.search(r"\$([\d,.]+)", mail["body"])
            if found and mail["folder"] == "Inbox":
                amounts[mail["id"]] = int(re.sub(r"\D", "", found[1]))
        (first, most), (_, second) = amounts.most_common(2)
        assert first == task.params["id"]
        assert most > second


@counted
def test_the_busiest_sender_is_alone_at_the_top(count: int):
    for task in tasks(TEMPLATES["busiest_sender"], count):
        since, before = task.params["since"], task.params["before"]
        counts = Counter(
            m["sender_name"] for m in every_mail(task) if m["folder"] == "Inbox" and since <= m["sent_at"] < before
        )
        (name, most), (_, second) = counts.most_common(2)
        assert (name, most) == (task.params["name"], task.params["count"])
        assert most > second


def test_every_template_has_eight_ways_to_be_asked_for_and_all_can_be_filled_in():
    for template in MAIL.templates:
        assert len(set(template.prompts)) >= 8
        params = tasks(template, 1)[0].params
        request = [prompt.format_map(params) for prompt in template.prompts]
        assert len(set(request)) == len(request)
        if template.answer is not None:
            assert all("submit_final_answer" in prompt for prompt in request)


def test_tasks_differ():
    for template in MAIL.templates:
        assert len({task.prompt + task.seed.key for task in tasks(template, 15)}) > 12
