"""The cells of `palestra run list`."""

from __future__ import annotations

from palestra.util.figures import number_text
from palestra.util.json_types import JsonObject
from palestra.util.safe_text import safe_text

NOTE_WIDTH = 40


def note_text(notes: list[JsonObject]) -> str:
    """The newest note, in short."""
    text = safe_text(notes[-1]["text"].splitlines()[0], keep="") if notes else ""
    return text if len(text) <= NOTE_WIDTH else f"{text[: NOTE_WIDTH - 1]}…"


def evaluation_text(row: JsonObject) -> str:
    """The newest evaluation and its step, which is seldom the last step of the run."""
    if row["eval_step"] is None:
        return "-"
    success, loss = row["eval_success"], row["eval_loss"]
    figure = number_text(success) if success is not None else f"loss {number_text(loss)}"
    return f"{figure} (step {row['eval_step']})"
