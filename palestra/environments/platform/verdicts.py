"""Whether a task was done: what had to change changed, nothing else did, and the answer is right.

Owns: verdicts, of a world's apps one by one. Never touches: the state it looks at.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from palestra.environments.platform.changes import Change
from palestra.environments.platform.expectations import Expected, mismatch
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.task_records import PlatformTask
from palestra.environments.platform.worlds import part_of

CHANGES, NO_CHANGES = "changes", "no unexpected changes"
"""The second is met by doing nothing: whoever reads what a verifier prints knows it by these words."""


class TaskVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the verifier of a task says, with the checks that were met and missed."""

    score: float | None
    """1 or 0; None: nobody can tell, because the verifier itself broke."""
    met: list[str] = []
    """Checks by name, for people and for partial rewards."""
    missed: list[str] = []
    apps: dict[str, bool] = {}
    """The apps of a world where something had to change, or did, and whether it is right there."""
    failed: list[str] = []
    """Why not, in words. Never for the model."""

    @property
    def checks(self) -> int:
        """How many there are."""
        return len(self.met) + len(self.missed)

    @property
    def is_unknown(self) -> bool:
        return self.score is None


def verify(task: PlatformTask, instance: Instance, answer: str | None = None) -> TaskVerdict:
    """The verdict on the state as it is now. Asked twice, it says the same."""
    template, params = task.template, task.params
    expected, changes = template.expect(params, task.seed), instance.changes()
    found = mismatch(expected, changes)
    failed = [f"missing: {one}" for one in found.missing] + [f"unasked: {one}" for one in found.stray]
    apps = verify_multi_app(expected, changes) if task.app.parts else {}
    checks = {f"app {name}": is_right for name, is_right in apps.items()}
    checks = checks or {CHANGES if expected else NO_CHANGES: not found}
    if template.answer is not None:
        right_answer = template.answer(params)
        checks["answer"] = right_answer.is_met(answer)
        failed += [] if checks["answer"] else [f"answer: {answer!r} is not {right_answer.text!r}"]
    if template.process is not None:
        checks["process"] = template.process(params).is_met(instance.events())
        failed += [] if checks["process"] else ["process: not the calls that were asked for"]
    met, missed = ([name for name, found in checks.items() if found is is_right] for is_right in (True, False))
    return TaskVerdict(score=0.0 if failed else 1.0, met=met, missed=missed, failed=failed, apps=apps)


def verify_multi_app(expected: Sequence[Expected], changes: Sequence[Change]) -> dict[str, bool]:
    """App by app: tables belong to one each, so all of them right is the whole right."""
    apps = sorted({part_of(one.table) for one in [*expected, *changes]})
    return {
        app: not mismatch(
            [one for one in expected if part_of(one.table) == app],
            [one for one in changes if part_of(one.table) == app],
        )
        for app in apps
    }
