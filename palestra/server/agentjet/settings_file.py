"""AgentJet's YAML from untrusted clients: parsed safely, limited, flattened to dotted keys."""

from __future__ import annotations

from typing import Any, TypeVar

from palestra.config import ConfigError
from palestra.config.load import parse_yaml
from palestra.util.json_types import JsonObject

T = TypeVar("T")

SECTION = "ajet"
MAX_BYTES = 128 << 10  # AgentJet's own config has 12 KB, including comments
MAX_DEPTH = 16
MAX_KEYS = 2000
MAX_NAME = 200
MAX_BITS = 64  # of a whole number; one with thousands of digits cannot even be printed


class AgentJetError(ValueError):
    """A config is wrong; the message names the key, and says what to write instead."""


def read_keys(text: str) -> JsonObject:
    """Returns values by dotted key, including `ajet`; lists are values. Null values are left out."""
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise AgentJetError(f"the config is longer than {MAX_BYTES} bytes; send the settings, not the data")
    if "<<" in text:  # merge keys can multiply the content without limit
        raise AgentJetError("merge keys (<<) are not supported; write the values out")
    try:
        content = parse_yaml(text, "yaml_as_string")
    except ConfigError as error:
        raise AgentJetError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise AgentJetError(f"yaml_as_string: not valid YAML ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get(SECTION), dict):
        raise AgentJetError(
            f"the config has no section {SECTION!r}; send AgentJet's config, which has its settings there"
        )
    return _flatten(content)


def _flatten(content: dict[Any, Any]) -> JsonObject:
    """Flattens without recursion and with a limit: a YAML alias may stand for a structure that contains itself."""
    found: JsonObject = {}
    level: list[tuple[str, Any]] = [("", content)]
    for _ in range(MAX_DEPTH):
        inner: list[tuple[str, Any]] = []
        for at, value in level:
            if isinstance(value, dict):
                inner += [(_at(at, name), one) for name, one in value.items()]
            elif value is not None:
                found[at] = [_sound(one) for one in value] if isinstance(value, list) else _sound(value)
            if len(inner) + len(found) > MAX_KEYS:
                raise AgentJetError(f"the config has more than {MAX_KEYS} keys")
        if not inner:
            return found
        level = inner
    raise AgentJetError(f"the config is nested deeper than {MAX_DEPTH} levels")


def _at(parent: str, name: object) -> str:
    if len(text := str(_sound(name))) > MAX_NAME:
        raise AgentJetError(f"a key is longer than {MAX_NAME} characters: {text[:40]!r}…")
    return f"{parent}.{text}" if parent else text


def _sound(value: T) -> T:
    """Checks that a value can be printed and stored."""
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
        raise AgentJetError(f"{value[:40]!r} has half a character (\\ud800 to \\udfff) in it")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise AgentJetError(f"a whole number is longer than {MAX_BITS} bits: {hex(value):.40}…")
    return value
