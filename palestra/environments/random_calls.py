"""Arguments by chance that a tool's schema allows: what a policy without any skill would call a tool with."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.util.json_types import JsonMapping, JsonObject

OPTIONAL = 0.3
"""The probability with which an argument is given that may be left out."""


def random_arguments(rng: random.Random, parameters: JsonMapping, words: Sequence[str]) -> JsonObject:
    """Draws the arguments of a call. `words` are the texts to choose from: those of the world hit more often."""
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    required = parameters.get("required") or []
    taken = [name for name in properties if name in required or rng.random() < OPTIONAL]
    return {name: random_value(rng, properties[name], words) for name in taken}


def random_value(rng: random.Random, schema: Any, words: Sequence[str]) -> Any:
    """Draws a value of a schema; where the schema says nothing, one of the words."""
    match schema:
        case {"enum": [*choices]} if choices:
            return rng.choice(choices)
        case {"const": value}:
            return value
        case {"anyOf": [*branches]} | {"oneOf": [*branches]} if branches:
            return random_value(rng, rng.choice(branches), words)
        case {"type": "integer"}:
            return round(10 ** rng.uniform(0, 4))  # of small ones as many as of large ones
        case {"type": "number"}:
            return round(rng.uniform(0, 100), 2)
        case {"type": "boolean"}:
            return rng.random() < 0.5
        case {"type": "null"}:
            return None
        case {"type": "array", "items": items}:
            return [random_value(rng, items, words) for _ in range(rng.randint(0, 2))]
        case {"type": "array"}:
            return [rng.choice(words) for _ in range(rng.randint(0, 2))]
        case {"type": "object"}:
            return random_arguments(rng, schema, words)
        case _:
            return rng.choice(words)
