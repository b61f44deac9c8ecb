"""A Fleet task, whichever spelling its file uses."""

from __future__ import annotations

import msgspec

from palestra.environments.platform.golden import ANSWER_TOOL
from palestra.util.json_types import JsonMapping, JsonObject

SPELLINGS: dict[str, tuple[str, ...]] = {
    "task_key": ("key", "task_key"),
    "prompt": ("prompt",),
    "env_key": ("env_key", "env_id"),
    "env_version": ("env_version", "version"),
    "data_key": ("data_key", "data_id"),
    "data_version": ("data_version",),
    "verifier_code": ("verifier_code", "verifier_func"),
    "task_modality": ("task_modality",),
    "env_variables": ("env_variables",),
    "max_turns": ("max_turns",),
}
"""Our name, then those of the files; the first that has a value counts."""


class FleetTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task in Fleet's terms: a prompt, an app with its data, and a verifier."""

    task_key: str
    prompt: str
    env_key: str
    env_version: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    verifier_code: str | None = None
    task_modality: str = "tool_use"
    env_variables: JsonObject = {}
    max_turns: int | None = None
    """The task's own limit; a dataset or a config may set another."""
    raw: JsonObject = {}
    """The original row, which a platform may need."""

    @classmethod
    def of(cls, row: JsonMapping, where: str = "task") -> FleetTask:
        """Parses a row. Raises ValueError."""
        found = {name: value for name, spellings in SPELLINGS.items() if (value := _first(row, spellings)) is not None}
        for name in ("task_key", "prompt", "env_key"):
            if name not in found:
                raise ValueError(f"{where} has no {' or '.join(map(repr, SPELLINGS[name]))}")
        try:
            return msgspec.convert({**found, "raw": dict(row)}, cls)
        except msgspec.ValidationError as e:
            raise ValueError(f"{where}: {e}") from None

    @property
    def is_answered(self) -> bool:
        """Whether it requires an answer in addition to the changes."""
        return ANSWER_TOOL in self.prompt


def _first(row: JsonMapping, names: tuple[str, ...]) -> object:
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)
