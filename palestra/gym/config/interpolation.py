"""Fills in `${a.b}`, `${oc.env:NAME,default}` and the like, with OmegaConf."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from palestra.gym.config.merging import Path, dotted, leaves
from palestra.gym.errors import GymConfigError
from palestra.gym.search_folders import did_you_mean
from palestra.util.json_types import JsonObject

_MISSING_KEY = re.compile(r"Interpolation key '([^']+)' not found")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([A-Za-z_][\w-]*)(?!\w*:)")


def references(data: object) -> set[str]:
    """Returns the top-level names that some `${name…}` refers to."""
    texts = (value for _, value in leaves(data) if isinstance(value, str) and "${" in value)
    return {name for text in texts for name in _REFERENCE.findall(text)}


def resolved(data: JsonObject, source_of: Callable[[Path], str], *, is_final: bool = True) -> JsonObject:
    """Returns a copy with every interpolation filled in. Raises GymConfigError with all that failed; before `is_final`
    these stay as they are."""
    tree = OmegaConf.create(data)
    problems: list[str] = []

    def walk(plain: Any, node: Any, at: Path) -> Any:
        if isinstance(plain, dict):
            return {key: walk(value, _At(node, key), (*at, key)) for key, value in plain.items()}
        if isinstance(plain, list):
            return [walk(value, _At(node, index), (*at, index)) for index, value in enumerate(plain)]
        if not (isinstance(plain, str) and "${" in plain):
            return plain
        try:
            value = node.value()
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            problems.append(_explained(at, plain, error, data, source_of(at)))
            return plain

    whole = walk(data, _At(tree), ())
    if problems and is_final:
        raise GymConfigError("\n".join(problems))
    return whole


class _At:
    """A place in the tree that is looked up only if something has to be filled in, because this is slow."""

    __slots__ = ("above", "key")

    def __init__(self, above: Any, key: str | int | None = None) -> None:
        self.above, self.key = above, key

    def value(self) -> Any:
        return self.above if self.key is None else self.above.value()[self.key]


def _explained(at: Path, text: str, error: Exception, data: JsonObject, source: str) -> str:
    missing = _MISSING_KEY.search(str(error))
    if missing is None:
        reason = str(error).splitlines()[0]
        return f"{dotted(at)} = {text} in {source}: {reason}"
    key = missing[1]
    near = did_you_mean(key.split(".")[0], data)
    return (
        f"{dotted(at)} in {source} uses {key!r}, which is not set anywhere{near}\n  to set it: "
        f"++{key}=VALUE, or in env.yaml"
    )
