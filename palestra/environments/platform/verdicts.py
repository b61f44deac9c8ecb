"""Verdicts: the expected changes were made, no others, and the answer is right."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from palestra.environments.platform.changes import Change
from palestra.environments.platform.expectations import Expected, match_changes, mismatch
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.task_records import PlatformTask
from palestra.environments.platform.worlds import part_of

CHANGES, NO_CHANGES, NO_OTHER_CHANGES = "changes", "no unexpected changes", "no other changes"
"""The last two are passed by doing nothing: readers of a verifier's output know it by this text."""


class TaskVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a task's verifier, with the checks that passed and failed."""

    score: float | None
    """1 or 0; None: unknown, because the verifier itself failed."""
    met: list[str] = []
    """Names of passed checks, for people and for partial rewards."""
    missed: list[str] = []
    apps: dict[str, bool] = {}
    """The apps of a world with expected or actual changes, and whether these are right."""
    progress: float | None = None
    """The share of the task's sub-goals that is met, less one sub-goal for each change that the task does not ask
    for."""
    failed: list[str] = []
    """Why it failed, in words. Never shown to the model."""

    @property
    def checks(self) -> int:
        """Number of checks."""
        return len(self.met) + len(self.missed)

    @property
    def is_unknown(self) -> bool:
        return self.score is None


def verify(task: PlatformTask, instance: Instance, answer: str | None = None) -> TaskVerdict:
    """Returns the verdict on the present state. Calling it again gives the same."""
    template, params = task.template, task.params
    expected, changes = template.expect(params, task.seed), instance.changes()
    found = mismatch(expected, changes)
    goals = template.goals.expect(params, task.seed) if template.goals else []
    failed = [f"missing: {one}" for one in found.missing] + [f"unasked: {one}" for one in found.stray]
    apps = verify_multi_app(expected, changes) if task.app.parts else {}
    checks = {f"app {name}": is_right for name, is_right in apps.items()}
    checks = _goal_checks(goals, changes) if goals else checks or {CHANGES if expected else NO_CHANGES: not found}
    if template.answer is not None:
        right_answer = template.answer(params)
        checks["answer"] = right_answer.is_met(answer)
        failed += [] if checks["answer"] else [f"answer: {answer!r} is not {right_answer.text!r}"]
    if template.process is not None:
        checks["process"] = template.process(params).is_met(instance.events())
        failed += [] if checks["process"] else ["process: not the calls that were asked for"]
    met, missed = ([name for name, found in checks.items() if found is is_right] for is_right in (True, False))
    score = 0.0 if failed else 1.0
    progress = _progress(goals, checks, len(found.stray)) if goals else None
    return TaskVerdict(score=score, met=met, missed=missed, failed=failed, apps=apps, progress=progress)


def _goal_checks(goals: Sequence[Sequence[Expected]], changes: Sequence[Change]) -> dict[str, bool]:
    """Returns whether each sub-goal is met, and whether nothing else has changed."""
    matched = match_changes([one for goal in goals for one in goal], changes)
    checks: dict[str, bool] = {}
    first = 0
    for number, goal in enumerate(goals, 1):
        checks[f"goal {number}"] = matched.met.issuperset(range(first, first + len(goal)))
        first += len(goal)
    return {**checks, NO_OTHER_CHANGES: len(matched.used) == len(changes)}


def _progress(goals: Sequence[Sequence[Expected]], checks: dict[str, bool], stray: int) -> float:
    met = sum(is_met for name, is_met in checks.items() if name != NO_OTHER_CHANGES)
    return max(0, met - stray) / len(goals)


def verify_multi_app(expected: Sequence[Expected], changes: Sequence[Change]) -> dict[str, bool]:
    """Returns whether each app is right: every table belongs to one app, so if all are right the whole is."""
    apps = sorted({part_of(one.table) for one in [*expected, *changes]})
    return {
        app: not mismatch(
            [one for one in expected if part_of(one.table) == app],
            [one for one in changes if part_of(one.table) == app],
        )
        for app in apps
    }
