"""The `config` of an entry `verifiers:NAME`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from palestra.environments.errors import UnknownEnvironment
from palestra.util.json_types import JsonObject

if TYPE_CHECKING:
    from palestra.config.environment_entries import EnvironmentEntry

VERIFIERS = "verifiers:"


class VerifiersSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    args: JsonObject = {}
    """Arguments of `load_environment` (v0), or settings of the taskset (v1)."""
    eval_args: JsonObject | None = None
    """Arguments that differ for evaluation, such as a split. None: tasks that the environment itself keeps for
    evaluation, or else one in 8 of its tasks."""
    env: JsonObject = {}
    """The environment of a v1 taskset and the agents that play it: `id`, and settings of each agent by its name."""
    python: str = sys.executable
    """The Python that has verifiers and the environment's package."""
    limit: int = 10_000
    """Most tasks that are taken; an infinite taskset needs one."""


def is_verifiers(name: str) -> bool:
    return name.startswith(VERIFIERS)


def settings_of(entry: EnvironmentEntry) -> VerifiersSettings:
    """Raises UnknownEnvironment, with the key that is wrong."""
    try:
        return msgspec.convert(entry.config, VerifiersSettings)
    except msgspec.ValidationError as error:
        raise UnknownEnvironment(f"environment {entry.name!r}: config: {error}") from None
