"""Reads what a model folder says about its tokenizer into one record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from palestra.chat.errors import ChatError
from palestra.chat.templates import has_template, read_sources
from palestra.util.json_types import JsonMapping, JsonObject

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    where: str
    tokenizer: Tokenizer
    templates: dict[str, str]
    named: dict[str, str]
    """`bos_token` and the like, which templates use under these names."""
    specials: dict[str, int]
    """Text and id of each special token."""
    eos_ids: tuple[int, ...]


def read_tokenizer(folder: Path, *, needs_template: bool = True) -> TokenizerFiles:
    """Raises ChatError, also for a folder without a chat template if one is needed; otherwise it has no templates."""
    config = read_json_file(folder / "tokenizer_config.json")
    named = _named_tokens(read_json_file(folder / "special_tokens_map.json")) | _named_tokens(config)
    tokenizer = _open_tokenizer(folder)
    specials = _add_specials(tokenizer, config, named)
    return TokenizerFiles(
        where=str(folder),
        tokenizer=tokenizer,
        templates=read_sources(folder, config) if needs_template or has_template(folder, config) else {},
        named=named,
        specials=specials,
        eos_ids=tuple(dict.fromkeys(_eos_ids(folder, named, specials))),
    )


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Returns all tokens of a folder's tokenizer, which needs no chat template. Raises ChatError."""
    config = read_json_file(folder / "tokenizer_config.json")
    tokenizer = _open_tokenizer(folder)
    _add_specials(
        tokenizer, config, _named_tokens(read_json_file(folder / "special_tokens_map.json")) | _named_tokens(config)
    )
    return tokenizer.get_vocab(with_added_tokens=True)


def _open_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ChatError(
            f"no tokenizer.json in {folder}\n"
            "  name the folder of a Hugging Face model that has one (model.tokenizer=DIR), "
            "or make one to try things on: palestra model random DIR"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ChatError(f"{path} cannot be read: {error}\n  fetch the file again, or name another folder") from error
    # Some published files enable both; a conversation must be neither truncated nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _named_tokens(config: JsonMapping) -> dict[str, str]:
    found = {name: _text_of(config.get(name)) for name in NAMED}
    return {name: text for name, text in found.items() if text}


def _text_of(token: object) -> str | None:
    """Returns the text of a token, which is a string or a record with its text as `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_specials(tokenizer: Tokenizer, config: JsonMapping, named: Mapping[str, str]) -> dict[str, int]:
    """Special tokens are those that tokenizer.json marks as such, and those that tokenizer_config.json adds."""
    for text, entry in _declared(config):
        flags = {key: entry.get(key, False) for key in ("lstrip", "rstrip", "normalized", "special")}
        if tokenizer.token_to_id(text) is None:
            tokenizer.add_tokens([AddedToken(text, **flags)])
    extra = [text for key in EXTRA for text in map(_text_of, _values(config.get(key))) if text]
    known = tokenizer.get_added_tokens_decoder()
    specials = {token.content: number for number, token in known.items() if token.special}
    missing = [text for text in dict.fromkeys([*named.values(), *extra]) if text not in specials]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in missing])
    return specials | {text: number for text in missing if (number := tokenizer.token_to_id(text)) is not None}


def _declared(config: JsonMapping) -> Iterator[tuple[str, JsonObject]]:
    entries = config.get("added_tokens_decoder")
    if isinstance(entries, dict):
        for _, entry in sorted(entries.items(), key=lambda item: int(item[0])):
            if text := _text_of(entry):
                yield text, entry


def _values(found: object) -> list[Any]:
    return list(found.values()) if isinstance(found, dict) else found if isinstance(found, list) else []


def _eos_ids(folder: Path, named: Mapping[str, str], specials: Mapping[str, int]) -> Iterator[int]:
    if (eos := named.get("eos_token")) is not None:
        yield specials[eos]
    for name in ("generation_config.json", "config.json"):
        ids = read_json_file(folder / name).get("eos_token_id")
        for token in ids if isinstance(ids, list) else [ids]:
            if isinstance(token, int):
                yield token


def read_json_file(path: Path) -> JsonObject:
    """Returns the content of a file; empty if it does not exist."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ChatError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ChatError(f"{path} is not a JSON object")
    return content
