"""Labels of a run: tags to find it by, and notes."""

from __future__ import annotations

import re
import time
from pathlib import Path

from msgspec import Struct

from palestra.runs.record_files import LineFile, RunError, read_lines
from palestra.util.json_types import JsonObject

FILE = "labels.jsonl"
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/=-]{0,63}")
MAX_NOTE = 10_000


class BadLabel(RunError, ValueError):
    """A tag or note is not allowed."""


class RunNote(Struct, frozen=True):
    time: float
    text: str


class RunLabels(Struct, frozen=True):
    """Tags in the order in which they were given, notes from the oldest to the newest."""

    tags: list[str] = []
    notes: list[RunNote] = []


def read_labels(run: Path) -> RunLabels:
    tags: dict[str, None] = {}
    notes = []
    for row in read_lines(run / FILE):
        match row:
            case {"tag": str(tag)}:
                tags[tag] = None
            case {"untag": str(tag)}:
                tags.pop(tag, None)
            case {"note": str(text), "time": float(when)}:
                notes.append(RunNote(when, text))
    return RunLabels(list(tags), notes)


def add_tag(run: Path, tag: str) -> None:
    if not TAG.fullmatch(tag):
        raise BadLabel(f"{tag!r} cannot be a tag: use letters, digits and . _ : / = -, 64 at most")
    if tag not in read_labels(run).tags:
        _append(run, {"tag": tag})


def remove_tag(run: Path, tag: str) -> None:
    if tag in read_labels(run).tags:
        _append(run, {"untag": tag})


def add_note(run: Path, text: str) -> None:
    if not text.strip() or len(text) > MAX_NOTE:
        raise BadLabel(f"a note has 1 to {MAX_NOTE} characters")
    _append(run, {"note": text.strip()})


def _append(run: Path, row: JsonObject) -> None:
    file = LineFile(run / FILE)
    try:
        file.append({"time": time.time(), **row})
    finally:
        file.close()
