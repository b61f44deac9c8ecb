"""The verdict on a rollout in one form, for every kind of environment."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from palestra.util.json_types import JsonObject

MAX_LINES = 400  # of a diff


class ShownChange(Struct, frozen=True):
    """A row of the world that the rollout has changed."""

    table: str
    kind: str
    key: list[object]
    before: JsonObject = {}
    after: JsonObject = {}
    fields: list[str] = []


class VerdictParts(Struct, frozen=True):
    """The parts that pages know."""

    score: float | None = None
    met: list[str] = []
    missed: list[str] = []
    changes: list[ShownChange] | None = None
    stdout: str = ""
    patch: str = ""


class ShownVerdict(Struct, frozen=True):
    score: float | None
    met: list[str]
    missed: list[str]
    failed: list[str]
    """What is missing or was not asked for, a line each."""
    changes: list[ShownChange] | None
    """None: the verifier has looked at no rows, or does not say which."""
    patch: list[str]
    """Lines of the diff of the files that were changed; the first of very many."""
    others: JsonObject
    """Everything else that was recorded."""


def read_verdict(verdict: JsonObject) -> ShownVerdict | None:
    """Reads the verdict of a record. None if none was recorded."""
    if not verdict:
        return None
    try:
        known = msgspec.convert(verdict, VerdictParts)
    except msgspec.ValidationError:  # an environment with words of its own
        return ShownVerdict(None, [], [], [], None, [], verdict)
    is_platform = bool(known.met or known.missed)
    taken = ("score", "met", "missed", "changes", "patch", *(["stdout"] if is_platform else []))
    others = {name: value for name, value in verdict.items() if name not in taken}
    changes = [] if known.changes is None and is_platform else known.changes
    failed = known.stdout.splitlines() if is_platform else []
    lines = known.patch.splitlines()
    patch = [*lines[:MAX_LINES], *([f"… and {len(lines) - MAX_LINES} lines"] if len(lines) > MAX_LINES else [])]
    return ShownVerdict(known.score, known.met, known.missed, failed, changes, patch, others)
