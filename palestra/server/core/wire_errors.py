"""Errors for malformed requests: one clear line and a 4xx.

Owns: WireError and the text of a validation failure. Never touches: HTTP responses.
"""

from __future__ import annotations

from pydantic import ValidationError

MAX_SHOWN = 80  # characters of a client's value that a message repeats


class WireError(ValueError):
    """The request cannot be parsed. The text is meant for the client."""

    status = 400


class TooLarge(WireError):
    status = 413


def shown(value: object) -> str:
    """Returns a client's value, shortened, for a message."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def wire_error_of(error: ValidationError) -> WireError:
    """Returns the first error of a validation: where, what, and what was found."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:MAX_SHOWN]
    message = first["msg"].removeprefix("Value error, ")
    found = f", found {_shown_input(first['input'])}" if first["type"] not in _INPUT_IS_NOISE else ""
    return WireError(f"{where if where.isprintable() else repr(where)}: {message}{found}" if where else message + found)


_INPUT_IS_NOISE = ("missing", "json_invalid", "value_error")


def _shown_input(value: object) -> str:
    return type(value).__name__ if isinstance(value, dict | list | tuple | bytes) else shown(value)
