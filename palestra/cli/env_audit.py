"""`palestra env audit`: environments, played by policies without a model, and what is wrong with their rewards."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import rich_click as click

from palestra.cli.output import FAILED, FINDINGS, INTERRUPTED, USAGE, fail, needs_extra, one_line_errors, print_json
from palestra.cli.run.common import print_table

if TYPE_CHECKING:
    from palestra.audit import AuditReport, AuditSettings
    from palestra.audit.targets import AuditTarget

QUIET_S = 8.0
"""Seconds after which a line says how far an audit is, where lines cannot be replaced."""


class Range(click.ParamType):
    name = "LOW:HIGH"

    def convert(
        self, value: str | tuple[float, float], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, float]:
        if isinstance(value, tuple):
            return value
        low, colon, high = value.partition(":")
        try:
            found = (float(low), float(high))
        except ValueError:
            found = (0.0, 0.0)
        if not colon or not found[0] < found[1]:
            self.fail(f"{value!r} is no range; write it as -1:1", param, ctx)
        return found


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--limit", type=click.IntRange(min=1), default=8, show_default=True, help="Number of tasks to play.")
@click.option(
    "--tasks",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSONL file with the tasks. [the environment's own tasks]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Decides what is chosen and said by chance.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of one call into an environment, or of one episode that servers play.",
)
@click.option(
    "--within",
    type=click.FloatRange(min=0, min_open=True),
    default=900.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of the audit of one target: what was not played by then is named.",
)
@click.option("--reward-range", type=Range(), help="Smallest and largest reward. [the environment's own, or 0:1]")
@click.option("--success", type=float, default=1.0, show_default=True, help="Reward from which a task is solved.")
@click.option(
    "--skill",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Probability with which rollouts of a simulated group solve their task.",
)
@click.option(
    "--group-size", type=click.IntRange(min=2), default=8, show_default=True, help="Rollouts of a simulated group."
)
@click.option(
    "--at-once",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Episodes at the same time, to see whether they disturb each other.",
)
@click.option("--ignore", multiple=True, metavar="KIND", help="Kind of findings that is fine here; may be repeated.")
@click.option("--sandbox", default="local", show_default=True, metavar="NAME", help="Where coding tasks are played.")
@click.option(
    "--fresh-process/--no-fresh-process",
    default=True,
    show_default=True,
    help="Also list the tasks in a new process, where the order of sets is another.",
)
@click.option("--page", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write an HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def audit(
    targets: tuple[str, ...],
    limit: int,
    file: Path | None,
    seed: int,
    timeout: float,
    within: float,
    reward_range: tuple[float, float] | None,
    success: float,
    skill: float,
    group_size: int,
    at_once: int,
    ignore: tuple[str, ...],
    sandbox: str,
    fresh_process: bool,
    page: Path | None,
    as_json: bool,
) -> None:
    """Find what is wrong with an environment before a model does: play it without one, well, badly and dishonestly.

    TARGET is an environment (a name, package.module:Class), a config file, gym:NAME or the folder of a gym server, an
    app or a template of the platform (mail, mail-move_only, platform for all), coding tasks (a folder, a shipped task,
    coding for all), or the URL of an MCP or OpenEnv server. The exit code is 6 if there are findings.
    """
    with needs_extra("train"):
        from palestra.audit import AuditSettings, FindingKind
    from palestra.util.suggest import did_you_mean

    for kind in ignore:
        if kind not in set(FindingKind):
            raise fail(f"there is no kind of findings {kind!r}; {did_you_mean(kind, FindingKind)}", USAGE)
    settings = AuditSettings(
        limit=limit,
        seed=seed,
        timeout_s=timeout,
        within_s=within,
        reward_range=reward_range,
        success=success,
        skill=skill,
        group_size=group_size,
        at_once=at_once,
        fresh_process=fresh_process,
        ignored=frozenset(ignore),
    )
    reports: list[AuditReport] = []
    try:
        with tempfile.TemporaryDirectory(prefix="palestra-audit-") as folder:
            for target in _targets(targets, Path(folder), file):
                reports.append(_audited(target, settings, sandbox))
                if not as_json:
                    _print(reports[-1])
    except (KeyboardInterrupt, asyncio.CancelledError):
        click.echo("stopped", err=True)
        raise SystemExit(INTERRUPTED) from None
    _finish(reports, page, as_json)


def _targets(names: tuple[str, ...], folder: Path, file: Path | None) -> list[AuditTarget]:
    from palestra.audit.server_urls import TargetUnreachable
    from palestra.audit.targets import targets_named
    from palestra.coding import TaskError
    from palestra.config.errors import ConfigError

    found: list[AuditTarget] = []
    with one_line_errors(ConfigError, TaskError, TargetUnreachable, FileNotFoundError):
        for place, name in enumerate(names):
            own = folder / str(place)
            own.mkdir()
            found += targets_named(name, own, file)
    return found


def _audited(target: AuditTarget, settings: AuditSettings, sandbox: str) -> AuditReport:
    from palestra.audit import audit_target
    from palestra.coding import TaskError
    from palestra.environments import TaskFileError, UnknownEnvironment
    from palestra.rollouts.policy_sampler import PolicyError
    from palestra.rollouts.sources import RolloutSourceError

    with (
        one_line_errors(UnknownEnvironment),
        one_line_errors(TaskFileError, TaskError, RolloutSourceError, PolicyError, code=FAILED),
        _ProgressLine(target.name) as progress,
    ):
        return asyncio.run(audit_target(target, settings, progress.show, sandbox))


def _print(report: AuditReport) -> None:
    from palestra.audit.report_lines import finding_lines, headline, probe_table, remark_lines, verdict_line

    click.echo(headline(report))
    print_table(probe_table(report))
    for line in remark_lines(report):
        click.echo(line)
    for one in report.findings:
        click.echo()
        click.echo("\n".join(finding_lines(one)))
    click.echo(f"\n{report.target}: {verdict_line(report)}\n")


def _finish(reports: list[AuditReport], page: Path | None, as_json: bool) -> None:
    import msgspec

    from palestra.audit.page import page as page_of

    if as_json:
        print_json(msgspec.to_builtins(reports))
    if page is not None:
        page.write_text(page_of(reports), encoding="utf-8")
        click.echo(f"the page is in {page}", err=True)
    if any(one.findings for one in reports):
        raise SystemExit(FINDINGS)
    if cut := [one.target for one in reports if one.is_cut]:
        raise fail(f"no findings, but {', '.join(cut)} was not played to its end; give it more time: --within SECONDS")


class _ProgressLine:
    """One line on stderr: replaced in a terminal, and now and then a new one elsewhere."""

    def __init__(self, name: str) -> None:
        self._name, self._is_terminal = name, sys.stderr.isatty()
        self._shown_s = time.monotonic()

    def show(self, stage: str, done: int, total: int) -> None:
        text = f"{self._name}: {stage} {done} of {total}"
        if self._is_terminal:
            click.echo(f"\r{text[:78]:<78}", err=True, nl=False)
        elif time.monotonic() - self._shown_s > QUIET_S:
            self._shown_s = time.monotonic()
            click.echo(text, err=True)

    def __enter__(self) -> _ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_terminal:
            click.echo(f"\r{'':78}\r", err=True, nl=False)
