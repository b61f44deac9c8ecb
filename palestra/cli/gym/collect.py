"""`palestra gym collect`: rollouts of a data file, through the agents of a gym."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from palestra.cli.gym.running import gym_options, running_gym
from palestra.cli.output import FAILED, INTERRUPTED, USAGE, fail, needs_extra, one_line_errors, print_json
from palestra.cli.run.common import json_option
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.environments.gym.directory import ServerDirectory
    from palestra.gym.collect.aggregating import AgentReport
    from palestra.gym.collect.collection import CollectionRequest, CollectionStatus
    from palestra.net.http_client import HttpClient

EXISTING = click.Path(path_type=Path, exists=True, dir_okay=False)
WRITTEN = click.Path(path_type=Path, dir_okay=False)


class Repeats(click.ParamType):
    """Parses `4`, or `agent=4,_default=1`."""

    name = "N or AGENT=N,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | dict[str, int]:
        try:
            if "=" not in str(value):
                return _positive(value)
            return {name: _positive(count) for name, _, count in (part.partition("=") for part in value.split(","))}
        except ValueError:
            self.fail(f"{value!r} is neither a positive number nor AGENT=NUMBER,…", param, ctx)


class Shard(click.ParamType):
    """Parses `0/4`: the first of four shards."""

    name = "I/N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        at, _, count = str(value).partition("/")
        if not (at.isdigit() and count.isdigit() and int(at) < int(count)):
            self.fail(f"{value!r} is not a shard; write I/N with I from 0 to N-1", param, ctx)
        return int(at), int(count)


class JsonParam(click.ParamType):
    name = "JSON"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> JsonObject:
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{value!r} is not valid JSON: {error}", param, ctx)
        return found if isinstance(found, dict) else self.fail(f"{value!r} is not a JSON object", param, ctx)


@click.command()
@click.option(
    "--input",
    "-i",
    "data",
    type=WRITTEN,
    required=True,
    help="JSON lines file with one task per line; searched for in the same folders as configs.",
)
@click.option(
    "--output",
    "-o",
    type=WRITTEN,
    required=True,
    help="JSON lines file for the rollouts, one per line; further files are written beside it.",
)
@click.option("--agent", "-a", metavar="NAME", help="Agent for rows that name none.")
@click.option(
    "--concurrency", type=click.IntRange(1), default=64, show_default=True, help="Number of rollouts played at a time."
)
@click.option("--repeats", type=Repeats(), default=1, show_default=True, help="Number of rollouts of each task.")
@click.option("--seeds", is_flag=True, help="Each repeat samples with its index as seed.")
@click.option("--limit", type=click.IntRange(1), help="Play only this number of rows, from the beginning.")
@click.option(
    "--shard", type=Shard(), default=(0, 1), help="Play only this part of the tasks; 0/4 is the first of four."
)
@click.option(
    "--prompt-config",
    type=EXISTING,
    help="YAML file with the templates `user` and `system`, filled in from the row's fields.",
)
@click.option("--temperature", type=click.FloatRange(0), help="Sampling temperature; replaces that of the rows.")
@click.option("--top-p", type=click.FloatRange(0, 1), help="Nucleus sampling (top-p); replaces that of the rows.")
@click.option(
    "--max-output-tokens", type=click.IntRange(1), help="Maximum tokens of an answer; replaces that of the rows."
)
@click.option(
    "--params", type=JsonParam(), default="{}", help="More responses_create_params for all rows, as a JSON object."
)
@click.option("--resume", is_flag=True, help="Continue an existing output: play the rollouts that are missing.")
@click.option("--resume-changed", is_flag=True, help="Continue although rows or servers have changed since.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option(
    "--attempts",
    type=click.IntRange(1),
    default=3,
    envvar="NEMO_GYM_MAX_ROLLOUT_ATTEMPTS",
    show_default=True,
    help="Attempts at a row before it counts as failed.",
)
@click.option(
    "--row-limit",
    "run_limit_s",
    type=click.FloatRange(1),
    default=3600,
    show_default=True,
    metavar="SECONDS",
    help="Seconds after which an attempt without an answer has failed.",
)
@click.option(
    "--no-metrics",
    is_flag=True,
    help="Write no metrics; `palestra gym aggregate` computes them later, for example for shards.",
)
@gym_options
@json_option
def collect(
    data: Path,
    output: Path,
    agent: str | None,
    concurrency: int,
    repeats: int | dict[str, int],
    seeds: bool,
    limit: int | None,
    shard: tuple[int, int],
    prompt_config: Path | None,
    temperature: float | None,
    top_p: float | None,
    max_output_tokens: int | None,
    params: JsonObject,
    resume: bool,
    resume_changed: bool,
    overwrite: bool,
    attempts: int,
    run_limit_s: float,
    no_metrics: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Play the rows of a file through a gym's agents, and store the rollouts.

    The gym is a running one (`palestra gym run`), or with -c FILE one that is started for this command and stopped
    afterwards. A row that keeps failing becomes a line in OUTPUT_failures.jsonl; the others continue. Stop with Ctrl-C,
    continue with --resume."""
    with needs_extra("gym"):
        from palestra.gym.collect.collection import CollectionRequest
        from palestra.gym.collect.rows import Expansion, PromptFile
        from palestra.gym.errors import GymError
        from palestra.rollouts.gym.row_calls import RetryPolicy
    sampling = {"temperature": temperature, "top_p": top_p, "max_output_tokens": max_output_tokens}
    with one_line_errors(GymError):
        expansion = Expansion(
            agent=agent,
            limit=limit,
            repeats=repeats,
            seeds=seeds,
            prompt=PromptFile.read(prompt_config) if prompt_config else None,
            overrides=params | {name: value for name, value in sampling.items() if value is not None},
            shard=shard[0],
            shards=shard[1],
        )
        request = CollectionRequest(
            input=_found(data, given["roots"]),
            output=output,
            expansion=expansion,
            concurrency=concurrency,
            patience=RetryPolicy(attempts=attempts, run_limit_s=run_limit_s),
            resume=resume or resume_changed,
            resume_changed=resume_changed,
            overwrite=overwrite,
        )
        try:
            standing, metrics = asyncio.run(_collect(request, no_metrics, as_json, given))
        except KeyboardInterrupt:
            click.echo(f"stopped; what was played is in {output}; continue with --resume", err=True)
            raise SystemExit(INTERRUPTED) from None
    _say(request, standing, metrics, as_json)
    if standing.failed:
        raise SystemExit(FAILED)


def _found(data: Path, roots: tuple[Path, ...]) -> Path:
    """Returns the data file, searched for in the same folders as the data files that configs name."""
    from palestra.gym.search_folders import find_below, search_roots

    folders = search_roots(roots)
    found = find_below(folders, data)
    if found is None:
        raise fail(f"there is no file {data}, neither in {' nor in '.join(map(str, folders))}", USAGE)
    return found


async def _collect(
    request: CollectionRequest, no_metrics: bool, quiet: bool, given: JsonObject
) -> tuple[CollectionStatus, list[AgentReport]]:
    from palestra.gym.collect.aggregating import FailedAttempts, aggregated, save_metrics
    from palestra.gym.collect.collection import collect as run
    from palestra.gym.collect.collection import delivered
    from palestra.gym.collect.files import OutputFiles
    from palestra.gym.collect.playing import CapturedCalls, RowPlayer

    async with open_gym(**given) as (client, directory):
        settings = await directory.settings()
        player = RowPlayer(client, directory, request.patience, CapturedCalls.of_gym(settings))
        with nullcontext(lambda _: None) if quiet else progress_shown("rollouts") as on_progress:
            standing = await run(request, player, settings, on_progress)
        if no_metrics:
            return standing, []
        figures = await aggregated(delivered(request.output), directory, client)
        metrics = FailedAttempts([request.output]).beside_agents(figures)
        save_metrics(OutputFiles(request.output).metrics, metrics)
        return standing, metrics


@asynccontextmanager
async def open_gym(key: str | None, **given: Any) -> AsyncIterator[tuple[HttpClient, ServerDirectory]]:
    """Gives a running gym, or one that is started for this command, and a pool with enough connections to it."""
    from palestra.environments.gym.directory import ServerDirectory
    from palestra.net.http_client import HttpClient

    async with running_gym(**given) as url, HttpClient() as client:  # each row has its own time limit
        yield client, await ServerDirectory.of_head(client, url, key)


@contextmanager
def progress_shown(what: str) -> Iterator[Any]:
    """Shows progress: a bar with rate, reward and failures in a terminal, a line for each tenth elsewhere."""
    if not sys.stderr.isatty():
        yield _Tenths(what)
        return
    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None, figures="", rate="")

        def show(standing: Any) -> None:
            speed = bar.tasks[0].speed
            rate = f"{speed:.1f}/s" if speed else ""
            finished = standing.done + standing.failed
            bar.update(task, total=standing.total, completed=finished, figures=_figures(standing), rate=rate)

        yield show


class _Tenths:
    def __init__(self, what: str) -> None:
        self._what = what
        self._shown_tenth = -1

    def __call__(self, standing: Any) -> None:
        finished = standing.done + standing.failed
        tenth = 10 * finished // standing.total if standing.total else 10
        if tenth > self._shown_tenth:
            self._shown_tenth = tenth
            click.echo(f"{self._what}: {finished}/{standing.total}  {_figures(standing)}", err=True)


def _figures(standing: Any) -> str:
    reward = getattr(standing, "reward", None)
    parts = [f"reward {reward:.3f}"] if reward is not None else []
    failed = [f"{standing.failed} failed"] if standing.failed else []
    again = getattr(standing, "attempts_failed", 0)
    return "  ".join(parts + failed + ([f"{again} attempts failed"] if again else []))


def _say(request: CollectionRequest, standing: CollectionStatus, metrics: list[AgentReport], as_json: bool) -> None:
    from palestra.gym.collect.aggregating import counted
    from palestra.gym.collect.files import OutputFiles

    files = OutputFiles(request.output)
    if as_json:
        summary = {"total": standing.total, "done": standing.done, "failed": standing.failed, "reward": standing.reward}
        summary |= {"failed_attempts": dict(standing.classes), "output": str(files.results)}
        print_json(summary | {"key_metrics": {one["agent_ref"]["name"]: one["key_metrics"] for one in metrics}})
        return
    click.echo(f"{standing.done} of {standing.total} rollouts in {files.results}")
    for one in metrics:
        if one["key_metrics"]:
            click.echo(f"{one['agent_ref']['name']}: {json.dumps(one['key_metrics'])}")
    if standing.failed:
        click.echo(f"{standing.failed} failed ({counted(standing.classes)}); see {files.failures}", err=True)


def _positive(value: Any) -> int:
    number = int(value)
    if number < 1:
        raise ValueError(number)
    return number
