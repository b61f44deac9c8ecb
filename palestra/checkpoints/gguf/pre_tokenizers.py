"""Finds GGUF's name for the way in which a tokenizer splits text before it looks for merges.

A GGUF file has no pattern, only a name of llama.cpp's list; the wrong one would give other tokens.
"""

from __future__ import annotations

from typing import Any

from palestra.checkpoints import CheckpointError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s|{_REST_SLASH}"
_TEKKEN = _CASED % ("", "", r"\p{N}")
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_DEEPSEEK3_WORDS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)
_DEEPSEEK3 = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3_WORDS)
_WORDS, _DIGITS = "the words of GPT-2", "single digits"
_NAMES: dict[tuple[tuple[str, ...], bool], str] = {
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "dbrx",
    ((_TEKKEN,), True): "tekken",
    ((_GPT4O,), False): "gpt-4o",
    ((_GPT4O,), True): "gpt-4o",
    ((_WORDS,), False): "gpt-2",
    ((_DIGITS, _WORDS), False): "smollm",
    (_DEEPSEEK3, False): "deepseek-v3",
}
"""By the patterns, one after the other, and whether a word of the vocabulary needs no merges (`ignore_merges`)."""
KNOWN = tuple(dict.fromkeys(_NAMES.values()))


def pre_tokenizer_name(tokenizer: dict[str, Any]) -> str:
    """The name for what a `tokenizer.json` says. Raises CheckpointError where the format has none."""
    steps = _steps(tokenizer.get("pre_tokenizer"))
    name = None if steps is None else _NAMES.get((steps, bool(tokenizer["model"].get("ignore_merges"))))
    if name is None:
        raise CheckpointError(
            "GGUF has no name for how this tokenizer splits text, so its readers would make other tokens of some "
            "words; a similar way of splitting can be named with --pre-tokenizer: " + ", ".join(KNOWN)
        )
    return name


def _steps(part: dict[str, Any] | None) -> tuple[str, ...] | None:
    """What is done, one after the other; None where something is that no name stands for."""
    match part:
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            found = [_steps(one) for one in parts]
            return None if None in found else tuple(step for steps in found if steps for step in steps)
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            return (pattern,)
        case {"type": "Digits", "individual_digits": True}:
            return (_DIGITS,)
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return (_WORDS,) if part.get("use_regex", True) else ()
    return None
