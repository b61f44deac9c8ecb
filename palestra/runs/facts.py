"""Facts about where and how a run was started, and its summary at the end."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from palestra.config.redaction import redact
from palestra.util.json_types import JsonObject

# Of these a summary names the best step: what one asks about a run first. Higher is better.
HEADLINES = ("reward/mean", "eval/success", "eval/reward_mean")


def gather_facts() -> JsonObject:
    return {
        "command": redact(shlex.join(sys.argv)),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "git_commit": git_commit(Path.cwd()),
        "packages": installed_packages(),
    }


@cache
def installed_packages() -> dict[str, str]:
    """Versions of all installed packages by name, since it is not known beforehand which will matter. Looked up once:
    it takes a tenth of a second."""
    return dict(sorted((found.name, found.version) for found in distributions() if found.name))


@cache
def git_commit(folder: Path) -> str | None:
    """The commit of a folder; `-dirty` when files differ from it. None outside a repository. Looked up once, as git
    compares all files: what this process has imported is what was there when it began."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def summarize(metrics: Sequence[JsonObject], events: Sequence[JsonObject]) -> JsonObject:
    """The summary of a run. `metrics` are in the order of steps, as a reader returns them."""
    best = {}
    for name in HEADLINES:
        rows = [row for row in metrics if isinstance(row.get(name), int | float)]
        if rows:
            row = max(rows, key=lambda row: row[name])
            best[name] = {"value": row[name], "step": row["step"]}
    return {
        "steps": len(metrics),
        "last_step": metrics[-1]["step"] if metrics else None,
        "attempts": max((row.get("attempt", 1) for row in events), default=1),
        "seconds": running_time(metrics, events),
        "best": best,
        "first": dict(metrics[0]) if metrics else {},
        "last": dict(metrics[-1]) if metrics else {},
    }


def running_time(metrics: Sequence[JsonObject], events: Sequence[JsonObject]) -> float:
    """Seconds from the first to the last event of each attempt; the time between attempts does not count."""
    times: dict[int, list[float]] = {}
    for row in (*metrics, *events):
        times.setdefault(row.get("attempt", 1), []).append(row["time"])
    return sum(max(signs) - min(signs) for signs in times.values())


def differing_settings(configs: Iterable[JsonObject | None]) -> dict[str, list[object]]:
    """The settings in which configs differ, with the value in each: None where it is not set. A run's own name and
    place say nothing."""
    flat = [flatten(config or {}) for config in configs]
    keys = {key: None for config in flat for key in config if key not in ("name", "runs")}
    values: dict[str, list[object]] = {key: [config.get(key) for config in flat] for key in keys}
    return {key: found for key, found in values.items() if len(set(map(str, found))) > 1}


def flatten(content: object, at: str = "") -> JsonObject:
    """Nested maps and lists as `a.b.0.c`; empty ones stay as they are."""
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    flat = {key: value for name, inner in entries for key, value in flatten(inner, f"{at}.{name}".lstrip(".")).items()}
    return flat or {at: content}
