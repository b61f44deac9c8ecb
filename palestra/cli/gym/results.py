"""`palestra gym reverify|profile|compare|aggregate|datasets`: commands on stored rollouts."""

from __future__ import annotations

import asyncio
import glob
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import rich_click as click

from palestra.cli.gym.collect import EXISTING, WRITTEN, open_gym, progress_shown
from palestra.cli.gym.commands import say, source_options, sources
from palestra.cli.gym.running import gym_options
from palestra.cli.options import renamed_option
from palestra.cli.output import FAILED, needs_extra, one_line_errors, print_json
from palestra.cli.run.common import json_option, print_table
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.gym.collect.aggregating import AgentMetrics
    from palestra.gym.collect.reverifying import ReverifyRequest, ReverifyStatus

SHOWN = 10  # number of tasks shown in a comparison

inputs_option = renamed_option(
    "--input",
    "-i",
    "inputs",
    old="--inputs",
    type=EXISTING,
    help="The collection's materialized inputs. [the file beside the rollouts]",
)


@click.command()
@click.option("--rollouts", type=EXISTING, required=True, help="A collection's output.")
@inputs_option
@click.option("--output", "-o", type=WRITTEN, required=True, help="File for the graded rollouts.")
@click.option(
    "--concurrency", type=click.IntRange(1), default=64, show_default=True, help="Number of rollouts graded at a time."
)
@click.option("--limit", type=click.IntRange(1), help="Grade only this number of rollouts, from the beginning.")
@renamed_option(
    "--any-verifier",
    "force",
    old="--force",
    is_flag=True,
    help="Also use verifiers that say they need more than the rollout.",
)
@click.option(
    "--judge-failed-only", is_flag=True, help="Grade only rollouts whose judge failed; keep the other results."
)
@click.option("--append", is_flag=True, help="With --judge-failed-only: append to an output that already has results.")
@click.option("--resume", is_flag=True, help="Continue an existing output.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@gym_options
@json_option
def reverify(
    rollouts: Path,
    inputs: Path | None,
    output: Path,
    concurrency: int,
    limit: int | None,
    force: bool,
    judge_failed_only: bool,
    append: bool,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    **given: object,
) -> None:
    """Grade stored rollouts again, by the verifiers of a gym, without a model."""
    with needs_extra("gym"):
        from palestra.gym.collect.files import OutputFiles
        from palestra.gym.collect.reverifying import ReverifyRequest
        from palestra.gym.errors import GymError
    if append and not judge_failed_only:
        raise click.UsageError("--append works only together with --judge-failed-only")
    request = ReverifyRequest(
        rollouts=rollouts,
        inputs=inputs or OutputFiles(rollouts).inputs,
        output=output,
        concurrency=concurrency,
        limit=limit,
        force=force,
        judge_failed_only=judge_failed_only,
        append=append,
        resume=resume,
        overwrite=overwrite,
    )
    with one_line_errors(GymError):
        found = asyncio.run(_reverify(request, as_json, given))
    if as_json:
        print_json(msgspec.to_builtins(found) | {"output": str(request.files.results)})
    else:
        kept = f", {found.kept} kept" if found.kept else ""
        click.echo(
            f"{found.done} of {found.total} graded, {found.changed} with another reward{kept}: {request.files.results}"
        )
    if found.failed:
        raise SystemExit(FAILED)


async def _reverify(request: ReverifyRequest, quiet: bool, given: JsonObject) -> ReverifyStatus:
    from palestra.gym.collect.reverifying import Grader
    from palestra.gym.collect.reverifying import reverify as run

    async with open_gym(**given) as (client, directory):
        grader = Grader(client, directory, await directory.settings())
        with nullcontext(lambda _: None) if quiet else progress_shown("graded") as on_progress:
            return await run(request, grader, on_progress)


@click.command()
@click.option("--rollouts", type=EXISTING, required=True, help="A collection's output.")
@inputs_option
@click.option("--partial", is_flag=True, help="Go on although some rows have no result.")
@json_option
def profile(rollouts: Path, inputs: Path | None, partial: bool, as_json: bool) -> None:
    """Show how hard each task is: metrics per task and per agent, from a collection with repeats."""
    with needs_extra("gym"):
        from palestra.gym.collect.files import OutputFiles
        from palestra.gym.collect.profiling import profile as made_from
        from palestra.gym.collect.profiling import save
        from palestra.gym.errors import GymError
    with one_line_errors(GymError):
        made = made_from(inputs or OutputFiles(rollouts).inputs, rollouts, partial=partial)
        tasks, agents = save(made, rollouts)
    if as_json:
        print_json({"tasks": str(tasks), "agents": str(agents), "agent_metrics": made.agents})
        return
    for one in made.agents:
        shares = {
            name: value for name, value in one.items() if name.startswith(("mean/reward", "pass@")) and "_" not in name
        }
        rows = [[name, f"{value:.3f}"] for name, value in shares.items()]
        rows += [[f"failed_attempts/{kind}", str(count)] for kind, count in one["failed_attempts"].items()]
        print_table([[one["agent_ref"]["name"], ""], *rows])
    click.echo(f"{len(made.tasks)} tasks: {tasks}")


@click.command()
@click.argument("before", type=EXISTING)
@click.argument("after", type=EXISTING)
@click.option("--field", default="reward", show_default=True, help="Any numeric field of a result or of its usage.")
@json_option
def compare(before: Path, after: Path, field: str, as_json: bool) -> None:
    """Compare two collections of the same tasks: what got better or worse, and whether it is more than chance."""
    with needs_extra("gym"):
        from palestra.gym.collect.comparing import compare as compared
        from palestra.gym.errors import GymError
    with one_line_errors(GymError):
        found = compared(before, after, field)
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    verdict = "clear" if found.is_clear else "within chance"
    click.echo(
        f"{field} over {found.tasks} tasks: {found.before:.4f} → {found.after:.4f}, "
        f"{found.difference:+.4f} ± {found.standard_error:.4f} ({verdict}); "
        f"{len(found.better)} better, {len(found.worse)} worse"
    )
    changed = [*found.worse[:SHOWN], *found.better[:SHOWN]]
    if changed:
        rows = [
            [str(one.task), f"{one.before:.3f}", f"{one.after:.3f}", f"{one.after - one.before:+.3f}"]
            for one in changed
        ]
        print_table([["task", "before", "after", ""], *rows])


@click.command()
@click.option(
    "--input", "-i", "rollouts", multiple=True, required=True, metavar="FILE_OR_GLOB", help="Rollouts; may be repeated."
)
@click.option("--output", "-o", type=WRITTEN, help="File to write. [x_aggregate_metrics.json beside the first]")
@click.option("--offline", is_flag=True, help="Do not ask the gym; compute only the metrics that all servers share.")
@gym_options
@json_option
def aggregate(
    rollouts: tuple[str, ...],
    output: Path | None,
    offline: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Compute metrics over the rollouts of several files, such as shards."""
    with needs_extra("gym"):
        from palestra.gym.collect.aggregating import FailedAttempts, aggregated, aggregated_here, save_metrics
        from palestra.gym.collect.files import OutputFiles
        from palestra.gym.collect.pairing import merged
        from palestra.gym.errors import GymError

    async def by_agents(results: list[JsonObject]) -> list[AgentMetrics]:
        async with open_gym(**given) as (client, directory):
            return await aggregated(results, directory, client)

    with one_line_errors(GymError, FileNotFoundError):
        paths = [Path(found) for pattern in rollouts for found in sorted(glob.glob(pattern)) or [pattern]]  # noqa: PTH207 - a pattern may be absolute
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise FileNotFoundError(f"there is no file {missing[0]}")
        results = merged(paths)
        figures = aggregated_here(results) if offline else asyncio.run(by_agents(results))
        metrics = FailedAttempts(paths).beside_agents(figures)
        target = output or OutputFiles(paths[0]).metrics
        save_metrics(target, metrics)
    if as_json:
        print_json(metrics)
        return
    for one in metrics:
        rows = [[name, f"{value:.4f}"] for name, value in (one["key_metrics"] or {}).items()]
        rows += [[f"failed_attempts/{kind}", str(count)] for kind, count in one["failed_attempts"].items()]
        print_table([[one["agent_ref"]["name"], ""], *rows])
    click.echo(f"{len(results)} rollouts: {target}")


@click.command()
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    metavar="DIR",
    help="Folder for the joined files.",
)
@click.option(
    "--split",
    "splits",
    multiple=True,
    type=click.Choice(["train", "validation", "example", "benchmark"]),
    help="Only datasets of this type; may be repeated. [train, validation]",
)
@click.option(
    "--overwrite-statistics", is_flag=True, help="Accept datasets that changed since their statistics were saved."
)
@source_options
@json_option
def datasets(output: Path, splits: tuple[str, ...], overwrite_statistics: bool, as_json: bool, **given: Any) -> None:
    """Check the datasets that a gym's files name, and put them together: DIR/train.jsonl and so on."""
    with needs_extra("gym"):
        from palestra.gym.collect.datasets import DatasetSplit, collate, datasets_of
        from palestra.gym.config import load_gym
        from palestra.gym.errors import GymError
        from palestra.gym.search_folders import find_below, search_roots
    if not given["files"]:
        raise click.UsageError("name the config files that list the datasets: -c FILE")
    roots = search_roots(given["roots"])
    with one_line_errors(GymError):
        chosen = [DatasetSplit(one) for one in splits] or [DatasetSplit.TRAIN, DatasetSplit.VALIDATION]
        config = load_gym(sources(**given), is_code_needed=False, report=say)
        found = datasets_of(config, chosen, lambda path: find_below(roots, path) or Path(path))
        made = collate(found, output, overwrite_statistics=overwrite_statistics)
    if as_json:
        print_json([msgspec.to_builtins(one) | {"path": str(one.path)} for one in made])
        return
    print_table([["split", "rows", "file"], *([one.split, str(one.rows), str(one.path)] for one in made)])
