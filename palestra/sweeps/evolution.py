"""Population based training: the worst runs go on from the best ones, with settings that differ a little.

At every evaluation (or every so many steps), as soon as all runs that go on were evaluated there, the worst share of
them takes over: the worst from the best, the next one from the second best. Each number among the settings is
multiplied or divided by `factor`, drawn from the sweep's name, the step and the run; other values are the source's.
The source's newest checkpoint before the last step is taken, so a run may go on some steps later than where it was.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from palestra.config import ConfigError
from palestra.config.sweep import SweepConfig
from palestra.runs.best_step import is_loss
from palestra.runs.reader import RunReader
from palestra.runs.record_files import RunError, write_json
from palestra.runs.run_state import RunState, read_state
from palestra.runs.writer import EventKind, RunFolder
from palestra.sweeps.folder import Decision, MemberState, MemberStatus, SweepReader
from palestra.sweeps.halving import decide_rungs, eval_every, rung_steps, value_at
from palestra.sweeps.settings import SEED, Setting, setting_text
from palestra.util.json_types import JsonObject


def compared_steps(sweep: SweepConfig, config: JsonObject) -> list[int]:
    """The steps at which something is decided about the runs; none if they all go on as they are. Raises
    ConfigError."""
    if sweep.prune is not None:
        return rung_steps(sweep, config)
    if sweep.evolve is None:
        return []
    if not (every := eval_every(config)):
        raise ConfigError(["evolve: runs are compared by their evaluations, and these have none; set eval.every"])
    between = -(-(sweep.evolve.every or every) // every) * every
    return list(range(between, config["steps"], between))


def decide(sweep: SweepReader) -> list[Decision]:
    """All that can be decided about the runs now and has not been."""
    config = sweep.config
    if config.evolve is None:
        return decide_rungs(sweep)
    known = sweep.decisions()
    decided = {one.step for one in known if one.kind != "paused"}
    for step in compared_steps(config, sweep.plan.members[0].config):
        if step not in decided:
            return _decide(sweep, config.evolve.share, config.evolve.factor, step)
    return []


def _decide(sweep: SweepReader, share: float, factor: float, step: int) -> list[Decision]:
    """Decides once no value is missing that may still come."""
    runs = [state for state in sweep.states() if state.status is not MemberStatus.FAILED]
    values = {run.name: value for run in runs if (value := value_at(run, step)) is not None}
    if len(values) < len(runs) or len(runs) < 2:
        return []
    sign, metric = -1.0 if is_loss(sweep.plan.metric) else 1.0, sweep.plan.metric
    ranked = sorted(runs, key=lambda run: sign * values[run.name], reverse=True)  # stable
    count = max(1, int(share * len(ranked)))
    sources = dict(zip([run.name for run in ranked[::-1]], ranked[:count], strict=False))
    found = []
    for rank, run in enumerate(ranked):
        place, value = f"{rank + 1} of {len(ranked)} runs at step {step} by {metric}", values[run.name]
        source = sources.get(run.name)
        if source is None or run.status.is_over or newest_state(sweep, source.name) is None:
            found.append(Decision(kind="kept", member=run.name, step=step, reason=place, value=value))
            continue
        settings = perturbed(source, run, factor, f"{sweep.plan.created}/{step}/{run.name}")
        reason = f"{place}; it goes on from {source.name} with {setting_text(settings)}"
        evolved = {"source": source.name, "settings": settings, "attempt": run.attempt}
        found.append(Decision(kind="evolved", member=run.name, step=step, reason=reason, value=value, **evolved))
    return found


def perturbed(source: MemberState, run: MemberState, factor: float, seed: str) -> Setting:
    """The source's settings with other numbers; the run keeps its seed."""
    random_ = random.Random(seed)
    settings = {key: _moved(value, factor, random_) for key, value in source.settings.items()}
    return settings | ({SEED: run.settings[SEED]} if SEED in run.settings else {})


def _moved(value: Any, factor: float, random_: random.Random) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    moved = value * factor if random_.random() < 0.5 else value / factor
    return max(1, round(moved)) if isinstance(value, int) else float(f"{moved:.4g}")


def newest_state(sweep: SweepReader, member: str) -> RunState | None:
    """The newest checkpoint of a run that is its own and has steps left; the last one if it is the only one."""
    files = sorted((sweep.member_path(member) / "checkpoints").glob("step_*.json"))
    states = [state for file in files if not (state := read_state(file)).is_borrowed]
    unfinished = [state for state in states if state.step < sweep.plan.members[0].config["steps"]]
    return (unfinished or states or [None])[-1]


def take_over(sweep: SweepReader, run: RunFolder) -> None:
    """Points a run that was to evolve, and has not, to the newest checkpoint of its source. Raises RunError if there is
    none any more."""
    decision = sweep.evolution_of(run.name)
    if decision is None or decision.source is None or _has_evolved(run, decision):
        return
    if (state := newest_state(sweep, decision.source)) is None:
        raise RunError(f"{decision.source} has no checkpoint from which {run.name} could go on")
    own = sorted((run.path / "checkpoints").glob("step_*.json"))
    for file in own:
        if int(file.stem.removeprefix("step_")) > state.step:  # newer than what it goes on from
            file.unlink()
    borrowed = msgspec.structs.replace(state, is_borrowed=True)
    (run.path / "checkpoints").mkdir(exist_ok=True)
    write_json(run.path / "checkpoints" / f"step_{state.step:06d}.json", borrowed)
    run.event(EventKind.EVOLVED, at=decision.step, run=decision.source, step=state.step, settings=decision.settings)


def _has_evolved(run: RunReader, decision: Decision) -> bool:
    """Whether it has saved what it took over as its own: until then the source may have deleted it."""
    is_done = any(row["event"] == EventKind.EVOLVED and row.get("at") == decision.step for row in run.read_events())
    files = sorted((run.path / "checkpoints").glob("step_*.json"))
    return is_done and bool(files) and not read_state(files[-1]).is_borrowed
