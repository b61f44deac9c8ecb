"""Tasks of `team` about people: who is concerned with an issue or a post, and how to reach them."""

from __future__ import annotations

import random

from palestra.environments.platform.app import SeedDatabase, TemplateMaker
from palestra.environments.platform.apps.forge import FORGE
from palestra.environments.platform.apps.forge.tasks_issues import closed, some_issue
from palestra.environments.platform.apps.forum import FORUM
from palestra.environments.platform.apps.forum.seed import ME
from palestra.environments.platform.apps.forum.tasks_plain import some_community
from palestra.environments.platform.apps.mail import MAIL, words
from palestra.environments.platform.apps.mail.expected import mails, scheduled, sent
from palestra.environments.platform.apps.mail.schema import INBOX
from palestra.environments.platform.apps.mail.tasks_calendar import any_day, day_slots
from palestra.environments.platform.expectations import Expected, FreeText, InsertedRow
from palestra.environments.platform.task_templates import (
    AnswerKind,
    ExpectedAnswer,
    Params,
    Solution,
    SolutionCall,
    SolutionPart,
)
from palestra.environments.platform.worlds import within

template = TemplateMaker("palestra.environments.platform.apps.team")

SUBJECTS = ("A question", "News", "Your work", "Short note", "Before Friday", "Thanks")
TEXTS = (
    "How far are you with it?",
    "Please tell me if you need help.",
    "This is done now, thank you.",
    "Can we talk about it on Monday?",
    "I had a look and it seems fine.",
    "Others have asked for it, too.",
)
MOST_MAILS = 40  # of one page


def full_name(handle: str) -> str:
    """Converts elena_novak to Elena Novak, which is the name everywhere else."""
    return handle.replace("_", " ").title()


def person(seed: SeedDatabase, handle: str) -> Params:
    """Finds a person in the mailbox."""
    return seed.part("mail").rows("SELECT name, email FROM contacts WHERE name = ?", full_name(handle))[0]


def mailed(params: Params, seed: SeedDatabase) -> list[Expected]:
    return within(
        MAIL, sent(seed.part("mail"), [params["email"]], FreeText(params["subject"]), FreeText(params["text"]))
    )


def find_address(handle: str) -> SolutionPart[str]:
    result = yield SolutionCall("mail.search_contacts", {"query": full_name(handle)})
    return result["contacts"][0]["email"]


def write_to(handle: str, params: Params) -> Solution:
    email = yield from find_address(handle)
    yield SolutionCall("mail.send_message", {"to": [email], "subject": params["subject"], "body": params["text"]})


def _subject_and_text(rng: random.Random) -> Params:
    return {"subject": rng.choice(SUBJECTS), "text": rng.choice(TEXTS)}


# Whoever an issue is assigned to


def _assigned(rng: random.Random, seed: SeedDatabase) -> Params | None:
    """Returns an open issue that is assigned to one person."""
    one = "(SELECT count(*) FROM assignees a WHERE a.repo_id = i.repo_id AND a.number = i.number) = 1"
    forge = seed.part("forge")
    issue = some_issue(rng, forge, f"state = 'open' AND {one}")
    if issue is None:
        return None
    query = "SELECT name FROM users JOIN assignees ON user_id = id WHERE repo_id = ? AND number = ?"
    handle = forge.rows(query, issue["repo_id"], issue["number"])[0]["name"]
    found = {name: issue[name] for name in ("repo", "repo_id", "number", "title")}
    return found | {"email": person(seed, handle)["email"]}


def _assignee(params: Params) -> SolutionPart[str]:
    result = yield SolutionCall("forge.get_issue", {"repo": params["repo"], "number": params["number"]})
    return result["assignees"][0]


def _mail_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    found = _assigned(rng, seed)
    return None if found is None else found | _subject_and_text(rng)


@template("1", params=_mail_params, expect=mailed, max_turns=6)
def mail_assignee(params: Params) -> Solution:
    handle = yield from _assignee(params)
    yield from write_to(handle, params)


def _meeting_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    found, mail = _assigned(rng, seed), seed.part("mail")
    if found is None:
        return None
    day, minutes = any_day(rng, mail), rng.choice((30, 60, 90))
    slots = day_slots(mail, [mail.variables["LOGGED_IN_USER"], found["email"]], day, minutes)
    if not slots or slots[0].start.endswith("T09:00:00"):
        return None  # that would need no search
    place = {"day": day, "minutes": minutes, "location": rng.choice(words.ROOMS)}
    return found | place | {"start": slots[0].start, "end": slots[0].end}


def _met(params: Params, seed: SeedDatabase) -> list[Expected]:
    times = {name: params[name] for name in ("start", "end", "location")}
    title = f"{params['repo']} issue {params['number']}"
    return within(MAIL, scheduled(seed.part("mail"), title=title, attendees=[params["email"]], **times))


@template("3", params=_meeting_params, expect=_met, max_turns=8)
def meet_assignee(params: Params) -> Solution:
    handle = yield from _assignee(params)
    email = yield from find_address(handle)
    search = {"attendees": [email], "start": params["day"], "end": params["day"], "minutes": params["minutes"]}
    result = yield SolutionCall("mail.find_free_slot", search)
    title, place = f"{params['repo']} issue {params['number']}", params["location"]
    yield SolutionCall(
        "mail.create_event", {"title": title, "location": place, "attendees": [email], **result["slots"][0]}
    )


def _count_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    found = _assigned(rng, seed)
    if found is None:
        return None
    count = len(mails(seed.part("mail"), "m.sender = ? AND f.name = ?", found["email"], INBOX))
    return found | {"count": count} if 1 <= count <= MOST_MAILS else None


@template(
    "2", params=_count_params, answer=lambda params: ExpectedAnswer(AnswerKind.INTEGER, params["count"]), max_turns=6
)
def mails_of_assignee(params: Params) -> Solution:
    handle = yield from _assignee(params)
    requested = {"sender": full_name(handle), "folder": INBOX, "limit": 50}
    result = yield SolutionCall("mail.search_messages", requested)
    yield SolutionCall("submit_final_answer", {"answer": str(len(result["messages"]))})


# Whoever wrote the top post


def _top_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    forum = seed.part("forum")
    found = some_community(rng, forum)
    query = "SELECT p.score, u.name FROM posts p JOIN users u ON u.id = author_id WHERE community_id = ? "
    first, second = forum.rows(f"{query} ORDER BY score DESC, p.id LIMIT 2", found["place"])
    if first["score"] == second["score"] or first["name"] == forum.variables["LOGGED_IN_NAME"]:
        return None
    return found | {"email": person(seed, first["name"])["email"]} | _subject_and_text(rng)


@template("1", params=_top_params, expect=mailed, max_turns=6)
def mail_top_author(params: Params) -> Solution:
    result = yield SolutionCall("forum.search_posts", {"community": params["community"], "sort": "top"})
    yield from write_to(result["posts"][0]["author"], params)


# Done, and told to all


def _done_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    forge, forum = seed.part("forge"), seed.part("forum")
    issue = some_issue(rng, forge, "state = 'open'")
    if issue is None:
        return None
    query = "SELECT u.name FROM issues JOIN users u ON u.id = author_id WHERE repo_id = ? AND number = ?"
    author = forge.rows(query, issue["repo_id"], issue["number"])[0]["name"]
    mine = "SELECT id AS place, name AS community FROM communities JOIN memberships ON community_id = id "
    place = rng.choice(forum.rows(f"{mine} WHERE user_id = ? ORDER BY id", ME))
    found = {name: issue[name] for name in ("repo", "repo_id", "number")} | dict(place)
    return found | {"email": person(seed, author)["email"]} | _subject_and_text(rng)


def _as_told(params: Params, seed: SeedDatabase) -> list[Expected]:
    issue = "SELECT title FROM issues WHERE repo_id = ? AND number = ?"
    body = seed.part("forge").rows(issue, params["repo_id"], params["number"])[0]["title"]
    post = {
        "community_id": params["place"],
        "author_id": ME,
        "title": FreeText(f"{params['repo']} issue {params['number']} is closed"),
        "body": FreeText(body),
        "flair": None,
        "state": "open",
    }
    forge, forum = within(FORGE, closed(params, seed)), within(FORUM, [InsertedRow("posts", post)])
    return [*forge, *forum, *mailed(params, seed)]


@template("3", params=_done_params, expect=_as_told, max_turns=8)
def close_and_tell(params: Params) -> Solution:
    issue = {"repo": params["repo"], "number": params["number"]}
    result = yield SolutionCall("forge.update_issue", {**issue, "state": "closed"})
    title = f"{params['repo']} issue {params['number']} is closed"
    yield SolutionCall("forum.create_post", {"community": params["community"], "title": title, "body": result["title"]})
    yield from write_to(result["author"], params)


PEOPLE_TASKS = (mail_assignee, mail_top_author, mails_of_assignee, meet_assignee, close_and_tell)
