"""Audits as one HTML page, which needs nothing but itself.

Everything in it that a model or an environment said is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from palestra.audit.findings import AuditFinding
from palestra.audit.report import AuditReport, ProbeSummary
from palestra.audit.report_lines import headline, number, remark_lines, where

STYLE = """
:root { color-scheme: light dark; --line: #8884; --error: #c62828; --warning: #b26a00; --fine: #2e7d32; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; border-top: 1px solid var(--line);
padding-top: 1rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; }
article { border-left: 4px solid var(--warning); padding: .1rem 0 .1rem 1rem; margin: 1.2rem 0; }
article.error { border-color: var(--error); } .fine { color: var(--fine); }
article h3 { font-size: 1rem; margin: 0; } article p { margin: .3rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .6rem; font-size: .85rem; }
dt { font-weight: 600; float: left; clear: left; width: 4rem; } dd { margin-left: 4.5rem; }
ul { padding-left: 1.2rem; } .note { opacity: .8; }
"""


def page(reports: Sequence[AuditReport]) -> str:
    """Returns the page of these audits."""
    body = "\n".join(_section(place, report) for place, report in enumerate(reports))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>Audit of environments</title>'
        f"<style>{STYLE}</style></head><body><h1>Audit of environments</h1>\n{_contents(reports)}\n{body}\n"
        "</body></html>\n"
    )


def _contents(reports: Sequence[AuditReport]) -> str:
    rows = [
        f'<tr><td><a href="#audit-{place}">{escape(one.target)}</a></td><td>{one.tasks}</td>'
        f"<td>{one.errors}</td><td>{len(one.findings) - one.errors}</td></tr>"
        for place, one in enumerate(reports)
    ]
    return f"<table><tr><th>target<th>tasks<th>errors<th>warnings</tr>{''.join(rows)}</table>"


def _section(place: int, report: AuditReport) -> str:
    found = "\n".join(map(_article, report.findings)) or '<p class="fine">No findings.</p>'
    probes = "".join(map(_row, report.probes))
    notes = "".join(f"<li>{escape(one)}</li>" for one in remark_lines(report))
    return (
        f'<h2 id="audit-{place}">{escape(headline(report))}</h2>\n{found}\n<table><tr><th>probe<th>episodes<th>solved'
        f'<th>mean reward<th>largest<th>failed</tr>{probes}</table><ul class="note">{notes}</ul>'
    )


def _row(one: ProbeSummary) -> str:
    cells = (one.episodes, one.solved, number(one.reward_mean), number(one.reward_max), one.failed)
    return f"<tr><td>{escape(one.probe)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _article(one: AuditFinding) -> str:
    lines = f"<pre>{escape(chr(10).join(one.transcript))}</pre>" if one.transcript else ""
    return (
        f'<article class="{one.severity}"><h3>{one.severity}: {one.kind}</h3><p class="note">{escape(where(one))}</p>'
        f"<dl><dt>Seen</dt><dd>{escape(one.seen)}</dd><dt>Why</dt><dd>{escape(one.why)}</dd>"
        f"<dt>Do</dt><dd>{escape(one.advice)}</dd></dl>{lines}</article>"
    )
