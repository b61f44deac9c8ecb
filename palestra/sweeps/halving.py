"""Successive halving: at some steps, the rungs, all settings are compared, and only the best go on.

Rungs are the steps first, first x factor, first x factor^2 … before the last step, each rounded up to one that is
evaluated. A rung is decided when every run that has not ended was evaluated there, so what is decided does not depend
on which run is faster; who is ahead does not wait for it. A setting counts by the mean over its seeds; one of which a
run has failed comes last; equal ones are taken in the order of the plan. One of `factor` stays, rounded up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from palestra.config.errors import ConfigError
from palestra.config.sweep import SweepConfig
from palestra.runs.best_step import is_loss
from palestra.sweeps.folder import Decision, MemberState, MemberStatus, SweepReader
from palestra.sweeps.settings import setting_text, without_seed
from palestra.util.json_types import JsonObject


def eval_every(config: JsonObject) -> int:
    """Steps between evaluations of a run; 0 if it has none."""
    return (config.get("eval") or {}).get("every", 0) or config.get("eval_every", 0)


def rung_steps(sweep: SweepConfig, config: JsonObject) -> list[int]:
    """`config` is that of one of the runs. Raises ConfigError if it has no rung."""
    every, steps = eval_every(config), config["steps"]
    if not every:
        raise ConfigError(["prune: runs are compared by their evaluations, and these have none; set eval.every"])
    step, rungs = sweep.halving.first or every, list[int]()
    while (rung := -(-step // every) * every) < steps:
        rungs.append(rung)
        step *= sweep.halving.factor
    if not rungs:
        hint = "make eval.every or halving.first smaller"
        raise ConfigError([f"prune: no evaluation comes before the last of {steps} steps; {hint}"])
    return list(dict.fromkeys(rungs))


def decide_rungs(sweep: SweepReader) -> list[Decision]:
    """The decisions of all rungs that can be decided now and have not been."""
    config = sweep.config
    if config.prune is None:
        return []
    known = sweep.decisions()
    decided = {one.step for one in known if one.kind != "paused"}
    pruned = {one.member for one in known if one.kind == "pruned"}
    left = [state for state in sweep.states() if state.name not in pruned]
    decisions: list[Decision] = []
    for rung in rung_steps(config, sweep.plan.members[0].config):
        if rung in decided:
            continue
        found = _decide(left, rung, config.halving.factor, sweep.plan.metric)
        decisions += found
        gone = {one.member for one in found if one.kind == "pruned"}
        if not found:
            break
        left = [state for state in left if state.name not in gone]
    return decisions


def value_at(state: MemberState, step: int) -> float | None:
    """A run's value at a step; of one that ended earlier in good order, its last."""
    if step in state.values:
        return state.values[step]
    return state.last if state.status.is_over else None


def by_setting(states: Sequence[MemberState]) -> dict[str, list[MemberState]]:
    """Runs that differ in their seed alone, together, in the order of the plan."""
    groups: dict[str, list[MemberState]] = {}
    for state in states:
        groups.setdefault(setting_text(without_seed(state.settings)), []).append(state)
    return groups


def _decide(left: Sequence[MemberState], rung: int, factor: int, metric: str) -> list[Decision]:
    """Decides once no value is missing that may still come."""
    if any(value_at(state, rung) is None and state.status is not MemberStatus.FAILED for state in left):
        return []
    groups, sign = by_setting(left), -1.0 if is_loss(metric) else 1.0

    def score(states: Sequence[MemberState]) -> tuple[bool, float]:
        values = [value for state in states if (value := value_at(state, rung)) is not None]
        return len(values) == len(states), sign * statistics.fmean(values) if values else 0.0

    ranked = sorted(groups.values(), key=score, reverse=True)  # stable
    kept = -(-len(ranked) // factor)
    decisions = []
    for rank, states in enumerate(ranked):
        is_whole, value = score(states)
        place = f"{rank + 1} of {len(ranked)} settings at step {rung} by {metric}"
        for state in states:
            kind = "kept" if rank < kept else "pruned"
            shown = sign * value if is_whole else None
            decisions.append(Decision(kind=kind, member=state.name, step=rung, reason=place, value=shown))
    return decisions
