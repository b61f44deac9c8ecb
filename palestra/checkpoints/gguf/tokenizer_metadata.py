"""A tokenizer as metadata of a GGUF file: tokens with their types, merges or scores, ids of special tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.chat.errors import ChatError
from palestra.chat.tokenizer_files import TokenizerFiles, read_tokenizer
from palestra.checkpoints import CheckpointError
from palestra.checkpoints.gguf.families import GgufFamily
from palestra.checkpoints.gguf.pre_tokenizers import KNOWN, pre_tokenizer_name

if TYPE_CHECKING:
    from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"  # what sentencepiece writes for a space
_UNMERGED = -1e9  # the score of pieces that no merge makes; sentencepiece merges the best pair first
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unk", "sep_token": "sep", "pad_token": "pad"}


def add_tokenizer(
    writer: GGUFWriter, folder: Path, vocab_size: int, family: GgufFamily, *, pre_tokenizer: str | None = None
) -> None:
    """Raises CheckpointError where the format cannot say what the folder's tokenizer does. `pre_tokenizer`: the name of
    a way to split text, if not the tokenizer's own."""
    try:
        files = read_tokenizer(folder, needs_template=False)
    except ChatError as error:
        raise CheckpointError(str(error)) from None
    raw = json.loads(files.tokenizer.to_str())
    if raw["model"]["type"] != "BPE":
        raise CheckpointError(f"the tokenizer of {folder} is of type {raw['model']['type']}; GGUF is written for BPE")
    if pre_tokenizer is not None and pre_tokenizer not in KNOWN:
        raise CheckpointError(f"unknown --pre-tokenizer {pre_tokenizer!r}; known: {', '.join(KNOWN)}")
    tokens, types = _tokens(files, raw, vocab_size)
    if raw["model"].get("byte_fallback") and family.is_gemma4:
        _require_spaces(raw, folder)
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_merges([" ".join(pair) for pair in _merges(raw)])
        writer.add_add_space_prefix(_has_space_prefix(files))
    elif raw["model"].get("byte_fallback"):
        _require_spaces(raw, folder)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list([_shown(token, kind) for token, kind in zip(tokens, types, strict=True)])
        writer.add_token_scores(_scores(raw, tokens))
        writer.add_add_space_prefix(_has_space_prefix(files))
    else:
        _require_plain_text(raw, folder)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer or pre_tokenizer_name(raw))
        writer.add_token_list(tokens)
        writer.add_token_merges([" ".join(pair) for pair in _merges(raw)])
    writer.add_token_types(types)
    _add_specials(writer, files)
    if template := files.templates.get("default"):
        writer.add_chat_template(template)


def _tokens(files: TokenizerFiles, raw: dict[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """One for each row of the embedding; rows behind the vocabulary get a name that no text has."""
    tokens, types = [f"[PAD{n}]" for n in range(vocab_size)], [UNUSED] * vocab_size
    has_bytes = bool(raw["model"].get("byte_fallback"))
    for text, number in raw["model"]["vocab"].items():
        kind = BYTE if has_bytes and _BYTE.fullmatch(text) else NORMAL
        tokens[number], types[number] = text, UNKNOWN if text == raw["model"].get("unk_token") else kind
    for number, token in files.tokenizer.get_added_tokens_decoder().items():
        if number >= vocab_size:
            raise CheckpointError(f"token {token.content!r} has number {number}, but the model has {vocab_size} rows")
        if types[number] != UNKNOWN:
            tokens[number], types[number] = token.content, CONTROL if token.special else USER_DEFINED
    return tokens, types


def _merges(raw: dict[str, Any]) -> list[list[str]]:
    """Pairs; older files have them as one text."""
    return [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in raw["model"]["merges"]]


def _scores(raw: dict[str, Any], tokens: list[str]) -> list[float]:
    """By the first merge that makes a piece, so that pairs are merged in the order of the merges."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(_merges(raw)):
        ranks.setdefault("".join(pair), rank)
    return [-float(ranks[token]) if token in ranks else _UNMERGED for token in tokens]


def _shown(token: str, kind: int) -> str:
    """Tokens that are looked for in the text itself have its spaces."""
    return token.replace(_SPACE, " ") if kind == USER_DEFINED else token


def _has_space_prefix(files: TokenizerFiles) -> bool:
    """Whether text gets a space before its first word."""
    return files.tokenizer.encode("a", add_special_tokens=False).tokens[0].startswith(_SPACE)


def _require_spaces(raw: dict[str, Any], folder: Path) -> None:
    """Readers of the format replace spaces, perhaps put one before the text, and do nothing else."""
    text = json.dumps([raw.get("normalizer"), raw.get("pre_tokenizer")])
    odd = set(re.findall(r'"type": "(\w+)"', text)) - {"Sequence", "Replace", "Prepend", "Metaspace", "Split"}
    if odd:
        raise CheckpointError(f"the tokenizer of {folder} changes text by {', '.join(sorted(odd))}, which GGUF has not")


def _require_plain_text(raw: dict[str, Any], folder: Path) -> None:
    normalizer = (raw.get("normalizer") or {"type": "NFC"})["type"]
    if normalizer != "NFC":  # which changes nothing in most texts
        raise CheckpointError(f"the tokenizer of {folder} changes text by {normalizer}, which GGUF has not")


def _add_specials(writer: GGUFWriter, files: TokenizerFiles) -> None:
    ids = {_NAMED[name]: files.specials[text] for name, text in files.named.items() if name in _NAMED}
    if "eos" not in ids and files.eos_ids:
        ids["eos"] = files.eos_ids[0]
    for name, number in ids.items():
        getattr(writer, f"add_{name}_token_id")(number)
    if others := [number for number in files.eos_ids if number != ids.get("eos")]:
        writer.add_eot_token_id(others[0])  # the format has room for one more that ends what a model says
    around = files.tokenizer.encode("a").ids
    writer.add_add_bos_token("bos" in ids and around[0] == ids["bos"])
    writer.add_add_eos_token("eos" in ids and around[-1] == ids["eos"])
