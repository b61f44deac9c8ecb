"""`palestra run`: list runs, show, compare, export and plot them; `manage` has the commands that change one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import rich_click as click
from msgspec import to_builtins

from palestra.cli.options import renamed_option
from palestra.cli.output import needs_extra, print_json, print_result
from palestra.cli.run import fork, manage
from palestra.cli.run.common import find, json_option, print_table, run_errors, runs_option, sparkline
from palestra.cli.run.overview import evaluation_text, note_text
from palestra.runs.control import resume_command
from palestra.util.atomic_files import replacing
from palestra.util.figures import duration_text, number_text, time_text
from palestra.util.json_types import JsonObject
from palestra.util.safe_text import safe_text

F = TypeVar("F", bound=Callable[..., Any])

# The metrics that are looked at first, as far as a run has them.
KEY_METRICS = (
    "reward/mean",
    "reward/best_of_group",
    "eval/success",
    "eval/reward_mean",
    "loss/mean",
    "eval/loss",
    "kl/teacher",
    "rollouts/failed",
    "rollouts/truncated_share",
    "rollouts/zero_variance_share",
    "length/mean",
    "policy/entropy_estimate",
    "kl/sampler_trainer_k3",
    "kl/base",
    "optim/grad_norm",
    "time/total_s",
    "throughput/total_tokens_per_s",
)
WORTH_TELLING = ("warning", "error", "resume", "stop", "end")


def output_option(text: str) -> Callable[[F], F]:
    file = click.Path(path_type=Path, dir_okay=False)
    return renamed_option("--output", "-o", "out", old="--out", type=file, metavar="FILE", help=text)


@click.group()
def run() -> None:
    """List, look at, compare, export, plot, stop, fork, replay, label and delete training runs."""


for command in (manage.stop, manage.delete, manage.tag, manage.note, fork.fork, fork.replay):
    run.add_command(command)


@run.command("list")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="Only runs with this tag; may be repeated.")
@click.option("--note", metavar="TEXT", help="Only runs with a note that has this text.")
@runs_option
@json_option
def list_(tags: tuple[str, ...], note: str | None, root: Path, as_json: bool) -> None:
    """List the runs, newest first."""
    with run_errors():
        from palestra.runs.overview import is_labelled, overview
        from palestra.runs.reader import list_runs

        rows = [row for one in list_runs(root) if is_labelled(row := overview(one), tags, note)]
    if as_json:
        print_json(rows)
    elif not rows:
        is_filtered = tags or note
        start = "to see all: palestra run list" if is_filtered else "to start one: palestra train CONFIG"
        click.echo(f"no {'such ' if is_filtered else ''}runs in {root}; {start}")
    else:
        shown = [["name", "status", "step", "reward", "eval", "model", "started", "tags", "note"]]
        for row in rows:
            figures = [number_text(row[column]) for column in ("name", "status", "last_step", "reward_mean")]
            started = time_text(row["created"]) if row["created"] else "-"
            labels = [" ".join(row["tags"]), note_text(row["notes"])]
            shown.append([*figures, evaluation_text(row), number_text(row["model"]), started, *labels])
        used = [at for at, column in enumerate(zip(*shown, strict=True)) if any(column[1:])]
        print_table([[line[at] for at in used] for line in shown])


@run.command()
@click.argument("which", metavar="RUN")
@runs_option
@json_option
def show(which: str, root: Path, as_json: bool) -> None:
    """Show how RUN, a name or a folder, was started and its state."""
    with run_errors():
        from palestra.runs.advisories import read_advisories
        from palestra.runs.facts import summarize
        from palestra.runs.metric_table import read_table
        from palestra.runs.overview import model_name
        from palestra.runs.reader import RunStatus
        from palestra.runs.saved_checkpoints import selection_text

        found = find(which, root)
        about, metrics, events = found.read_about(), found.read_metrics(), found.read_events()
        status, summary = found.status(), {**found.read_summary(), **summarize(metrics, events)}
        labels, advisories = found.read_labels(), read_advisories(found, read_table(found.metrics_file))
        resume = resume_command(found) if status.can_resume else None
    if as_json:
        record = {**about, "path": str(found.path), "summary": {**summary, "status": status}, "events": events}
        print_json({**record, "resume": resume, "advisories": to_builtins(advisories), **to_builtins(labels)})
        return
    facts, config = about["facts"], about["config"]
    environments = ", ".join(entry["name"] for entry in config.get("environments", []))
    steps = f", {summary['last_step'] or 0} of {config['steps']} steps" if "steps" in config else ""
    rows = {
        "run": f"{found.name} ({about['kind']}), {found.path}",
        "status": f"{status}{steps} in {duration_text(summary['seconds'])}",
        "model": model_name(config),
        "environments": environments,
        "forked from": forked_text(facts),
        "selected": selection_text(summary["selected"]) if "selected" in summary else "",
        "started": f"{time_text(about['created'])} on {facts['host']}, attempts: {summary['attempts']}",
        "command": facts["command"],
        "code": facts["git_commit"],
        "tags": ", ".join(labels.tags),
    }
    for name, text in rows.items():
        if text:
            click.echo(f"{name:<14}{safe_text(str(text), keep='')}")
    for one in labels.notes:
        click.echo(f"{'note':<14}{time_text(one.time)}  {safe_text(one.text, keep='')}")
    if found.is_asked_to_stop and status is RunStatus.RUNNING:
        click.echo("it was asked to stop, and ends after its step")
    print_course(metrics)
    for one in advisories:
        click.echo(f"warning: {safe_text(one.message, keep='')}")
    shown = {one.kind for one in advisories}
    events = [event for event in events if event.get("advisory") not in shown]
    for event in [event for event in events if event["event"] in WORTH_TELLING][-5:]:
        record = event.get("message") or event.get("error") or event.get("status") or ""
        click.echo(f"{time_text(event['time'])}  {event['event']}  {safe_text(str(record), keep='')}".rstrip())
    if resume is not None:
        click.echo(f"\nto continue: {safe_text(resume, keep='')}")
    if found.steps():
        click.echo(f"\nrollouts: palestra rollout list {found.name} --step {found.steps()[-1]}")


@run.command()
@click.argument("which", metavar="RUN...", nargs=-1, required=True)
@click.option("--all", "everything", is_flag=True, help="Show every metric, not only the most important ones.")
@runs_option
@json_option
def compare(which: tuple[str, ...], everything: bool, root: Path, as_json: bool) -> None:
    """Put runs beside each other: where their configs differ, their last metrics, and of two that were evaluated on the
    same tasks, whether one is better."""
    with run_errors():
        from palestra.evaluation.comparison import compare_evaluations
        from palestra.runs.facts import differing_settings
        from palestra.runs.overview import last_values

        runs = [find(one, root) for one in which]
        paired = compare_evaluations(*runs) if len(runs) == 2 else None
        differing = dict(sorted(differing_settings(one.read_about()["config"] for one in runs).items()))
        lasts = [last_values(one.read_metrics()) for one in runs]
    known = {name for last in lasts for name in last}
    names = sorted(known) if everything else [name for name in KEY_METRICS if name in known]
    if as_json:
        print_json(
            [
                {
                    "name": one.name,
                    "config": {key: values[at] for key, values in differing.items()},
                    "last": {name: last.get(name) for name in names},
                    **({"paired": to_builtins(paired)} if paired and one is runs[1] else {}),
                }
                for at, (one, last) in enumerate(zip(runs, lasts, strict=True))
            ]
        )
        return
    table = [["", *(one.name for one in runs)]]
    table += [[key, *map(number_text, values)] for key, values in differing.items()]
    table += [[name, *(number_text(last.get(name)) for last in lasts)] for name in ("step", *names)]
    print_table(table)
    if paired is not None:
        found = f"{paired.difference:+.3f} ± {paired.stderr:.3f} in reward (p = {paired.p_value:.3f})"
        counts = f"better at {paired.better}, worse at {paired.worse}"
        click.echo(f"{runs[1].name} against {runs[0].name} on {paired.tasks} tasks: {found}; {counts}")


@run.command()
@click.argument("which", metavar="RUN")
@click.option(
    "--to",
    "form",
    type=click.Choice(["jsonl", "csv", "parquet"]),
    default="jsonl",
    show_default=True,
    help="Format of the file.",
)
@click.option(
    "--what",
    type=click.Choice(["metrics", "rollouts", "tokens"]),
    default="metrics",
    show_default=True,
    help="What to export.",
)
@output_option("File to write. [stdout]")
@runs_option
@json_option
def export(which: str, form: str, what: str, out: Path | None, root: Path, as_json: bool) -> None:
    """Write RUN's metrics, rollouts or tokens in a form other tools read."""
    if form == "parquet" and out is None:
        raise click.UsageError("parquet cannot be printed; name a file with --output FILE")
    if as_json and out is None:
        raise click.UsageError("--json describes the file that was written; name one with --output FILE")
    with run_errors():
        from palestra.runs.row_export import write_rows

        found = find(which, root)
        with _opened(out) as stream:
            count = write_rows(found, what, form, stream)
    if as_json:
        print_json({"file": str(out), "rows": count})
    elif out is not None:
        click.echo(f"{out}: {count} rows of {what}")


@run.command()
@click.argument("which", metavar="RUN")
@output_option("A .png or .svg file. [plot.png in the run's folder]")
@runs_option
@json_option
def plot(which: str, out: Path | None, root: Path, as_json: bool) -> None:
    """Draw RUN: its reward with the spread, and the metrics of its health."""
    from palestra.runs.plots import SUFFIXES, draw

    if out is not None and out.suffix not in SUFFIXES:
        raise click.UsageError(f"{out}: pictures are {' or '.join(SUFFIXES)}")
    with run_errors(), needs_extra("train"):
        found = find(which, root)
        file = out or found.path / "plot.png"
        panels = draw(found, file)
    print_result(as_json, {"file": str(file), "panels": panels}, f"{file}: {', '.join(panels)}")


def forked_text(facts: JsonObject) -> str:
    """Returns which run this one continues, and after which step."""
    found = facts.get("forked_from")
    return f"{found['run']} after step {found['step']}" if found else ""


@contextmanager
def _opened(out: Path | None) -> Iterator[IO[bytes]]:
    if out is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    else:
        with replacing(out.absolute()) as stream:
            yield stream


def print_course(metrics: list[JsonObject]) -> None:
    courses = {name: [row[name] for row in metrics if row.get(name) is not None] for name in KEY_METRICS}
    rows = [
        [name, number_text(values[0]), number_text(values[-1]), number_text(max(values)), sparkline(values)]
        for name, values in courses.items()
        if values
    ]
    if rows:
        click.echo("")
        print_table([["metric", "first", "last", "highest", ""], *rows])
        click.echo("")
