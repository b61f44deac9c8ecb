"""Fields of a config.json, read with their defaults; what is missing or odd is named with its file."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from palestra.model.errors import UnsupportedModel

Config = dict[str, Any]
OUTER_FIELDS = ("tie_word_embeddings", "dtype", "torch_dtype", "compute_dtype", "eos_token_id", "quantization_config")
"""Fields that stand beside a nested text model, or inside of it."""


class ConfigFields:
    def __init__(self, config: Config, source: str, defaults: Config):
        self._config, self.source, self._defaults = config, source, defaults

    @classmethod
    def of_text(cls, config: Config, source: str, defaults: Config) -> ConfigFields:
        """The text model's: of the whole file, or of its `text_config` where the model is wrapped."""
        inner = config.get("text_config")
        if inner is None:
            return cls(config, source, defaults)
        if not isinstance(inner, dict):
            raise UnsupportedModel(f"{source}: field 'text_config' must be an object, found {inner!r}")
        outer = {name: config[name] for name in OUTER_FIELDS if config.get(name) is not None}
        return cls(inner | outer, source, defaults)

    def get(self, name: str, default: Any = None) -> Any:
        """The file's value; without one the family's default, then this one."""
        if name in self._config:
            return self._config[name]
        return self._defaults.get(name, default)

    def has(self, name: str) -> bool:
        """Whether the file itself says it."""
        return self._config.get(name) is not None

    def flag(self, name: str) -> bool:
        return bool(self.get(name))

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._config.get(name)
        if value is None:
            value = self._defaults.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise UnsupportedModel(f"{self.source}: field {name!r} must be a positive whole number, found {value!r}")
        return value

    def count(self, name: str) -> int:
        """Returns a non-negative integer; 0 if the field is missing."""
        value = self.get(name) or 0
        if not isinstance(value, int) or value < 0:
            raise UnsupportedModel(f"{self.source}: field {name!r} must be a whole number, found {value!r}")
        return value

    def one_of(self, name: str, *others: str) -> int:
        """A field that has several spellings; the default stands under the first."""
        given = [spelling for spelling in (name, *others) if self._config.get(spelling) is not None]
        for other in given[1:]:
            if self._config[given[0]] != self._config[other]:
                first, second = (f"{n} ({self._config[n]!r})" for n in (given[0], other))
                raise UnsupportedModel(f"{self.source}: {first} and {second} contradict")
        return self.integer(given[0] if given else name)

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float):
            raise UnsupportedModel(f"{self.source}: field {name!r} must be a number, found {value!r}")
        return float(value)

    def layer_types(self, n: int, known: Collection[str], made: list[str]) -> list[str]:
        """The kind of each layer; `made` where the file does not say it."""
        kinds = self.get("layer_types")
        if kinds is None:
            return made
        if not isinstance(kinds, list) or len(kinds) != n:
            raise UnsupportedModel(f"{self.source}: layer_types, where given, must name all {n} layers")
        for kind in kinds:
            if kind not in known:
                raise UnsupportedModel(
                    f"{self.source}: layer_types names {kind!r}; supported in this family: {', '.join(known)}"
                )
        return kinds
