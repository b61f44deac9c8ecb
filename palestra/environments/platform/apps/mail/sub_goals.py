"""Requests of `mail` that occur in long tasks only: a mistake that is put right."""

from __future__ import annotations

import random

from palestra.environments.platform.app import SeedDatabase, TemplateMaker
from palestra.environments.platform.apps.mail.expected import any_contact, mails, moved
from palestra.environments.platform.apps.mail.schema import INBOX, TRASH
from palestra.environments.platform.task_templates import Params, Solution, SolutionCall

template = TemplateMaker("palestra.environments.platform.apps.mail")


def _only_in_trash(rng: random.Random, seed: SeedDatabase) -> Params | None:
    person = any_contact(rng, seed)
    found = mails(seed, "m.sender = ? AND f.name = ?", person["email"], TRASH)
    return {"name": person["name"], "id": found[0]["id"]} if len(found) == 1 else None


@template("1", params=_only_in_trash, expect=lambda params, seed: moved(seed, [params["id"]], INBOX))
def restore_mail(params: Params) -> Solution:
    result = yield SolutionCall("search_messages", {"sender": params["name"], "folder": TRASH})
    yield SolutionCall("move_message", {"id": result["messages"][0]["id"], "folder": INBOX})


SUB_GOALS = (restore_mail,)
