"""Episodes: played anywhere, delivered exactly once. `board` is the state machine of the server, `client` the library
for players and trainers; neither imports the other. The names that `client` exports can be imported from here."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palestra.episodes.client import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Imports the client library on first use: the server does not need it. Modules are found without this."""
    if name == "__all__" or not (name.startswith("__") or find_spec(f"{__name__}.{name}")):
        client = import_module(f"{__name__}.client")
        if name in ("__all__", *client.__all__):
            return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
