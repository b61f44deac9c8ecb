"""Parts of task templates with a user: who is on the line, what the agent says, what the user must hear."""

from __future__ import annotations

import random
from collections.abc import Collection

import msgspec

from palestra.environments.platform.app import SeedDatabase
from palestra.environments.platform.expectations import Expected, InsertedRow
from palestra.environments.platform.scripted_user import TALK, UserScript
from palestra.environments.platform.task_templates import Params, SolutionCall

DRAWS = 10**6  # of a user's words


def user_params(rng: random.Random, seed: SeedDatabase, policy: str, kinds: Collection[str]) -> Params | None:
    """Chooses a caller of one of these kinds; None if this world has none."""
    scripts = {
        row["number"]: msgspec.json.decode(row["script"], type=UserScript)
        for row in seed.rows("SELECT number, script FROM _scripts ORDER BY number")
    }
    kind = rng.choice(sorted(kinds))
    numbers = [number for number, script in scripts.items() if script.kind == kind]
    if not numbers:
        return None
    number = rng.choice(numbers)
    script = scripts[number]
    return {
        "caller": number,
        "draw": rng.randrange(DRAWS),
        "kind": kind,
        "policy": policy,
        "opening": script.opening,
        "facts": script.facts,
        "case": script.case,
    }


def say(message: str) -> SolutionCall:
    return SolutionCall(TALK, {"message": message})


def heard(topic: str, value: str) -> Expected:
    """Expects what the user must have been told in the end: an amount in cents, or the rule of a refusal."""
    return InsertedRow("user_heard", {"topic": topic, "value": value}, others=False)
