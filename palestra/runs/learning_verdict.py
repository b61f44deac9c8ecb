"""Whether a run has learned: its first evaluation against that of the weights it ended with."""

from __future__ import annotations

import math

from msgspec import Struct

from palestra.runs.reader import RunReader
from palestra.runs.record_files import RunError

SIGMAS = 2.0
"""Standard errors that a difference must exceed to count as more than chance."""
LEAST_SHARE = 0.5
"""Share of what was missing before that must have been gained: significant is not yet learned."""
SUCCESS = "eval/success"


class LearningVerdict(Struct, frozen=True, kw_only=True):
    tasks: int
    """Held-out tasks of an evaluation."""
    first_step: int
    before: float
    """Success of the first evaluation."""
    kept_step: int
    after: float
    """Success of the weights that the run ended with."""
    last_step: int
    last: float
    """Success of the last evaluation, which may be of other weights."""
    seconds: float
    """Time of the run, evaluations included."""

    @property
    def has_learned(self) -> bool:
        return has_learned(self.before, self.after, self.tasks)

    @property
    def has_fallen(self) -> bool:
        """Whether the last weights are clearly worse than those that were kept."""
        return has_risen(self.last, self.after, self.tasks)

    def __str__(self) -> str:
        text = (
            f"{'It has learned' if self.has_learned else 'It has not learned enough'}: {self.before:.0%} of "
            f"{self.tasks} tasks it never trained on solved before, {self.after:.0%} after, with the weights of step "
            f"{self.kept_step}. Training took {self.seconds / 60:.1f} minutes, evaluations included."
        )
        if self.has_fallen:
            text += f" The weights of the last step, {self.last_step}, solve {self.last:.0%} and were not selected."
        return text


def judge_run(run: RunReader) -> LearningVerdict:
    """Judges a run that has ended. Raises RunError if it was not evaluated."""
    evals = {row["step"]: row for row in run.read_metrics() if SUCCESS in row}
    if not evals:
        raise RunError(f"run {run.name} has no evaluation to judge it by; set eval.every")
    summary, first, last = run.read_summary(), min(evals), max(evals)
    selected = (summary.get("selected") or {}).get("step", last)
    kept = selected if selected in evals else last
    return LearningVerdict(
        tasks=int(evals[kept]["eval/tasks"]),
        first_step=first,
        before=evals[first][SUCCESS],
        kept_step=kept,
        after=evals[kept][SUCCESS],
        last_step=last,
        last=evals[last][SUCCESS],
        seconds=summary["seconds"],
    )


def has_learned(before: float, after: float, tasks: int) -> bool:
    """Whether the success at this many tasks has risen by more than chance, and by half of what was missing."""
    return has_risen(before, after, tasks) and after - before >= LEAST_SHARE * (1 - before)


def has_risen(before: float, after: float, tasks: int) -> bool:
    """Whether one success exceeds another by more than two standard errors of their difference."""
    error = math.hypot(standard_error(before, tasks), standard_error(after, tasks))
    return after - before > SIGMAS * error


def standard_error(success: float, tasks: int) -> float:
    """The binomial standard error of a share of tasks, with one success and one failure added: shares of 0 and 1 are
    uncertain, too."""
    share = (success * tasks + 1) / (tasks + 2)
    return math.sqrt(share * (1 - share) / tasks)
