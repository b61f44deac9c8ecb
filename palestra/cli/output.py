"""Reports of commands: a result on stdout, one line on stderr when something is wrong, and an exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import rich_click as click

from palestra.util.file_errors import file_error_text

# docs/commands.md tells users about these.
FAILED = 1
USAGE = 2
NOT_FOUND = 3
UNREACHABLE = 4
TOO_MANY_FAILED = 5
FINDINGS = 6
INTERRUPTED = 130


def fail(message: object, code: int = FAILED) -> SystemExit:
    click.echo(f"error: {message}", err=True)
    return SystemExit(code)


def exit_code(error: Exception) -> int:
    """The exit code of an error, by the built-in exception class that it inherits from."""
    match error:
        case LookupError():
            return NOT_FOUND
        case ConnectionError():
            return UNREACHABLE
        case ValueError() | FileNotFoundError() | click.UsageError():
            return USAGE
    return FAILED


@contextmanager
def file_errors(*more: str) -> Iterator[None]:
    """Prints a sentence about a file or folder that cannot be used, and the lines of `more`. It is around every
    command."""
    try:
        yield
    except OSError as error:
        if (text := file_error_text(error)) is None:
            raise
        raise fail("\n".join([text, *more]), exit_code(error)) from error


@contextmanager
def one_line_errors(*kinds: type[Exception], code: int | None = None) -> Iterator[None]:
    """Errors that the user can fix are printed as one line; only our own bugs show a traceback."""
    try:
        yield
    except kinds as error:
        code = exit_code(error) if code is None else code
        knows_where = code != UNREACHABLE or "--server" in str(error)
        hint = "" if knows_where else "; is the server running, and is this its address (--server)?"
        raise fail(f"{file_error_text(error) or error}{hint}", code) from error


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("palestra"):
            raise
        raise fail(f"this command needs {error.name}; to install it: pip install 'palestra[{extra}]'") from error


def print_json(content: object) -> None:
    click.echo(json.dumps(content, indent=2))


def print_result(as_json: bool, content: object, text: str) -> None:
    """Prints the result as JSON for programs, or as text for people."""
    click.echo(json.dumps(content, indent=2) if as_json else text)


def count_text(count: int) -> str:
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= factor:
            return f"{count / factor:.2f}{unit}"
    return str(count)
