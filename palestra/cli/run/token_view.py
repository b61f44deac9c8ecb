"""A rollout's tokens in a terminal, coloured or as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from rich.text import Text

from palestra.runs.token_cells import TokenCell, TokenOrigin
from palestra.util.figures import number_text
from palestra.util.safe_text import safe_text

LOWEST_LOGPROB = -6.0  # about one in 400: what is rarer looks the same
NOT_SAMPLED = "dim"


class Color(StrEnum):
    MASK = "mask"
    LOGPROB = "logprob"
    ADVANTAGE = "advantage"


STYLES = {TokenOrigin.PROMPT: "dim", TokenOrigin.OBSERVATION: "blue", TokenOrigin.SAMPLED: "green"}
LEGENDS = {
    Color.MASK: "green: sampled and trained on; blue: observation; dim: prompt",
    Color.LOGPROB: f"green: certain; red: logprob {LOWEST_LOGPROB:g} or less; dim: not sampled",
    Color.ADVANTAGE: "green: positive; red: negative; white: 0; dim: not trained on",
}


def colored(cells: Sequence[TokenCell], color: Color) -> Text:
    """The tokens as coloured Text. It is no markup, so text of the model is never read as a style."""
    largest = max((abs(cell.advantage) for cell in cells if cell.advantage is not None), default=0.0)
    text = Text()
    for cell in cells:
        shown = safe_text(cell.text, keep="\t\n").replace("\n", "↵\n")
        text.append(shown, style_of(cell, color, largest))
    return text


def style_of(cell: TokenCell, color: Color, largest: float) -> str:
    if color is Color.MASK:
        return STYLES[cell.origin]
    if color is Color.LOGPROB:
        return NOT_SAMPLED if cell.logprob is None else shade(1.0 - 2.0 * min(1.0, cell.logprob / LOWEST_LOGPROB))
    if cell.advantage is None:
        return NOT_SAMPLED
    return shade(cell.advantage / largest) if largest else shade(0.0)


def shade(value: float) -> str:
    """A colour for a value from -1 (red) over 0 (white) to 1 (green)."""
    value = 0.0 if math.isnan(value) else max(-1.0, min(1.0, value))
    other = round(255 * (1.0 - abs(value)))
    return f"rgb({other},255,{other})" if value > 0 else f"rgb(255,{other},{other})"


def table_rows(cells: Sequence[TokenCell]) -> list[list[str]]:
    """A line for each token, for terminals without colours, files and grep."""
    rows = [["place", "id", "origin", "logprob", "advantage", "text"]]
    for place, cell in enumerate(cells):
        numbers = [number_text(cell.logprob), number_text(cell.advantage)]
        rows.append([str(place), str(cell.id), cell.origin, *numbers, safe_text(cell.text, keep="")])
    return rows
