"""Masks keys, tokens and passwords wherever they occur in a config, so that it can be shown.

Owns: which settings are secret. Never touches: where the text goes.
"""

from __future__ import annotations

import re

import yaml

from palestra.config.redaction import redact
from palestra.gym.config.merging import leaves

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
