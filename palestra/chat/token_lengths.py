"""An upper bound for how many characters a token stands for: so a text that is too long for a context is refused before
it is encoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from palestra.util.json_types import JsonMapping, JsonObject

COMPOSED = 4  # the most characters that NFC composes into one: a letter and three marks
KEEPING = frozenset(("ByteLevel", "Split", "Digits", "Metaspace"))
"""Pre-tokenizers that drop nothing, unless their `behavior` says so."""
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def longest_text(tokenizer: Tokenizer) -> int | None:
    """Returns the length of the longest token in characters. None if there is no bound: a part of the text may be
    dropped, or a text of any length become one unknown token."""
    facts = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    steps = list(_steps(facts["pre_tokenizer"]))
    swallows = any(token["lstrip"] or token["rstrip"] for token in facts["added_tokens"])
    drops = any(step["type"] not in KEEPING or step.get("behavior") == "Removed" for step in steps)
    if swallows or drops or not _reads_all(facts["model"], steps, vocabulary):
        return None
    shrinking = [_shrinking(step) for step in _steps(facts["normalizer"])]
    if any(factor is None for factor in shrinking):
        return None
    # Written byte by byte, a token's name is longer than its text, never shorter.
    return max(map(len, vocabulary)) * max((factor for factor in shrinking if factor is not None), default=1)


def _reads_all(model: JsonMapping, steps: list[JsonObject], vocabulary: Mapping[str, int]) -> bool:
    """Whether there is a token for every byte."""
    by_bytes = any(step["type"] == "ByteLevel" for step in steps)
    letters = ByteLevel.alphabet() if by_bytes else FALLBACK if model.get("byte_fallback") else None
    return model["type"] == "BPE" and letters is not None and all(letter in vocabulary for letter in letters)


def _shrinking(step: JsonMapping) -> int | None:
    """Returns how many characters a step may combine into one; None: any number."""
    match step:
        case {"type": "NFC"}:
            return COMPOSED
        case {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(new) >= len(old):
            return 1
        case _:
            return None


def _steps(part: JsonMapping | None) -> Iterator[JsonObject]:
    """Returns the steps of a sequence; a single step, or none."""
    match part:
        case None:
            return
        case {"type": "Sequence"}:
            for inner in part.get("pretokenizers") or part.get("normalizers") or ():
                yield from _steps(inner)
        case _:
            yield dict(part)
