"""A config as text: for people, with keys, tokens and passwords masked wherever they occur; and as it is, for the head
server's answers and for servers of NeMo Gym, as YAML that OmegaConf reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from palestra.config.redaction import redact
from palestra.gym.config.merging import leaves
from palestra.util.json_types import JsonObject

MASK = "****"
_NAME = re.compile(
    r"api_?key|secret|passw(or)?d|passphrase|credential|authorization|(^|[_-])(key|token|auth)$|(^|[_-])private_key",
    re.IGNORECASE,
)
SHORTEST = 6  # a shorter secret would also match words of other settings


def is_secret_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.search(name) is not None


def masked(settings: object) -> object:
    """Returns a masked copy. A secret that was interpolated into other text is masked there too."""
    known = sorted({text for text in _secrets(settings) if len(text) >= SHORTEST}, key=len, reverse=True)
    return _masked(settings, known, is_secret=False)


def shown(settings: object) -> str:
    """Returns the masked settings as YAML."""
    return yaml.safe_dump(masked(settings), sort_keys=False, allow_unicode=True)


def _secrets(settings: object) -> set[str]:
    return {
        value
        for path, value in leaves(settings)
        if isinstance(value, str) and any(is_secret_name(part) for part in path)
    }


def _masked(node: object, known: list[str], *, is_secret: bool) -> object:
    if isinstance(node, dict):
        return {key: _masked(value, known, is_secret=is_secret or is_secret_name(key)) for key, value in node.items()}
    if isinstance(node, list):
        return [_masked(value, known, is_secret=is_secret) for value in node]
    if is_secret:
        return node if node is None or node == "" or isinstance(node, bool) else MASK
    if not isinstance(node, str):
        return node
    for secret in known:
        node = node.replace(secret, MASK)
    return redact(node)


# With its secrets, for programs


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
