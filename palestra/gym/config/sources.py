"""The sources of a gym's config: files with their includes, env.yaml, given values, the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from palestra.config.errors import ConfigError
from palestra.config.load import Layers, Override, read_file
from palestra.gym.config import merging
from palestra.gym.config.directives import COPY, INHERIT
from palestra.gym.config.interpolation import references
from palestra.gym.config.merging import dotted, without_unset
from palestra.gym.config.settings import CONFIG_PATHS, KNOWN
from palestra.gym.config.values import GymOverride, OverrideKind
from palestra.gym.errors import GymConfigError
from palestra.gym.records import ServerKind
from palestra.gym.search_folders import did_you_mean, find_below, search_roots
from palestra.util.json_types import JsonObject

ENV_FILE = "env.yaml"
NO_MODEL = {
    "policy_base_url": "",
    "policy_api_key": "",
    "policy_model_name": "",
    "policy_model": {"responses_api_models": {"dummy_model": {"entrypoint": "app.py"}}},
}


@dataclass(frozen=True, slots=True)
class GymSources:
    files: Sequence[str] = ()
    """Paths below the roots, or absolute; later ones take precedence. They come after those of `config_paths`."""
    overrides: Sequence[str] = ()
    """Overrides as typed on the command line, in Hydra's grammar."""
    initial: JsonObject = field(default_factory=dict)
    """Values from a program; they take precedence over files, and the command line over them."""
    roots: Sequence[Path] = ()
    """Folders that are searched first; those of the environment, the current folder and ours follow."""
    env_file: Path | None = None
    """A file to use instead of the first env.yaml below the roots."""
    is_model_needed: bool = True
    """False for commands that only read data: `policy_*` and `policy_model` need not be given."""


class MergedSources:
    """All sources, merged."""

    def __init__(self, sources: GymSources, report: Callable[[str], None]) -> None:
        self.roots = search_roots(sources.roots)
        self.tell = report
        self._layers = Layers()
        self._overrides = [GymOverride.parse(text) for text in sources.overrides]
        env_file = sources.env_file or find_below(self.roots, ENV_FILE)
        env = {} if env_file is None else _read(env_file)
        initial = sources.initial if sources.is_model_needed else merging.merged(NO_MODEL, sources.initial)
        self.files = [*self._config_paths(env, initial), *sources.files]
        self._add_files()
        self._add(env, str(env_file))
        self._add(initial, "the values given")
        self._add_overrides()
        self.data[CONFIG_PATHS] = self.files

    @property
    def data(self) -> JsonObject:
        return self._layers.data

    def source_of(self, path: merging.Path) -> str:
        """Returns which source set a value, or the nearest value around it, last."""
        known = (self._layers.sources.get(path[:length]) for length in range(len(path), 0, -1))
        return next((source for source in known if source is not None), "the config")

    def _config_paths(self, env: JsonObject, initial: JsonObject) -> list[str]:
        """Returns the files of the source with the highest precedence that names any."""
        typed = [one.value for one in self._overrides if one.key == CONFIG_PATHS and one.how != OverrideKind.DELETE]
        named = (*reversed(typed), initial.get(CONFIG_PATHS), env.get(CONFIG_PATHS))
        return _paths(next((value for value in named if value is not None), []), CONFIG_PATHS)

    def _add_files(self) -> None:
        listed = [self._find(name, CONFIG_PATHS) for name in self.files]
        for index, path in enumerate(listed):
            if path in listed[:index]:
                self.tell(f"{self.files[index]} is listed twice; the first entry is used")
        for path in dict.fromkeys(listed):
            self._add_file(path, listed)

    def _add_file(self, path: Path, listed: list[Path]) -> None:
        """Adds a file; those that it includes have lower precedence. A file that is already listed keeps its place."""
        content = _read(path)
        for name in _paths(content.pop(CONFIG_PATHS, None) or [], f"{CONFIG_PATHS} in {path}"):
            included = self._find(name, f"{CONFIG_PATHS} in {path}")
            if included in listed:
                self.tell(f"{name}, included by {path}, is already in the config; it is not read again")
                continue
            listed.append(included)
            self.files.append(name)
            self._add_file(included, listed)
        self._add(content, str(path))

    def _find(self, name: str, where: str) -> Path:
        found = find_below(self.roots, name)
        if found is not None:
            return found.resolve()
        looked = [Path(name)] if Path(name).is_absolute() else [root / name for root in self.roots]
        neighbours = [str(one.relative_to(path.parent)) for path in looked for one in _yaml_beside(path)]
        near = did_you_mean(Path(name).name, neighbours)
        places = "".join(f"\n  not at {path}" for path in looked)
        raise GymConfigError(f"{where}: there is no {name!r}{places}{near}")

    def _add(self, content: JsonObject, source: str) -> None:
        rest = {key: value for key, value in content.items() if key != CONFIG_PATHS}
        self._layers.merge(without_unset(rest, self.data), source)

    def _add_overrides(self) -> None:
        for one in self._overrides:
            if one.key == CONFIG_PATHS:
                continue
            try:
                if one.how == OverrideKind.DELETE:
                    self._delete(one)
                    continue
                if one.how == OverrideKind.CHANGE:
                    self._check_known(one)
                self._layers.override(Override(one.key, one.value, one.text))
            except ConfigError as error:
                raise GymConfigError(str(error)) from None

    def _delete(self, one: GymOverride) -> None:
        *parents, last = one.key.split(".")
        node: Any = self.data
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last not in node:
            known = node if isinstance(node, dict) else ()
            raise GymConfigError(f"{one.text!r}: there is no {one.key} to delete{did_you_mean(last, known)}")
        del node[last]

    def _check_known(self, one: GymOverride) -> None:
        """Checks that `key=value` changes a key that exists, down to the implementation; below that, fields have
        defaults that no file mentions."""
        parts = one.key.split(".")
        known = {*KNOWN, *self.data, *references(self.data)}
        if parts[0] not in known:
            hint = f"{did_you_mean(parts[0], known)}\n  to add it anyway: +{one.text}"
            raise GymConfigError(f"{one.text!r}: no file sets or uses {parts[0]!r}{hint}")
        node: Any = self.data.get(parts[0])
        if not isinstance(node, dict) or all(kind not in node for kind in ServerKind):
            return
        for depth, part in enumerate(parts[1:3], start=1):
            if not isinstance(node, dict) or INHERIT in node or COPY in node:
                return
            if part not in node:
                where = dotted(tuple(parts[:depth]))
                raise GymConfigError(f"{one.text!r}: there is no {part!r} in {where}{did_you_mean(part, node)}")
            node = node[part]


def _read(path: Path) -> JsonObject:
    try:
        return read_file(path)
    except ConfigError as error:
        raise GymConfigError(str(error)) from None


def _paths(value: object, where: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise GymConfigError(f"{where}: should be a list of files, as in [a.yaml,b.yaml], but is {value!r}")
    return list(value)


def _yaml_beside(path: Path) -> list[Path]:
    try:
        return list(path.parent.glob("*.yaml"))
    except OSError:
        return []
