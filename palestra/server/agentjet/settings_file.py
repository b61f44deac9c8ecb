"""AgentJet's YAML from untrusted clients: parsed safely, limited, flattened to dotted keys.

Owns: limits of size and depth, errors of YAML. Never touches: what the keys mean.
"""

from __future__ import annotations

from typing import Any, TypeVar

from palestra.config import ConfigError
from palestra.config.load import parse_yaml
from palestra.util.json_types import JsonObject

T = TypeVar("T")

SECTION = "ajet"
MAX_BYTES = 128 << 10  # theirs has 12 KB, comments included
MAX_DEPTH = 16
MAX_KEYS = 2000
MAX_NAME = 200
MAX_BITS = 64  # of a whole number; thousands of digits cannot even be shown


class AgentJetError(ValueError):
    """What is wrong with a config, by its key, and what to write instead."""


def read_keys(text: str) -> JsonObject:
    """Leaves by dotted key, `ajet` included; lists are leaves. What is null is not there."""
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise AgentJetError(f"the config is longer than {MAX_BYTES} bytes; send the settings, not the data")
    if "<<" in text:  # what is merged can multiply without end
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
    """By hand and with an end: an alias may stand for a structure that holds itself."""
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
    """That it can be shown, and kept."""
    if isinstance(value, str) and not value.isascii() and any("\ud800" <= one <= "\udfff" for one in value):
        raise AgentJetError(f"{value[:40]!r} has half a character (\\ud800 to \\udfff) in it")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise AgentJetError(f"a whole number is longer than {MAX_BITS} bits: {hex(value):.40}…")
    return value
