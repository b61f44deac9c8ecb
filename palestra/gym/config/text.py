"""A config as text, for the head server's answers and for servers of NeMo Gym: YAML that OmegaConf reads.

Owns: writing and reading that text. Never touches: secrets; `secrets.shown` is for people.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from palestra.util.json_types import JsonObject


def to_yaml(settings: JsonObject) -> str:
    """Everything must be filled in; a remaining `${` is text, and is escaped."""
    return yaml.safe_dump(_mapped(settings, lambda text: text.replace("${", "\\${")), sort_keys=False, width=1 << 20)


def from_yaml(text: str) -> JsonObject:
    """Returns what `to_yaml` was given."""
    return _mapped(yaml.safe_load(text), lambda text: text.replace("\\${", "${"))


def _mapped(node: object, change: Callable[[str], str]) -> Any:
    if isinstance(node, dict):
        return {key: _mapped(value, change) for key, value in node.items()}
    if isinstance(node, list):
        return [_mapped(value, change) for value in node]
    return change(node) if isinstance(node, str) and "${" in node else node
