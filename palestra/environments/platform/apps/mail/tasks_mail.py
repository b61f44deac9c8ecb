"""Tasks on mail of one person or one number: mark, move, label, reply."""

from __future__ import annotations

import random

from palestra.environments.platform.app import SeedDatabase, SeedSize, TemplateMaker
from palestra.environments.platform.apps.mail import words
from palestra.environments.platform.apps.mail.expected import any_contact, labelled, mails, moved, sent
from palestra.environments.platform.apps.mail.schema import INBOX, TRASH
from palestra.environments.platform.apps.mail.sending import reply_subject
from palestra.environments.platform.expectations import Expected, FreeText, UpdatedRow
from palestra.environments.platform.task_templates import Params, Solution, SolutionCall

template = TemplateMaker("palestra.environments.platform.apps.mail")

# One mail, by its number


def _unread(rng: random.Random, seed: SeedDatabase) -> Params | None:
    found = mails(seed, "m.is_read = 0 AND f.name = ?", INBOX)
    # with a single one, "mark all" would be right, too
    return {"id": rng.choice(found)["id"]} if len(found) > 1 else None


@template(
    "0",
    params=_unread,
    expect=lambda params, _seed: [UpdatedRow("messages", (params["id"],), {"is_read": 1})],
    size=SeedSize.TINY,
    max_turns=4,
)
def mark_read(params: Params) -> Solution:
    yield SolutionCall("set_flags", {"id": params["id"], "read": True})


# The only mail of a sender


def _only_mail(rng: random.Random, seed: SeedDatabase) -> Params | None:
    person, folder = any_contact(rng, seed), rng.choice(words.FOLDERS)
    found = mails(seed, "m.sender = ?", person["email"])
    if len(found) != 1 or found[0]["folder"] in (folder, TRASH):
        return None
    return {"name": person["name"], "folder": folder, "id": found[0]["id"]}


@template(
    "0",
    params=_only_mail,
    expect=lambda params, seed: moved(seed, [params["id"]], params["folder"]),
    size=SeedSize.TINY,
    max_turns=5,
)
def move_only(params: Params) -> Solution:
    result = yield SolutionCall("search_messages", {"sender": params["name"]})
    yield SolutionCall("move_message", {"id": result["messages"][0]["id"], "folder": params["folder"]})


# All mails of a sender


def _mails_to_label(rng: random.Random, seed: SeedDatabase) -> Params | None:
    person, label = any_contact(rng, seed), rng.choice(words.LABELS)
    found = mails(seed, "m.sender = ? AND f.name = ?", person["email"], INBOX)
    has = {
        row["message_id"]
        for row in seed.rows(
            "SELECT message_id FROM message_labels x JOIN labels l ON l.id = x.label_id WHERE l.name = ?", label
        )
    }
    ids = [row["id"] for row in found if row["id"] not in has]
    return {"name": person["name"], "label": label, "ids": ids} if 2 <= len(ids) <= 6 else None


@template(
    "1",
    params=_mails_to_label,
    expect=lambda params, seed: labelled(seed, params["ids"], params["label"]),
    max_turns=10,
)
def label_sender(params: Params) -> Solution:
    result = yield SolutionCall("search_messages", {"sender": params["name"], "folder": INBOX, "limit": 50})
    for mail in result["messages"]:
        if params["label"] not in mail.get("labels", ()):
            yield SolutionCall("label_message", {"id": mail["id"], "label": params["label"]})


# The latest mail of a sender


def _latest(rng: random.Random, seed: SeedDatabase) -> Params | None:
    person, text = any_contact(rng, seed), rng.choice(words.REPLIES)
    found = mails(seed, "m.sender = ?", person["email"])
    if len(found) < 2 or found[0]["folder"] == TRASH:
        return None
    return {
        "name": person["name"],
        "email": person["email"],
        "text": text,
        "id": found[0]["id"],
        "subject": found[0]["subject"],
    }


def _replied(params: Params, seed: SeedDatabase) -> list[Expected]:
    subject = reply_subject(params["subject"])
    return sent(seed, [params["email"]], subject, FreeText(params["text"]), reply_to_id=params["id"])


@template("1", params=_latest, expect=_replied, max_turns=6)
def reply_latest(params: Params) -> Solution:
    result = yield SolutionCall("search_messages", {"sender": params["name"], "limit": 1})
    yield SolutionCall("send_message", {"body": params["text"], "reply_to_id": result["messages"][0]["id"]})


MAIL_TASKS = (mark_read, move_only, label_sender, reply_latest)
