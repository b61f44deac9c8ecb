"""Makes a validated config from files and overrides, and writes it as JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from palestra.config.errors import ConfigError
from palestra.config.explain import explain, key_text
from palestra.config.redaction import redact
from palestra.util.json_types import JsonObject

M = TypeVar("M", bound=BaseModel)
Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Override:
    """One value from the command line. `key` is dotted: `limits.max_models`, `models.0.device`, `models.*.device`."""

    key: str
    value: Any
    source: str
    """What the user typed, for messages: the flag, or the whole `key=value`."""

    @classmethod
    def parse(cls, text: str) -> Override:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError([f"{text!r}: an override is key=value, as in port=8001"])
        return cls(key, parse_yaml(value, text), text)


@dataclass(slots=True)
class Layers:
    """The values merged so far, and where they came from."""

    data: JsonObject = field(default_factory=dict)
    sources: dict[Key, str] = field(default_factory=dict)
    """For every key that was set: the file or flag that set it last."""

    def merge(self, content: JsonObject, source: str, at: Key = ()) -> None:
        """Merges maps key by key; any other value, lists included, replaces the old one."""
        target = self._get(at)
        for name, value in content.items():
            key = (*at, name)
            if isinstance(value, dict) and isinstance(target.get(name), dict):
                self.merge(value, source, key)
            else:
                target[name] = value
                self._wrote(key, value, source)

    def override(self, override: Override) -> None:
        parts = re.sub(r"\[(\d+|\*)\]", r".\1", override.key).split(".")
        for key in self._spread(parts, (), override):
            *parent, last = key
            target = self._get(tuple(parent))
            old = target.get(last) if isinstance(target, dict) else target[last]
            if isinstance(override.value, dict) and isinstance(old, dict):
                self.merge(override.value, override.source, key)
            else:
                target[last] = override.value
                self._wrote(key, override.value, override.source)

    def _spread(self, parts: list[str], at: Key, override: Override) -> list[Key]:
        """The keys that an override sets: one, or with `*` one for each entry of a list. Missing maps are made."""
        if not parts:
            return [at]
        node, (part, *rest) = self._get(at), parts
        if isinstance(node, list):
            indices = range(len(node)) if part == "*" else [int(part)] if part.isdecimal() else []
            if (part != "*" and not indices) or any(index >= len(node) for index in indices):
                have = f"has {len(node)} entries, counted from 0"
                raise ConfigError([f"no {part!r} in {key_text(at)}, which {have} ({override.source})"])
            return [key for index in indices for key in self._spread(rest, (*at, index), override)]
        if not isinstance(node, dict):
            raise ConfigError([f"{key_text(at)} is {node!r}, so no key can be set inside it ({override.source})"])
        if rest and node.get(part) is None:
            if rest[0] == "*":
                return []  # a list that was not written has no entries
            node[part] = {}
            self.sources[(*at, part)] = override.source
        return self._spread(rest, (*at, part), override)

    def _get(self, key: Key) -> Any:
        node: Any = self.data
        for part in key:
            node = node[part]
        return node

    def _wrote(self, key: Key, value: object, source: str) -> None:
        for old in [known for known in self.sources if known[: len(key)] == key]:
            del self.sources[old]
        self._note(key, value, source)

    def _note(self, key: Key, value: object, source: str) -> None:
        self.sources[key] = source
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, inner in entries:
            self._note((*key, name), inner, source)


def load_config(model: type[M], files: Iterable[str | Path] = (), overrides: Iterable[str | Override] = ()) -> M:
    """Merges files in their order, then overrides in theirs; later values win. Raises ConfigError."""
    return validate(model, merge_layers(Layers(), files, overrides))


def merge_layers(layers: Layers, files: Iterable[str | Path], overrides: Iterable[str | Override]) -> Layers:
    for file in files:
        layers.merge(read_file(Path(file)), str(file))
    for override in overrides:
        layers.override(Override.parse(override) if isinstance(override, str) else override)
    return layers


def validate(model: type[M], layers: Layers) -> M:
    try:
        return model.model_validate(layers.data)
    except ValidationError as error:
        raise ConfigError(explain(error, model, layers.data, layers.sources)) from None


def read_file(file: Path) -> JsonObject:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise ConfigError([f"{file}: cannot be read as a config ({why})"]) from None
    content = parse_yaml(text, str(file))
    if content is not None and not isinstance(content, dict):
        raise ConfigError([f"{file}: should hold keys and values, but holds a {type(content).__name__}"])
    return content or {}


def dump_config(config: BaseModel) -> str:
    """The config as JSON, to be shown or kept beside a run; passwords and keys are blacked out."""
    return redact(config.model_dump_json(indent=2))


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: 2e-5 is a number, a date stays text, a key written twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        if twice := [name for name, count in names.items() if count > 1]:
            raise yaml.MarkedYAMLError(problem=f"{min(twice)!r} is written twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """Parses YAML, and therefore JSON too."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        place = f" in line {error.problem_mark.line + 1}" if error.problem_mark and "\n" in text else ""
        raise ConfigError([f"{source}: not valid YAML{place} ({error.problem})"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{source}: not valid YAML ({' '.join(str(error).split())})"]) from None
