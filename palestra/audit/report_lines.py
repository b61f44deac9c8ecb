"""Audits in lines of text, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator

from palestra.audit.findings import AuditFinding
from palestra.audit.report import AuditReport

COLUMNS = ("probe", "episodes", "solved", "mean reward", "largest", "failed")
MIB = 1 << 20


def headline(report: AuditReport) -> str:
    episodes = sum(one.episodes for one in report.probes)
    return f"{report.target}: {report.tasks} tasks, {episodes} episodes in {report.seconds:.1f} s"


def verdict_line(report: AuditReport) -> str:
    warnings = len(report.findings) - report.errors
    ignored = f", {report.ignored} ignored" if report.ignored else ""
    cut = "; it was not played to its end" if report.is_cut else ""
    if not report.findings:
        return f"no findings{ignored}{cut}"
    return f"{_count(report.errors, 'error')}, {_count(warnings, 'warning')}{ignored}{cut}"


def probe_table(report: AuditReport) -> list[list[str]]:
    """Returns the table of probes, with its header."""
    rows = [
        [
            one.probe,
            str(one.episodes),
            str(one.solved),
            number(one.reward_mean),
            number(one.reward_max),
            str(one.failed),
        ]
        for one in report.probes
    ]
    return [list(COLUMNS), *rows]


def remark_lines(report: AuditReport) -> list[str]:
    """Returns lines on what was measured, what is accepted, and what could not be played."""
    accepted = [f"{kind} is accepted here: {reason}" for kind, reason in report.accepted.items()]
    return [*_figures(report.figures), *accepted, *report.notes]


def _figures(found: dict[str, float]) -> Iterator[str]:
    for what in ("step", "start"):
        if f"{what}_s_median" in found:
            median, longest = found[f"{what}_s_median"], found[f"{what}_s_max"]
            yield f"a {what} takes {_milliseconds(median)} in the median, {_milliseconds(longest)} at most"
    if "memory_growth_bytes" in found:
        yield (
            f"an episode leaves {found['memory_growth_bytes'] / MIB:.2f} MiB behind, a step takes "
            f"{found['step_memory_bytes'] / MIB:.1f} MiB at most"
        )
    if "zero_variance_share" in found:
        yield f"{found['zero_variance_share']:.0%} of simulated groups have no variance"


def finding_lines(one: AuditFinding) -> list[str]:
    return [
        f"{one.severity}: {one.kind}: {where(one)}",
        f"  seen: {one.seen}",
        f"  why:  {one.why}",
        f"  do:   {one.advice}",
        *(f"  | {line}" for line in one.transcript),
    ]


def where(one: AuditFinding) -> str:
    """The probe, the task, and on how many others it was seen."""
    task = f", task {one.task}" if one.task else ""
    others = f" and {_count(one.tasks - 1, 'other')}" if one.tasks > 1 else ""
    return f"{one.probe}{task}{others}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2g} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
