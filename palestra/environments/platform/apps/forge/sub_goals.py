"""Requests of `forge` that occur in long tasks only: a mistake that is put right."""

from __future__ import annotations

import random

from palestra.environments.platform.app import SeedDatabase, TemplateMaker
from palestra.environments.platform.apps.forge.tasks_issues import some_issue
from palestra.environments.platform.expectations import Expected, UpdatedRow
from palestra.environments.platform.task_templates import Params, Solution, SolutionCall, read_pages

template = TemplateMaker("palestra.environments.platform.apps.forge")


def _closed(rng: random.Random, seed: SeedDatabase) -> Params | None:
    return some_issue(rng, seed, "state = 'closed'")


def _opened(params: Params, _seed: SeedDatabase) -> list[Expected]:
    return [UpdatedRow("issues", (params["repo_id"], params["number"]), {"state": "open"})]


@template("1", params=_closed, expect=_opened)
def reopen_issue(params: Params) -> Solution:
    found = yield from read_pages("search_issues", "issues", repo=params["repo"], state="closed")
    numbers = [issue["number"] for issue in found if issue["title"] == params["title"]]
    for number in numbers:
        yield SolutionCall("update_issue", {"repo": params["repo"], "number": number, "state": "open"})


SUB_GOALS = (reopen_issue,)
