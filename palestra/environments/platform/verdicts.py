"""Whether a task was done: what had to change changed, nothing else did, and the answer is right.

Owns: verdicts. Never touches: the state it looks at.
"""

from __future__ import annotations

import msgspec

from palestra.environments.platform.expectations import mismatch
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.tasks import PlatformTask


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    score: float | None
    """1 or 0; None: nobody can tell, because the verifier itself broke."""
    met: list[str] = []
    """Checks by name, for people and for partial rewards."""
    failed: list[str] = []
    """Why not, in words. Never for the model."""

    @property
    def is_unknown(self) -> bool:
        return self.score is None


def verify(task: PlatformTask, instance: Instance, answer: str | None = None) -> Verdict:
    """Of the state as it is now. Asked twice, it says the same."""
    template, params = task.template, task.params
    met: list[str] = []
    failed: list[str] = []
    found = mismatch(template.expect(params, task.seed), instance.changes())
    failed += [f"missing: {one}" for one in found.missing] + [f"unasked: {one}" for one in found.stray]
    if not found:
        met.append("changes")
    if template.answer is not None:
        wanted = template.answer(params)
        is_right = wanted.is_met(answer)
        (met if is_right else failed).append("answer" if is_right else f"answer: {answer!r} is not {wanted.text!r}")
    if template.process is not None:
        is_right = template.process(params).is_met(instance.events())
        (met if is_right else failed).append("process" if is_right else "process: not the calls that were asked for")
    return Verdict(score=0.0 if failed else 1.0, met=met, failed=failed)
