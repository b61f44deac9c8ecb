"""A rollout's tokens, one by one: which ones the policy sampled, their log-probabilities, their advantages."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from palestra.runs.rollout_records import TokenRecord

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TokenOrigin(StrEnum):
    PROMPT = "prompt"
    OBSERVATION = "observation"
    SAMPLED = "sampled"


class TokenCell(Struct):
    id: int
    text: str
    origin: TokenOrigin
    logprob: float | None = None
    advantage: float | None = None
    """None where the token was not trained on."""
    trainer_logprob: float | None = None
    """The trainer's, just before the update."""
    entropy: float | None = None
    """Entropy of the trainer's distribution there, in nats, just before the update; None where it was not recorded."""


def token_cells(record: TokenRecord, tokenizer: Tokenizer | None) -> list[TokenCell]:
    """The tokens of a rollout, from a line of the run's `tokens` file."""
    cells = [TokenCell(token, "", TokenOrigin.PROMPT) for token in record["prompt"]]
    for turn in record["turns"]:
        cells += [TokenCell(token, "", TokenOrigin.OBSERVATION) for token in turn["observation"]]
        pairs = zip(turn["tokens"], turn["logprobs"], strict=False)
        cells += [TokenCell(token, "", TokenOrigin.SAMPLED, logprob) for token, logprob in pairs]
    sampled = [cell for cell in cells if cell.origin is TokenOrigin.SAMPLED]
    for cell, logprob in zip(sampled, record.get("trainer_logprobs") or [], strict=False):
        cell.trainer_logprob = logprob
    for cell, entropy in zip(sampled, record.get("entropies") or [], strict=False):
        cell.entropy = entropy
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
