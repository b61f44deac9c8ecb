"""The reference of every metric: those of the server from its registry, those of training runs from the loops' code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from palestra.server.broker.observer import EpisodeObserver
from palestra.server.core.telemetry.metrics import Metrics
from scripts.reference.links import ROOT
from scripts.reference.pages import Reference, code, page, table

PAGE = "docs/metrics.md"
OF_SERVER = "palestra_"
LOOPS = ("palestra/training/loops", "palestra/training/collecting", "palestra/rollouts")
ANY = "*"
METRIC = re.compile(r"[a-z*]+(/[a-z0-9_*]+)+")
INTRO = """Made from the code: every name that a server or a training run reports. How to read them is in
[Metrics](../metrics.md)."""


def pages(reference: Reference) -> None:
    parts = ["## Of a server", _server(reference), "## Of a training run", _training(reference)]
    reference.pages["reference/metrics.md"] = page("Every metric", INTRO, parts)


def _server(reference: Reference) -> str:
    metrics = Metrics()
    EpisodeObserver(metrics.registry)
    explained = _explained()
    rows = []
    for family in sorted(metrics.registry.collect(), key=lambda one: one.name):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        about = reference.explained(family.documentation, f"the metric `{name}`", "its definition")
        reference.explained(explained.get(name), f"the metric `{name}`", PAGE)
        rows.append([code(name), family.type, about])
    return table(["name", "type", "what it counts"], rows)


def _training(reference: Reference) -> str:
    explained = _explained()
    rows: dict[str, list[str]] = {}
    for name, where in _reported():
        begin, end = (r"[\w<>/]+", name[1:]) if name.startswith(ANY) else ("", name)
        fits = re.compile(begin + re.escape(end).replace(r"\*", r"[\w<>]+"))
        found = [one for one in explained if fits.fullmatch(one)]
        if not found:
            reference.explained(None, f"the training metric `{name}` ({where})", PAGE)
        rows |= {one: [code(one), explained[one], code(where)] for one in found if one not in rows}
    return table(["name", "meaning", "computed in"], (rows[name] for name in sorted(rows)))


def _reported() -> Iterator[tuple[str, str]]:
    """Each name that the loops give a number, with an asterisk for what a run fills in, and its file."""
    for path in sorted(file for folder in LOOPS for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            keys = node.keys if isinstance(node, ast.Dict) else [node.slice] if isinstance(node, ast.Subscript) else []
            keys += [node.key] if isinstance(node, ast.DictComp) else []
            for name in filter(METRIC.fullmatch, map(_text, keys)):
                yield name, path.relative_to(ROOT).as_posix()


def _text(key: ast.expr | None) -> str:
    if isinstance(key, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in key.values)
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""


def _explained() -> dict[str, str]:
    """The sentence beside each name in the page's tables: the column that says what it means."""
    found: dict[str, str] = {}
    for line in Path(ROOT / PAGE).read_text(encoding="utf-8").splitlines():
        cells = [one.strip() for one in re.split(r"(?<!\\)\|", line)[1:-1]]
        names = re.findall(r"`([\w/<>@.-]+)`", cells[0]) if len(cells) == 3 else []
        meaning = cells[2 if names[0].startswith(OF_SERVER) else 1] if names else ""
        found |= {name: re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", meaning) for name in names}
    return found
