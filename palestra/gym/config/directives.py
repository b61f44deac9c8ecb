"""`_inherit_from`, `_copy` and `_delete_key`: parts of a config that are taken from elsewhere in it.

A part that is taken may itself take from elsewhere, in any order; NeMo Gym resolves such chains only partly.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from palestra.gym.config.merging import UNSET, merged
from palestra.gym.errors import GymConfigError
from palestra.gym.search_folders import did_you_mean
from palestra.util.json_types import JsonObject

INHERIT, COPY, DELETE = "_inherit_from", "_copy", "_delete_key"
_IN_TEXT = {"${inherit_from:": INHERIT, "${copy:": COPY}
MODELS, PLACEHOLDER = "responses_api_models", "dummy_model"


def apply_directives(data: JsonObject) -> JsonObject:
    """Returns the config without directives. Raises GymConfigError for a path that does not exist, or that leads to
    itself."""
    expander = _Expander(data)
    expanded = {key: expander.expand(value, str(key)) for key, value in data.items()}
    for path in expander.taken:
        _remove(expanded, path)
    return expanded


def merge_placeholders(data: JsonObject) -> None:
    """Handles `dummy_model` under a model server: settings for whatever model replaces it."""
    for value in data.values():
        models = value.get(MODELS) if isinstance(value, dict) else None
        if isinstance(models, dict) and PLACEHOLDER in models and len(models) > 1:
            below = models.pop(PLACEHOLDER)
            name = next(iter(models))
            models[name] = merged(below or {}, models[name])


@dataclass(frozen=True, slots=True)
class _Source:
    path: tuple[str, ...]
    is_moved: bool


class _Expander:
    def __init__(self, data: JsonObject) -> None:
        self.data = data
        self.taken: list[tuple[str, ...]] = []
        self._underway: list[tuple[str, ...]] = []

    def expand(self, node: object, where: str) -> Any:
        if isinstance(node, list):
            return [self.expand(value, f"{where}[{index}]") for index, value in enumerate(node)]
        if isinstance(node, dict):
            return self._expand_mapping(node, where)
        source = _source_in_text(node)
        return node if source is None else self._fetch(source, where)

    def _expand_mapping(self, node: dict[Any, Any], where: str) -> object:
        unwanted = _names(node.get(DELETE))
        source = _source_in_mapping(node, where)
        own = {
            key: self.expand(value, f"{where}.{key}")
            for key, value in node.items()
            if key not in (INHERIT, COPY, DELETE) and key not in unwanted
        }
        below = {} if source is None else self._fetch(source, where)
        if below == UNSET:
            return UNSET
        if not isinstance(below, dict):
            raise GymConfigError(
                f"{where}: takes from {'.'.join(source.path) if source else ''}, which is not a mapping"
            )
        unknown = [key for key in unwanted if key not in node and key not in below]
        # without a source it only makes sure that keys are absent, as files that stand alone do
        if unknown and source is not None:
            near = did_you_mean(unknown[0], [*node, *below])
            raise GymConfigError(f"{where}.{DELETE}: there is no {unknown[0]!r} to delete{near}")
        return {key: value for key, value in merged(below, own).items() if key not in unwanted}

    def _fetch(self, source: _Source, where: str) -> Any:
        if source.path in self._underway:
            circle = " -> ".join(".".join(path) for path in (*self._underway, source.path))
            raise GymConfigError(f"{where}: inherits from itself ({circle})")
        self._underway.append(source.path)
        try:
            found = self._find(source.path, where)
            expanded = self.expand(found, ".".join(source.path))
        finally:
            self._underway.pop()
        if source.is_moved:
            self.taken.append(source.path)
        return copy.deepcopy(expanded)

    def _find(self, path: tuple[str, ...], where: str) -> object:
        node: Any = self.data
        for depth, part in enumerate(path):
            if depth:
                node = self._with_source(node, ".".join(path[:depth]))
            if node == UNSET:
                return UNSET
            if not isinstance(node, dict) or part not in node:
                known = node if isinstance(node, dict) else ()
                raise GymConfigError(
                    f"{where}: inherits from {'.'.join(path)}, which is not in the merged config: no {part!r} in "
                    f"{'.'.join(path[:depth]) or 'its top level'}{did_you_mean(part, known)}"
                )
            node = node[part]
        return node

    def _with_source(self, node: object, where: str) -> object:
        """Applies a node's source: a part on the way may get the searched key from elsewhere."""
        has_source = isinstance(node, dict) and (INHERIT in node or COPY in node)
        return self.expand(node, where) if has_source or _source_in_text(node) else node


def _source_in_text(node: object) -> _Source | None:
    if isinstance(node, str):
        for start, name in _IN_TEXT.items():
            if node.startswith(start) and node.endswith("}"):
                return _Source(tuple(node.removeprefix(start)[:-1].strip().split(".")), name == INHERIT)
    return None


def _source_in_mapping(node: dict[Any, Any], where: str) -> _Source | None:
    named = [name for name in (INHERIT, COPY) if name in node]
    if len(named) > 1:
        raise GymConfigError(f"{where} has both {INHERIT} and {COPY}; choose one")
    if not named:
        return None
    if not isinstance(node[named[0]], str):
        raise GymConfigError(
            f"{where}.{named[0]}: should be the dotted path of another part, but is {node[named[0]]!r}"
        )
    return _Source(tuple(node[named[0]].strip().split(".")), named[0] == INHERIT)


def _names(value: Any) -> list[str]:
    if value is None:
        return []
    return [one.strip() for one in (value.split(",") if isinstance(value, str) else map(str, value))]


def _remove(data: JsonObject, path: tuple[str, ...]) -> None:
    node: Any = data
    for part in path[:-1]:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(path[-1], None)
