"""A rollout's tokens, one by one: which ones the policy sampled, their log-probabilities, their advantages.

Owns: texts of single tokens, colours. Never touches: files of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from rich.text import Text

from palestra.cli.run.common import number_text, safe_text
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LOWEST_LOGPROB = -6.0  # about one in 400: what is rarer looks the same
NOT_SAMPLED = "dim"


class TokenOrigin(StrEnum):
    PROMPT = "prompt"
    OBSERVATION = "observation"
    SAMPLED = "sampled"


class Color(StrEnum):
    MASK = "mask"
    LOGPROB = "logprob"
    ADVANTAGE = "advantage"


class TokenCell(Struct):
    id: int
    text: str
    origin: TokenOrigin
    logprob: float | None = None
    advantage: float | None = None
    """None where the token was not trained on."""


STYLES = {TokenOrigin.PROMPT: "dim", TokenOrigin.OBSERVATION: "blue", TokenOrigin.SAMPLED: "green"}
LEGENDS = {
    Color.MASK: "green: sampled and trained on; blue: observation; dim: prompt",
    Color.LOGPROB: f"green: certain; red: logprob {LOWEST_LOGPROB:g} or less; dim: not sampled",
    Color.ADVANTAGE: "green: positive; red: negative; white: 0; dim: not trained on",
}


def token_cells(record: JsonObject, tokenizer: Tokenizer | None) -> list[TokenCell]:
    """The tokens of a rollout, from a line of the run's `tokens` file."""
    cells = [TokenCell(token, "", TokenOrigin.PROMPT) for token in record["prompt"]]
    for turn in record["turns"]:
        cells += [TokenCell(token, "", TokenOrigin.OBSERVATION) for token in turn["observation"]]
        pairs = zip(turn["tokens"], turn["logprobs"], strict=False)
        cells += [TokenCell(token, "", TokenOrigin.SAMPLED, logprob) for token, logprob in pairs]
    for cell, advantage in zip(cells, record["advantages"] or [], strict=False):
        cell.advantage = advantage if cell.origin is TokenOrigin.SAMPLED else None
    texts = token_texts([cell.id for cell in cells], tokenizer)
    for cell, text in zip(cells, texts, strict=True):
        cell.text = text
    return cells


def token_texts(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """The text that each token adds. If several tokens make one character, the last of them has it and the others are
    empty."""
    if tokenizer is None:
        return [f"<{token}>" for token in ids]
    texts: list[str] = []
    begin = read = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(list(ids[begin:read]), skip_special_tokens=False)
        now = tokenizer.decode(list(ids[begin:end]), skip_special_tokens=False)
        is_partial = now.endswith("\ufffd") and end < len(ids) and end - read < 4  # a character is 4 bytes at most
        if is_partial:
            texts.append("")
        else:
            texts.append(now[len(before) :])
            begin, read = read, end
    return texts


def load_tokenizer(folder: str | None) -> Tokenizer | None:
    """The tokenizer, or None if there is none; then ids are shown."""
    if folder is None or not (file := Path(folder) / "tokenizer.json").is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises nothing more special for a file it cannot read
        return None


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
