"""How commands speak: a result on stdout, one line on stderr when something is wrong.

Owns: exit codes of failures, JSON output, human units. Never touches: what is being said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import rich_click as click


def fail(message: object) -> SystemExit:
    click.echo(f"error: {message}", err=True)
    return SystemExit(1)


@contextmanager
def one_line_errors(*kinds: type[Exception]) -> Iterator[None]:
    """The user's mistakes end in one line and exit code 1; a traceback is for ours."""
    try:
        yield
    except kinds as error:
        raise fail(error) from error


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("palestra"):
            raise
        raise fail(f"this command needs {error.name}; to install it: pip install 'palestra[{extra}]'") from error


def print_json(content: Any) -> None:
    click.echo(json.dumps(content, indent=2))


def bytes_text(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def count_text(count: int) -> str:
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= factor:
            return f"{count / factor:.2f}{unit}"
    return str(count)
