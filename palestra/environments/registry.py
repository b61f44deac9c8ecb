"""Environments by name.

A name is a registered one, or `package.module:Class`, or that of an installed package: `skyrl_gym:ID`,
`reasoning_gym:GENERATOR`, `textarena:GAME`.
The base class of an environment does not matter, only `step` and `init`.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from palestra.environments.errors import UnknownEnvironment
from palestra.environments.named_imports import NamedImportError, import_named
from palestra.util.json_types import JsonMapping, JsonObject
from palestra.util.suggest import nearest

SKYRL = "skyrl_gym:"
REASONING_GYM, TEXTARENA = "reasoning_gym:", "textarena:"


class EnvConfig(JsonObject):
    """`env_config` as environments read it: some by key, some by attribute, including nested mappings."""

    def __init__(self, content: JsonMapping | None = None) -> None:
        found = (content or {}).items()
        super().__init__({key: EnvConfig(value) if isinstance(value, Mapping) else value for key, value in found})

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        hint = "" if name.startswith("_") else f"; to set it: environments[].config.{name}"
        raise AttributeError(f"env_config has no {name!r}{hint}")


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """An entry of the registry: how an environment is made."""

    id: str
    entry_point: Callable[..., Any] | str
    """A callable that makes the environment, or its name: `package.module:Class`."""
    kwargs: JsonMapping = field(default_factory=dict)

    def load(self) -> Callable[..., Any]:
        """Returns the class, or another callable. Raises UnknownEnvironment if there is none."""
        return self.entry_point if callable(self.entry_point) else _import(self.entry_point, self.id)

    def make(self, **kwargs: object) -> object:
        creator = self.load()
        arguments = {**copy.deepcopy(dict(self.kwargs)), **kwargs}
        try:
            env = creator(**arguments)
        except TypeError as error:
            given = ", ".join(arguments)
            raise TypeError(f"environment {self.id!r}, made with the arguments {given}: {error}") from error
        for name in ("init", "step"):
            if not hasattr(env, name) and not hasattr(env, f"{name}_async"):
                raise TypeError(f"environment {self.id!r} is a {type(env).__name__}, which has no {name}")
        if hasattr(env, "__dict__"):
            env.spec = self
        return env


registry: dict[str, EnvSpec] = {}


def register(id: str, entry_point: Callable[..., Any] | str, kwargs: JsonMapping | None = None) -> None:  # noqa: A002
    """Registers an environment as `id`, made with `kwargs` in addition to `env_config` and `extras`."""
    if id in registry:
        raise ValueError(f"an environment {id!r} is already registered; to replace it: deregister({id!r})")
    if not id or ":" in id:
        raise ValueError(f"an environment cannot be called {id!r}, since a name with ':' means package.module:Class")
    if not callable(entry_point) and (not isinstance(entry_point, str) or ":" not in entry_point):
        raise ValueError(
            f"the entry point of {id!r} must be a class, or text like package.module:Class, not {entry_point!r}"
        )
    registry[id] = EnvSpec(id, entry_point, dict(kwargs or {}))


def deregister(id: str) -> None:  # noqa: A002
    """Removes an environment from the registry. Raises UnknownEnvironment."""
    if id not in registry:
        raise _unknown(id)
    del registry[id]


def spec(id: str) -> EnvSpec:  # noqa: A002
    """Returns the entry. Raises UnknownEnvironment with the nearest name."""
    if id in registry:
        return registry[id]
    if id.startswith(SKYRL):
        return _skyrl_spec(id)
    if id.startswith(REASONING_GYM):
        from palestra.environments.reasoning_gym import environment

        return EnvSpec(id, environment(id.removeprefix(REASONING_GYM)))
    if id.startswith(TEXTARENA):
        from palestra.environments.textarena import environment

        return EnvSpec(id, environment(id.removeprefix(TEXTARENA)))
    if ":" in id:
        return EnvSpec(id, id)
    raise _unknown(id)


def make(id: str, **kwargs: object) -> object:  # noqa: A002
    """Makes an environment; most take `env_config` and `extras`."""
    return spec(id).make(**kwargs)


def names() -> list[str]:
    """Returns all names that can be made without naming a class: registered ones, and those of an installed
    skyrl-gym."""
    try:
        theirs = importlib.import_module("skyrl_gym").registry
    except ModuleNotFoundError:
        theirs = []
    return [*sorted(registry), *(SKYRL + name for name in sorted(theirs))]


def _skyrl_spec(env_id: str) -> EnvSpec:
    try:
        known = importlib.import_module("skyrl_gym").registry
    except ModuleNotFoundError as error:
        raise UnknownEnvironment(
            f"environment {env_id!r} needs {error.name}; to install: pip install skyrl-gym"
        ) from None
    found = known.get(env_id.removeprefix(SKYRL))
    if found is None:
        raise _unknown(env_id)
    return EnvSpec(env_id, found.entry_point, found.kwargs)


def _import(path: str, env_id: str) -> Callable[..., Any]:
    try:
        return import_named(path, "class")
    except NamedImportError as error:
        raise UnknownEnvironment(f"environment {env_id!r}: {error}") from error


def _unknown(env_id: str) -> UnknownEnvironment:
    near = _did_you_mean(env_id, names())
    return UnknownEnvironment(f"unknown environment {env_id!r}{near}\n  see all: palestra env list")


def _did_you_mean(name: str, known: list[str]) -> str:
    near = next((one for one in known if one.endswith(f":{name}")), None) or nearest(name, known)
    return f"\n  did you mean: {near}?" if near else ""
