"""The plan and the findings of a sweep, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.run.common import print_table
from palestra.util.figures import number_text

if TYPE_CHECKING:
    from palestra.sweeps.findings import SettingResult, SweepFindings
    from palestra.sweeps.folder import SweepPlan


def print_plan(plan: SweepPlan, at_once: int) -> None:
    keys = list(plan.members[0].settings)
    print_table([["run", *keys], *([one.name, *(number_text(one.settings[k]) for k in keys)] for one in plan.members)])
    count = len(plan.members)
    waiting = f"{at_once} at a time, the rest waits" if at_once < count else "all at a time"
    steps = sum(one.config["steps"] for one in plan.members)
    click.echo(f"\n{count} runs, {waiting}; {steps} steps together; compared by {plan.metric}")


def print_findings(found: SweepFindings) -> None:
    state = "it is running" if found.is_running else "it does not run"
    click.echo(f"sweep {found.name}: {counts_text(found.statuses)}; {state}")
    keys = list(found.settings[0].settings)
    rows = [["setting", "runs", "step", found.metric, "spread", "lowest", "highest", "state"]]
    for one in found.settings:
        setting = " ".join(f"{key}={number_text(one.settings[key])}" for key in keys) or "as in the config"
        figures = map(number_text, (one.step, one.mean, one.spread, one.lowest, one.highest))
        rows.append([setting, str(len(one.members)), *figures, counts_text(one.statuses)])
    click.echo("")
    print_table(rows)
    for one in [one for one in found.members if one.error]:
        click.echo(f"{one.name} failed after step {one.step}: {one.error}")
    if any(one.share is not None for one in found.importance):
        click.echo(f"\nshare of the differences at step {found.importance_step} that each key explains by itself")
        print_table([[one.key, "-" if one.share is None else f"{one.share:.0%}"] for one in found.importance])
    if pruned := [one for one in found.decisions if one.kind == "pruned"]:
        click.echo(f"\n{len(pruned)} runs were ended early by successive halving")
        print_table([["run", "why"], *([one.member, one.reason] for one in pruned)])
    if evolved := [one for one in found.decisions if one.kind == "evolved"]:
        click.echo("\nruns that went on from better ones")
        print_table([["run", "why"], *([one.member, one.reason] for one in evolved)])
    if found.best is not None:
        click.echo(f"\nbest: {best_text(found.best, found.metric)}")


def best_text(best: SettingResult, metric: str) -> str:
    setting = " ".join(f"{key}={value}" for key, value in best.settings.items()) or "the config as it is"
    spread = f" ± {best.spread:.3f} over {len(best.members)} seeds" if best.spread is not None else ""
    return f"{setting}: {metric} {number_text(best.mean)}{spread} ({', '.join(best.members)})"


def counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
