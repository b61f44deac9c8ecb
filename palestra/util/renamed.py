"""What was renamed: Python names, which work for one version with a warning, and keys of configs.

A new config with an old key is refused by name (`config/explain`). What was saved with old keys opens: run folders,
sweeps and snapshots are read by `with_new_keys`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

RENAMED_KEYS = {
    "models.*.strands": "gradient_shards",
    "models.*.allow_other_strands": "allow_shard_mismatch",
    "models.*.allow_other_tensor": "allow_tensor_mismatch",
    "models.*.allow_other_weights": "allow_weights_mismatch",
    "difficulty.memory": "ema_decay",
    "difficulty.recheck": "recheck_every",
    "difficulty.replay_most": "replay_buffer_size",
    "judges.*.at_bound": "on_limit",
}
"""Old keys of configs, from the top, with what their last part is called now. `*`: any name, or any entry of a list."""


def new_name(key: Sequence[str | int]) -> str | None:
    """What the last part of a config's key is called now; None if it was not renamed."""
    for old, new in RENAMED_KEYS.items():
        parts = old.split(".")
        if len(parts) == len(key) and all(one in ("*", part) for one, part in zip(parts, key, strict=True)):
            return new
    return None


def with_new_keys(saved: Any, at: Sequence[str | int] = ()) -> Any:
    """A copy of a saved config with the keys of today. `at`: its key, if it is a part of one."""
    if isinstance(saved, list):
        return [with_new_keys(value, (*at, index)) for index, value in enumerate(saved)]
    if not isinstance(saved, dict):
        return saved
    return {new_name((*at, name)) or name: with_new_keys(value, (*at, name)) for name, value in saved.items()}


def with_new_dotted_keys(saved: dict[str, Any]) -> dict[str, Any]:
    """A copy of saved settings by dotted keys, as a sweep has them, with the keys of today."""
    return {_new_dotted(key): value for key, value in saved.items()}


def _new_dotted(key: str) -> str:
    *parents, last = key.split(".")
    return ".".join([*parents, new_name((*parents, last)) or last])


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
