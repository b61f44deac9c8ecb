"""`palestra sweep`: run a population of training runs, or show what one has found."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from msgspec import to_builtins

from palestra.cli.options import server_options
from palestra.cli.output import (
    FAILED,
    INTERRUPTED,
    UNREACHABLE,
    USAGE,
    fail,
    file_errors,
    needs_extra,
    one_line_errors,
    print_json,
)
from palestra.cli.run.common import json_option, run_errors, runs_option
from palestra.cli.sweep.report import print_findings, print_plan
from palestra.cli.train import until_stopped

if TYPE_CHECKING:
    from palestra.config.sweep import SweepConfig
    from palestra.sweeps.folder import SweepFolder, SweepPlan

ANSWER_S = 5.0


class SweepGroup(click.RichGroup):
    """`palestra sweep CONFIG …` is `palestra sweep run CONFIG …`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_named = not args or args[0] in self.commands or args[0] in ctx.help_option_names
        return super().parse_args(ctx, args if is_named else ["run", *args])


@click.group(cls=SweepGroup)
def sweep() -> None:
    """Run a population of training runs at one server, or show what it has found.

    palestra sweep CONFIG KEY=VALUES... is short for palestra sweep run CONFIG KEY=VALUES...
    """


@sweep.command("run")
@click.argument("arguments", nargs=-1, metavar="[CONFIG] [KEY=VALUES]...")
@click.option(
    "-c",
    "--config",
    "files",
    multiple=True,
    metavar="FILE",
    help="Further config file of the runs, merged over CONFIG; may be repeated.",
)
@click.option("--name", help="Name of the sweep's folder, with which the names of its runs begin. [two words]")
@click.option("--grid", is_flag=True, help="Run every combination. This is the default.")
@click.option("--sample", type=click.IntRange(min=1), metavar="N", help="Draw N settings; each is run with every seed.")
@click.option("--sample-seed", type=int, metavar="N", help="Fixes what is drawn. [0]")
@click.option("--metric", metavar="NAME", help="Metric by which runs are compared. [the one that keeps checkpoints]")
@click.option("--prune", type=click.Choice(["halving"]), help="End the worse runs early: successive halving.")
@click.option("--evolve", is_flag=True, help="Population based training: the worst runs go on from the best ones.")
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    metavar="N",
    help="Runs that train at the same time. [as many as fit into memory, or into the quota of models at --server]",
)
@click.option("--resume", metavar="SWEEP", help="Go on with this sweep, where it was interrupted.")
@server_options(help="Address of a Tinker API. [a server that is started for the sweep]", default=None, envvar=None)
@click.option("--dry-run", is_flag=True, help="Check and show the runs, and how many fit at a time; do not train.")
@click.option("--with-parent", is_flag=True, hidden=True, help="Stop when stdin closes.")
@json_option
def run(
    arguments: tuple[str, ...],
    files: tuple[str, ...],
    resume: str | None,
    server: str | None,
    key: str | None,
    dry_run: bool,
    with_parent: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train CONFIG with several values of some settings, all at one server.

    CONFIG is what `palestra train` takes, or the YAML file of a sweep. KEY=VALUES with a list (1e-4,3e-4), a range
    (seed=0..7) or a distribution (loguniform(1e-5,1e-3), with --sample) is varied; KEY=VALUE holds for all runs.
    """
    given = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    if server is not None:
        overrides.append(f"server={server}")
    if key is not None:
        os.environ["TINKER_API_KEY"] = key  # as for `palestra train`
    flags["evolve"] = {} if flags["evolve"] else None
    if flags.pop("grid") and flags["sample"]:
        raise fail("--grid runs all combinations, --sample draws some; give one of them", USAGE)
    if len(given) != (0 if resume else 1):
        raise fail("give one CONFIG, or --resume SWEEP; as in: palestra sweep arithmetic seed=0..3", USAGE)
    is_changed = files or any(value is not None for name, value in flags.items() if name != "at_once")
    if resume and (is_changed or any(not text.startswith("runs=") for text in overrides)):
        raise fail("a sweep goes on as it was planned; with --resume give no other settings than --at-once", USAGE)
    with needs_extra("train"):
        from palestra.chat import ChatError
        from palestra.config import ConfigError
        from palestra.data.errors import DatasetError
        from palestra.environments import TaskFileError
        from palestra.rollouts.sources import RolloutSourceError
        from palestra.runs.record_files import RunError
        from palestra.sweeps.findings import find
        from palestra.sweeps.folder import SweepFolder, find_sweep
        from palestra.training.sweep import check_members

    not_there = (ChatError, DatasetError, TaskFileError, RunError, RolloutSourceError)
    with one_line_errors(ConfigError, FileNotFoundError, RunError):
        if resume:
            root = next((text.partition("=")[2] for text in overrides if text.startswith("runs=")), "runs")
            plan = (found := find_sweep(resume, Path(root))).plan
            place = found.path
        else:
            plan, place = plan_of(given[0], files, overrides, flags), None
    if not resume:
        with one_line_errors(ValueError, code=USAGE), one_line_errors(*not_there, code=FAILED):
            check_members(plan)
    at_once = flags["at_once"] or fitting_at_once(plan)
    if dry_run:
        print_json(to_builtins(plan) | {"at_once": at_once}) if as_json else print_plan(plan, at_once)
        return
    with one_line_errors(RunError):
        root = Path(plan.members[0].config["runs"])
        folder = SweepFolder.create(root, plan) if place is None else SweepFolder.open(place)
    with folder:
        code = run_in(folder, at_once, to_stderr=as_json, with_parent=with_parent)
    if code is not None:
        raise SystemExit(code)
    findings = find(folder)
    if as_json:
        print_json(to_builtins(findings, str_keys=True))
    else:
        print_findings(findings)
        click.echo(f"to see this again: palestra sweep show {folder.name}")
    raise SystemExit(FAILED if findings.best is None else 0)


def plan_of(given: str, files: tuple[str, ...], overrides: list[str], flags: dict[str, Any]) -> SweepPlan:
    from palestra.config import ConfigError
    from palestra.config.bundled import find_config_file
    from palestra.config.load import Layers, read_file, validate
    from palestra.config.sweep import SweepConfig
    from palestra.sweeps.planning import plan_sweep
    from palestra.sweeps.settings import split_overrides

    file = find_config_file(given)
    vary, fixed = split_overrides(overrides)
    layers, content = Layers(), read_file(file)
    layers.merge(content if "vary" in content else {"config": given, "vary": {}}, given)
    layers.data["vary"] = {**(layers.data["vary"] or {}), **vary}
    if not layers.data["vary"]:
        raise ConfigError(["nothing is varied: give a key several values, as in seed=0..3"])
    layers.merge({name: value for name, value in flags.items() if value is not None}, "the command line")
    sweep: SweepConfig = validate(SweepConfig, layers)
    base = [find_config_file(sweep.config), *files]
    return plan_sweep(sweep, base, fixed)


def fitting_at_once(plan: SweepPlan) -> int:
    """Returns how many runs fit into memory at a time, or at a shared server into the owner's quota of models."""
    from palestra.endpoints.model_folders import model_folder
    from palestra.sweeps.planning import load_member

    first, count = load_member(plan.members[0]), len(plan.members)
    if count == 1:
        return count
    if first.server is not None:
        return min(count, models_left(first.server) or count)
    with needs_extra("engine"):
        from palestra.memory_plan.sweep_plan import runs_that_fit
        from palestra.model.errors import ModelError
    rank = max(one.config["model"]["rank"] for one in plan.members)
    with one_line_errors(ModelError, OSError, ValueError):
        return runs_that_fit(str(model_folder(first.model)), first.model.device, first.model.weights, rank, count)


def models_left(server: str) -> int | None:
    """Returns how many more models the quota of the key's owner allows, and at least one, whose refusal names the
    quota. None if there is no limit, or no answer: the server may be another implementation, or not be started yet."""
    import httpx

    headers = {"X-API-Key": os.environ.get("TINKER_API_KEY", "")}
    try:
        (owner,) = httpx.get(f"{server.rstrip('/')}/api/v1/quotas", headers=headers, timeout=ANSWER_S).json()["owners"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
        return None
    limit = owner["limits"]["models"]
    return None if limit is None else max(1, limit - owner["used"]["models"])


def run_in(folder: SweepFolder, at_once: int, *, to_stderr: bool, with_parent: bool) -> int | None:
    """Returns the exit code of a sweep that did not come to its end."""
    from palestra.cli.sweep.display import SweepLines
    from palestra.training.launch import RUN_ERRORS
    from palestra.training.sweep import SweepRun

    lines, count = SweepLines(folder.plan, to_stderr=to_stderr), len(folder.plan.members)
    again = f"to go on: palestra sweep --resume {folder.name}"
    lines.note(f"sweep {folder.name}: {count} runs, {min(at_once, count)} at once; {folder.path}")
    try:
        with file_errors(again):
            asyncio.run(until_stopped(SweepRun(folder, lines, at_once).run(), with_parent))
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo(f"stopped; {again}", err=True)
        return INTERRUPTED
    except RUN_ERRORS as error:
        click.echo(f"error: {error}\n{again}", err=True)
        return UNREACHABLE if isinstance(error, ConnectionError) else FAILED
    return None


@sweep.command()
@click.argument("which", metavar="SWEEP")
@runs_option
@json_option
def show(which: str, root: Path, as_json: bool) -> None:
    """Show what SWEEP has found: the best setting, the importance of each key, and all runs."""
    with run_errors():
        from palestra.sweeps.findings import find
        from palestra.sweeps.folder import find_sweep

        findings = find(find_sweep(which, root))
    print_json(to_builtins(findings, str_keys=True)) if as_json else print_findings(findings)
