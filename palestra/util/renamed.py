"""Renamed things: Python names, which work for one version with a warning, and keys of configs.

A new config with an old key is refused by name (`config/explain`). What was saved with old keys opens: run folders,
sweeps and snapshots are read by `with_new_keys`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from importlib import import_module
from typing import Any

Key = tuple[str | int, ...]

RENAMED_KEYS = {
    "models.*.strands": "models.*.gradient_shards",
    "models.*.allow_other_strands": "models.*.allow_shard_mismatch",
    "models.*.allow_other_tensor": "models.*.allow_tensor_mismatch",
    "models.*.allow_other_weights": "models.*.allow_weights_mismatch",
    "difficulty.memory": "difficulty.ema_decay",
    "difficulty.recheck": "difficulty.recheck_every",
    "difficulty.replay_most": "difficulty.replay_buffer_size",
    "judges.*.at_bound": "judges.*.on_limit",
    "data.overlong": "rollout.endings.length",
}
"""Old keys of configs, from the top, with what they are called now. `*`: any name, or any entry of a list."""
AGENT_WORTHS = {"verify": "grade", "error": "mask"}
RENAMED_VALUES = {
    "data.overlong": {"keep": "grade"},
    "agent.on_timeout": AGENT_WORTHS,
    "agent.on_crash": AGENT_WORTHS,
    "agent.on_refusal": AGENT_WORTHS,
    "agent.on_empty_patch": AGENT_WORTHS,
}
"""Renamed values, by the old keys."""
OLD_KEYS = {old: old.split(".") for old in (*RENAMED_KEYS, *RENAMED_VALUES)}


def new_key(key: Key) -> Key | None:
    """Returns the new name of a config's key; None if it was not renamed."""
    return None if (old := _changed(key)) not in RENAMED_KEYS else _filled(old, key)


def _changed(key: Key) -> str | None:
    """The entry of the tables for a config's key."""
    for old, parts in OLD_KEYS.items():
        if len(parts) == len(key) and all(one in ("*", part) for one, part in zip(parts, key, strict=True)):
            return old
    return None


def _filled(old: str, key: Key) -> Key:
    """Returns the new name of `old`, with the parts of `key` for each `*`."""
    names = iter([part for one, part in zip(old.split("."), key, strict=True) if one == "*"])
    return tuple(next(names) if part == "*" else part for part in RENAMED_KEYS.get(old, old).split("."))


def with_new_keys(saved: Any, at: Key = ()) -> Any:
    """A copy of a saved config with the keys of today. `at`: its key, if it is a part of one."""
    changed = deepcopy(saved)
    for key, value in _items(saved, at):
        if (old := _changed(key)) is not None:
            *parents, last = key[len(at) :]
            del _inside(changed, parents)[last]
            *parents, last = _filled(old, key)[len(at) :]
            _inside(changed, parents)[last] = _new_value(old, value)
    return changed


def with_new_dotted_keys(saved: dict[str, Any]) -> dict[str, Any]:
    """A copy of saved settings by dotted keys, as a sweep has them, with the keys of today."""
    return dict(_new_dotted(key, value) for key, value in saved.items())


def _new_dotted(key: str, value: Any) -> tuple[str, Any]:
    parts = tuple(key.split("."))
    if (old := _changed(parts)) is None:
        return key, value
    new = ".".join(map(str, _filled(old, parts)))
    return new, [_new_value(old, one) for one in value] if isinstance(value, list) else _new_value(old, value)


def _new_value(old: str, value: Any) -> Any:
    names = RENAMED_VALUES.get(old, {})
    return names.get(value, value) if isinstance(value, str) else value


def _items(saved: Any, at: Key) -> Iterator[tuple[Key, Any]]:
    """Everything in a config by its key."""
    if isinstance(saved, dict | list):
        for name, value in saved.items() if isinstance(saved, dict) else enumerate(saved):
            yield (*at, name), value
            yield from _items(value, (*at, name))


def _inside(config: Any, key: Sequence[str | int]) -> Any:
    """The part of a config with this key, made where it is missing."""
    for part in key:
        config = config.setdefault(part, {}) if isinstance(config, dict) else config[part]
    return config


def renamed(module: str, **names: str) -> Callable[[str], object]:
    """A module's `__getattr__`. `names` has each old name with its new one: `Name`, or `other.module:Name`."""

    def get(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, new = names[name].rpartition(":")
        home = place or module
        warnings.warn(f"{module}.{name} is now {home}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(home), new)

    return get
