"""`palestra run`: list runs, show, compare, export and plot them.

Owns: arguments and printing. Never touches: the files of a run, except by reading.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click
from msgspec import to_builtins

from palestra.cli.output import needs_extra, print_json, print_result
from palestra.cli.run.common import (
    duration_text,
    find,
    json_option,
    number_text,
    print_table,
    resume_command,
    run_errors,
    runs_option,
    safe_text,
    sparkline,
    time_text,
)
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.runs.reader import RunReader

# The metrics that are looked at first, as far as a run has them.
KEY_METRICS = (
    "reward/mean",
    "reward/best_of_group",
    "eval/success",
    "eval/reward_mean",
    "loss/mean",
    "eval/loss",
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
EVALUATIONS = ("eval/success", "eval/loss")
WORTH_TELLING = ("warning", "error", "resume", "end")


@click.group()
def run() -> None:
    """List, look at, compare, export and plot training runs."""


@run.command("list")
@runs_option
@json_option
def list_(root: Path, as_json: bool) -> None:
    """List the runs, newest first."""
    with run_errors():
        from palestra.runs.reader import list_runs

        rows = [overview(one) for one in list_runs(root)]
    if as_json:
        print_json(rows)
    elif not rows:
        click.echo(f"no runs in {root}; to start one: palestra train CONFIG")
    else:
        shown = [["name", "status", "step", "reward", "eval", "model", "started"]]
        for row in rows:
            figures = [number_text(row[column]) for column in ("name", "status", "last_step", "reward_mean")]
            started = time_text(row["created"]) if row["created"] else "-"
            shown.append([*figures, evaluation_text(row), number_text(row["model"]), started])
        print_table(shown)


@run.command()
@click.argument("which", metavar="RUN")
@runs_option
@json_option
def show(which: str, root: Path, as_json: bool) -> None:
    """Show how RUN, a name or a folder, was started and its state."""
    with run_errors():
        from palestra.runs.facts import summarize

        found = find(which, root)
        about, metrics, events = found.read_about(), found.read_metrics(), found.read_events()
        status, summary = found.status(), {**found.read_summary(), **summarize(metrics, events)}
        resume = resume_command(found) if status.can_resume else None
    if as_json:
        record = {**about, "path": str(found.path), "summary": {**summary, "status": status}, "events": events}
        print_json({**record, "resume": resume})
        return
    facts, config = about["facts"], about["config"]
    environments = ", ".join(entry["name"] for entry in config.get("environments", []))
    steps = f", {summary['last_step'] or 0} of {config['steps']} steps" if "steps" in config else ""
    rows = {
        "run": f"{found.name} ({about['kind']}), {found.path}",
        "status": f"{status}{steps} in {duration_text(summary['seconds'])}",
        "model": model_name(config),
        "environments": environments,
        "started": f"{time_text(about['created'])} on {facts['host']}, attempts: {summary['attempts']}",
        "command": facts["command"],
        "code": facts["git_commit"],
    }
    for name, text in rows.items():
        if text:
            click.echo(f"{name:<14}{safe_text(str(text), keep='')}")
    print_course(metrics)
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

        runs = [find(one, root) for one in which]
        paired = compare_evaluations(*runs) if len(runs) == 2 else None
        configs, lasts = [flat_config(one) for one in runs], [last_values(one.read_metrics()) for one in runs]
    keys = sorted({key for config in configs for key in config})
    differing = [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
    known = {name for last in lasts for name in last}
    names = sorted(known) if everything else [name for name in KEY_METRICS if name in known]
    if as_json:
        sides = zip(runs, configs, lasts, strict=True)
        print_json(
            [
                {
                    "name": one.name,
                    "config": {key: config.get(key) for key in differing},
                    "last": {name: last.get(name) for name in names},
                    **({"paired": to_builtins(paired)} if paired and one is runs[1] else {}),
                }
                for one, config, last in sides
            ]
        )
        return
    table = [["", *(one.name for one in runs)]]
    table += [[key, *(number_text(config.get(key)) for config in configs)] for key in differing]
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
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="File to write. [stdout]")
@runs_option
@json_option
def export(which: str, form: str, what: str, out: Path | None, root: Path, as_json: bool) -> None:
    """Write RUN's metrics, rollouts or tokens in a form other tools read."""
    from palestra.cli.run.export import export_rows

    if form == "parquet" and out is None:
        raise click.UsageError("parquet cannot be printed; name a file with --out FILE")
    if as_json and out is None:
        raise click.UsageError("--json describes the file that was written; name one with --out FILE")
    with run_errors():
        count = export_rows(find(which, root), what, form, out)
    if as_json:
        print_json({"file": str(out), "rows": count})
    elif out is not None:
        click.echo(f"{out}: {count} rows of {what}")


@run.command()
@click.argument("which", metavar="RUN")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="A .png or .svg file. [plot.png in the run's folder]",
)
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


def model_name(config: JsonObject) -> str | None:
    """The model's name in the config of a training run or an evaluation."""
    model = config.get("model")
    return model.get("name") if isinstance(model, dict) else model


def overview(one: RunReader) -> JsonObject:
    """A run in one row. A run that cannot be read gets a row with the reason, so that the others are still listed."""
    from palestra.runs.record_files import RunError

    row: JsonObject = {"name": one.name, "path": str(one.path), "status": "damaged", "kind": None, "model": None}
    row |= {"created": None, "last_step": None, "steps": None, "reward_mean": None}
    row |= {"eval_success": None, "eval_loss": None, "eval_step": None}
    try:
        about, metrics = one.read_about(), one.read_metrics()
        last = last_values(metrics)
        evaluated = [line["step"] for line in metrics if any(line.get(name) is not None for name in EVALUATIONS)]
        row |= {
            "status": str(one.status()),
            "kind": about["kind"],
            "model": model_name(about["config"]),
            "created": about["created"],
            "last_step": last.get("step"),
            "steps": about["config"].get("steps"),
            "reward_mean": last.get("reward/mean"),
            "eval_success": last.get("eval/success"),
            "eval_loss": last.get("eval/loss"),
            "eval_step": evaluated[-1] if evaluated else None,
        }
    except (RunError, KeyError, AttributeError, TypeError, ValueError) as error:
        row["error"] = f"{type(error).__name__}: {error}"
    return row


def evaluation_text(row: JsonObject) -> str:
    """The newest evaluation and its step, which is seldom the last step of the run."""
    if row["eval_step"] is None:
        return "-"
    success, loss = row["eval_success"], row["eval_loss"]
    figure = number_text(success) if success is not None else f"loss {number_text(loss)}"
    return f"{figure} (step {row['eval_step']})"


def last_values(metrics: list[JsonObject]) -> JsonObject:
    """The newest value of each metric, since not every row has an evaluation."""
    newest: JsonObject = {}
    for row in metrics:
        newest |= {name: value for name, value in row.items() if value is not None}
    return {name: value for name, value in newest.items() if name not in ("time", "attempt")}


def flat_config(one: RunReader) -> JsonObject:
    from palestra.runs.facts import flatten

    return {key: value for key, value in flatten(one.read_about()["config"]).items() if key not in ("name", "runs")}


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
