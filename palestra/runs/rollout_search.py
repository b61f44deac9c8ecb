"""Finding the rollouts of runs: by a condition, or by an id and the beginning of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from palestra.runs.reader import FoundRollout, Part, RunNotFound, RunReader, find_run, list_runs
from palestra.runs.rollout_records import RolloutRecord, TokenRecord


def matching_rollouts(
    run: RunReader, step: int | None, evals: bool, matches: Callable[[RolloutRecord], bool]
) -> Iterator[RolloutRecord]:
    """The rollouts of a step, or of all with the newest first. An evaluation has no others than those of `evals`."""
    part = Part.EVAL if evals or not run.steps(Part.ROLLOUTS) else Part.ROLLOUTS
    for one in [step] if step is not None else reversed(run.steps(part)):
        yield from (record for record in run.read_rollouts(one, part) if matches(record))


def find_rollout(rollout_id: str, which: str | None, step: int | None, root: Path) -> tuple[RunReader, FoundRollout]:
    """The rollout with exactly this id, or the newest whose id begins with it. `which`: of this run, instead of any."""
    runs = [find_run(which, root)] if which is not None else list_runs(root)
    for prefix in (False, True):
        for run in runs:
            for found in run.find_rollouts(rollout_id, prefix=prefix):
                if step is None or found.step == step:
                    return run, found
    place = f"run {runs[0].name}" if which is not None else f"any run in {root}"
    at = f" at step {step}" if step is not None else ""
    raise RunNotFound(f"no rollout {rollout_id!r} in {place}{at}; to see them: palestra rollout list {which or 'RUN'}")


def tokens_of(run: RunReader, found: FoundRollout) -> TokenRecord:
    tokens = run.find_tokens(found.record["id"], found.step) if found.part is Part.ROLLOUTS else None
    if tokens is None:
        why = "evaluations store no tokens" if found.part is Part.EVAL else "the run was started with keep_tokens=false"
        raise RunNotFound(f"no tokens are stored for rollout {found.record['id']}: {why}")
    return tokens
