"""Tasks that look at many mails: the largest invoice, old newsletters, a rule, who writes most."""

from __future__ import annotations

import random
import re
from collections import Counter
from datetime import date, timedelta

from palestra.environments.platform.app import SeedDatabase, SeedSize, TemplateMaker
from palestra.environments.platform.apps.mail import words
from palestra.environments.platform.apps.mail.expected import (
    any_one,
    attached_again,
    deleted,
    mails,
    moved,
    ruled,
    sent,
)
from palestra.environments.platform.apps.mail.schema import INBOX, NEWSLETTERS
from palestra.environments.platform.apps.mail.sending import forward_subject
from palestra.environments.platform.expectations import Expected, FreeText
from palestra.environments.platform.task_templates import (
    AnswerKind,
    ExpectedAnswer,
    Params,
    Solution,
    SolutionCall,
    read_pages,
)

template = TemplateMaker("palestra.environments.platform.apps.mail")

AMOUNT = re.compile(r"Amount due: \$([\d,]+)\.(\d\d)")

# The largest invoice


def _invoices(rng: random.Random, seed: SeedDatabase) -> Params | None:
    person = any_one(rng, seed.rows("SELECT name, email FROM contacts ORDER BY id"))
    found = mails(seed, "m.subject LIKE 'Invoice %' AND f.name = ?", INBOX)
    amounts = {row["id"]: _amount(row["body"]) for row in found}
    largest = max(found, key=lambda row: amounts[row["id"]])
    if len(found) < 3 or list(amounts.values()).count(amounts[largest["id"]]) != 1:
        return None
    return {
        "name": person["name"],
        "email": person["email"],
        "comment": rng.choice(words.COMMENTS),
        "id": largest["id"],
        "subject": largest["subject"],
    }


def _amount(body: str) -> int:
    found = AMOUNT.search(body)
    return int(found[1].replace(",", "") + found[2]) if found else 0


def _forwarded(params: Params, seed: SeedDatabase) -> list[Expected]:
    subject = forward_subject(params["subject"])
    mail = sent(seed, [params["email"]], subject, FreeText(params["comment"]), forward_of_id=params["id"])
    return mail + attached_again(seed, params["id"])


@template("2", params=_invoices, expect=_forwarded, max_turns=14)
def forward_largest(params: Params) -> Solution:
    result = yield SolutionCall("search_contacts", {"query": params["name"]})
    email = result["contacts"][0]["email"]
    result = yield SolutionCall("search_messages", {"query": "invoice", "folder": INBOX, "limit": 50})
    amounts: dict[int, int] = {}
    for mail in result["messages"]:
        if mail["subject"].startswith("Invoice"):
            read = yield SolutionCall("get_message", {"id": mail["id"]})
            amounts[mail["id"]] = _amount(read["body"])
    largest = max(amounts, key=lambda number: amounts[number])
    yield SolutionCall("forward_message", {"id": largest, "to": [email], "comment": params["comment"]})


# Old newsletters


def _old_newsletters(rng: random.Random, seed: SeedDatabase) -> Params | None:
    today = date.fromisoformat(seed.variables["CURRENT_DATE"])
    day = (today - timedelta(days=rng.randrange(10, 60))).isoformat()
    found = mails(seed, "f.name = ?", NEWSLETTERS)
    old = [row for row in found if row["sent_at"] < day]
    ids = [row["id"] for row in old if not row["is_flagged"]]
    is_clear = all(row["sent_at"][:10] != day for row in found)  # "older than" would be ambiguous for that day
    if not is_clear or not 2 <= len(ids) <= 8 or len(old) == len(ids) or len(old) == len(found):
        return None
    return {"day": day, "folder": NEWSLETTERS, "ids": ids}


@template("2", params=_old_newsletters, expect=lambda params, seed: deleted(seed, params["ids"]), max_turns=12)
def delete_newsletters(params: Params) -> Solution:
    result = yield SolutionCall("search_messages", {"folder": params["folder"], "before": params["day"], "limit": 50})
    for mail in result["messages"]:
        if not mail["flagged"]:
            yield SolutionCall("delete_message", {"id": mail["id"]})


# A rule, and what it would have done


def _ruled(rng: random.Random, seed: SeedDatabase) -> Params | None:
    word, folder = rng.choice(words.PROJECTS), rng.choice(words.FOLDERS)
    found = mails(seed, "instr(lower(m.subject), ?) AND f.name = ?", word.lower(), INBOX)
    return {"word": word, "folder": folder, "ids": [row["id"] for row in found]} if 2 <= len(found) <= 8 else None


def _rule_and_moves(params: Params, seed: SeedDatabase) -> list[Expected]:
    rule = ruled(seed, field="subject", contains=params["word"], action="move", target=params["folder"])
    return [rule, *moved(seed, params["ids"], params["folder"])]


@template("3", params=_ruled, expect=_rule_and_moves, max_turns=12)
def rule_and_apply(params: Params) -> Solution:
    rule = {"field": "subject", "contains": params["word"], "action": "move", "target": params["folder"]}
    yield SolutionCall("create_rule", rule)
    result = yield SolutionCall("search_messages", {"query": params["word"], "folder": INBOX, "limit": 50})
    for mail in result["messages"]:
        if params["word"].lower() in mail["subject"].lower():
            yield SolutionCall("move_message", {"id": mail["id"], "folder": params["folder"]})


# Who writes most


def _busiest(rng: random.Random, seed: SeedDatabase) -> Params | None:
    since, before, period = rng.choice((_last_month, _some_days, _some_days))(
        rng, date.fromisoformat(seed.variables["CURRENT_DATE"])
    )
    found = mails(seed, "f.name = ? AND m.sent_at >= ? AND m.sent_at < ?", INBOX, since.isoformat(), before.isoformat())
    counts = Counter(row["sender_name"] for row in found).most_common(2)
    if len(counts) < 2 or counts[0][1] == counts[1][1]:
        return None
    name, count = counts[0]
    return {
        "period": period,
        "since": since.isoformat(),
        "before": before.isoformat(),
        "name": name,
        "count": count,
    }


def _last_month(_rng: random.Random, today: date) -> tuple[date, date, str]:
    before = today.replace(day=1)
    since = (before - timedelta(days=1)).replace(day=1)
    return since, before, since.strftime("in %B %Y")


def _some_days(rng: random.Random, today: date) -> tuple[date, date, str]:
    since = today - timedelta(days=rng.randrange(30, 70))
    before = since + timedelta(days=rng.randrange(14, 29))
    return since, before, f"from {since} to {before - timedelta(days=1)} (both days included)"


@template(
    "2",
    params=_busiest,
    answer=lambda params: ExpectedAnswer(AnswerKind.SET, [params["name"], str(params["count"])]),
    size=SeedSize.LARGE,
    max_turns=10,
)
def busiest_sender(params: Params) -> Solution:
    search = {"folder": INBOX, "since": params["since"], "before": params["before"], "limit": 50}
    found = yield from read_pages("search_messages", "messages", **search)
    counts = Counter(mail["from"].partition(" <")[0] for mail in found)
    ((name, count),) = counts.most_common(1)
    yield SolutionCall("submit_final_answer", {"answer": f"{name}, {count}"})


SEARCH_TASKS = (forward_largest, delete_newsletters, rule_and_apply, busiest_sender)
