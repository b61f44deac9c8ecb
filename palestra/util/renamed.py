"""Old names of things that were renamed: they work for one version, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module


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
