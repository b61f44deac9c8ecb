"""Tasks that take a look at many mails: the largest invoice, old newsletters, a rule, who writes most."""

from __future__ import annotations

import random
import re
from collections import Counter
from datetime import date, timedelta

from palestra.environments.platform.app import Seed, Size, TaskTemplate
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
from palestra.environments.platform.expectations import Expected, Text
from palestra.environments.platform.templates import Answer, AnswerKind, Call, Params, Solution

AMOUNT = re.compile(r"Amount due: \$([\d,]+)\.(\d\d)")

# The largest invoice


def _invoices(rng: random.Random, seed: Seed) -> Params | None:
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


def _forward_largest(params: Params) -> Solution:
    told = yield Call("search_contacts", {"query": params["name"]})
    email = told["contacts"][0]["email"]
    told = yield Call("search_messages", {"query": "invoice", "folder": INBOX, "limit": 50})
    amounts: dict[int, int] = {}
    for mail in told["messages"]:
        if mail["subject"].startswith("Invoice"):
            read = yield Call("get_message", {"id": mail["id"]})
            amounts[mail["id"]] = _amount(read["body"])
    largest = max(amounts, key=lambda number: amounts[number])
    yield Call("forward_message", {"id": largest, "to": [email], "comment": params["comment"]})


def _forwarded(params: Params, seed: Seed) -> list[Expected]:
    subject = forward_subject(params["subject"])
    mail = sent(seed, [params["email"]], subject, Text(params["comment"]), forward_of_id=params["id"])
    return mail + attached_again(seed, params["id"])


FORWARD_LARGEST = TaskTemplate(
    name="forward_largest",
    difficulty="2",
    max_turns=14,
    params=_invoices,
    prompts=(
        'Forward the invoice with the largest amount in my inbox to {name}, with the comment "{comment}"',
        'Find the most expensive invoice in the inbox and forward it to {name}. Comment: "{comment}"',
        'Which invoice in my inbox asks for the most money? Forward it to {name} and write "{comment}"',
        'Look through the invoices in the inbox and forward the highest one to {name} with this comment: "{comment}"',
        '{name} needs the invoice with the highest amount due (it is in the inbox). Forward it, comment "{comment}"',
        'Of all invoices in my inbox, forward the one with the greatest amount to {name}; the comment is "{comment}"',
        'Please forward the largest invoice, by amount due, from my inbox to {name}. Say "{comment}"',
        'Forward one invoice from the inbox to {name}: the one with the highest amount. Comment on it: "{comment}"',
    ),
    solve=_forward_largest,
    expect=_forwarded,
)

# Old newsletters


def _old_newsletters(rng: random.Random, seed: Seed) -> Params | None:
    today = date.fromisoformat(seed.variables["CURRENT_DATE"])
    day = (today - timedelta(days=rng.randrange(10, 60))).isoformat()
    found = mails(seed, "f.name = ?", NEWSLETTERS)
    old = [row for row in found if row["sent_at"] < day]
    ids = [row["id"] for row in old if not row["is_flagged"]]
    is_clear = all(row["sent_at"][:10] != day for row in found)  # "older than" would leave that day open
    if not is_clear or not 2 <= len(ids) <= 8 or len(old) == len(ids) or len(old) == len(found):
        return None
    return {"day": day, "folder": NEWSLETTERS, "ids": ids}


def _delete_newsletters(params: Params) -> Solution:
    told = yield Call("search_messages", {"folder": params["folder"], "before": params["day"], "limit": 50})
    for mail in told["messages"]:
        if not mail["flagged"]:
            yield Call("delete_message", {"id": mail["id"]})


DELETE_NEWSLETTERS = TaskTemplate(
    name="delete_newsletters",
    difficulty="2",
    max_turns=12,
    params=_old_newsletters,
    prompts=(
        "Delete all mails in the folder {folder} from before {day}, except flagged ones.",
        "Clean up the folder {folder}: delete what is older than {day}, but keep what is flagged.",
        "In {folder}, delete every mail that arrived before {day} and is not flagged.",
        "Throw away old newsletters (folder {folder}, before {day}). Flagged ones stay.",
        "Everything in {folder} dated before {day} can go to the trash unless it is flagged.",
        "Please delete the unflagged mails in {folder} that are older than {day}.",
        "Remove all mail before {day} from the folder {folder}; leave flagged mail alone.",
        "Delete newsletters in {folder} sent before {day}. Do not delete any that I flagged.",
    ),
    solve=_delete_newsletters,
    expect=lambda params, seed: deleted(seed, params["ids"]),
)

# A rule, and what it would have done


def _ruled(rng: random.Random, seed: Seed) -> Params | None:
    word, folder = rng.choice(words.PROJECTS), rng.choice(words.FOLDERS)
    found = mails(seed, "instr(lower(m.subject), ?) AND f.name = ?", word.lower(), INBOX)
    return {"word": word, "folder": folder, "ids": [row["id"] for row in found]} if 2 <= len(found) <= 8 else None


def _rule_and_move(params: Params) -> Solution:
    rule = {"field": "subject", "contains": params["word"], "action": "move", "target": params["folder"]}
    yield Call("create_rule", rule)
    told = yield Call("search_messages", {"query": params["word"], "folder": INBOX, "limit": 50})
    for mail in told["messages"]:
        if params["word"].lower() in mail["subject"].lower():
            yield Call("move_message", {"id": mail["id"], "folder": params["folder"]})


def _rule_and_moves(params: Params, seed: Seed) -> list[Expected]:
    rule = ruled(seed, field="subject", contains=params["word"], action="move", target=params["folder"])
    return [rule, *moved(seed, params["ids"], params["folder"])]


RULE_AND_APPLY = TaskTemplate(
    name="rule_and_apply",
    difficulty="3",
    max_turns=12,
    params=_ruled,
    prompts=(
        (
            'Create a rule that moves mail whose subject contains "{word}" to {folder}, '
            "and move the mails in my inbox that match it already."
        ),
        (
            'From now on mail with "{word}" in its subject should go to {folder}: make a rule. '
            "Then do the same with the mails that are in the inbox now."
        ),
        'Make a rule: subject contains "{word}", move to {folder}. Apply it to the inbox as it is, too.',
        (
            'Set up a rule for subjects with "{word}" that moves such mail to {folder}. '
            "A rule leaves old mail alone, so move what is in the inbox by hand."
        ),
        (
            'I want all mail about "{word}" (in the subject) in {folder}. Create the rule for mail to come '
            "and move what lies in the inbox."
        ),
        (
            'Please add a rule to move messages with "{word}" in the subject to {folder}, '
            "and file the matching messages of the inbox there as well."
        ),
        'Mail with the word "{word}" in its subject belongs into {folder}. Make a rule, then tidy the inbox likewise.',
        (
            'Two things: a rule that moves mail with "{word}" in the subject to {folder}; and the inbox\'s '
            "mails of that kind moved there now."
        ),
    ),
    solve=_rule_and_move,
    expect=_rule_and_moves,
)

# Who writes most


def _busiest(rng: random.Random, seed: Seed) -> Params | None:
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


def _count_senders(params: Params) -> Solution:
    search = {"folder": INBOX, "since": params["since"], "before": params["before"], "limit": 50}
    counts: Counter[str] = Counter()
    more: dict[str, str] = {}
    while True:
        told = yield Call("search_messages", search | more)
        counts.update(mail["from"].partition(" <")[0] for mail in told["messages"])
        if "next_cursor" not in told:
            break
        more = {"cursor": told["next_cursor"]}
    ((name, count),) = counts.most_common(1)
    yield Call("submit_final_answer", {"answer": f"{name}, {count}"})


BUSIEST_SENDER = TaskTemplate(
    name="busiest_sender",
    difficulty="2",
    size=Size.LARGE,
    max_turns=10,
    params=_busiest,
    prompts=tuple(
        f"{question} Answer with submit_final_answer, as: name, number (for example: Jane Doe, 3)."
        for question in (
            "Who sent most of the mails in my inbox that came {period}, and how many?",
            "Which sender has the most mails in my inbox that were sent {period}? How many are they?",
            "Count the mails in my inbox sent {period}: who wrote most of them, and how many?",
            "Look at the mails in the inbox that arrived {period}. Who wrote the most, and how often?",
            "Who sent the largest number of the mails that came {period} and are in my inbox? Give the number, too.",
            "Find the sender with the most inbox mails that came {period}, and their number.",
            "Whose mails are the most numerous in my inbox, of those sent {period}, and how many are there?",
            "My inbox, mails sent {period}: name the sender with the most and say how many.",
        )
    ),
    solve=_count_senders,
    expect=lambda _params, _seed: [],
    answer=lambda params: Answer(AnswerKind.SET, [params["name"], str(params["count"])]),
)

SEARCH_TASKS = (FORWARD_LARGEST, DELETE_NEWSLETTERS, RULE_AND_APPLY, BUSIEST_SENDER)
