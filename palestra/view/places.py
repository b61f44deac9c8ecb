"""The pages that the head of every page leads to."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import Request
from msgspec import Struct

from palestra.view.access import own_path

RUN_PATHS = ("", "runs", "compare")
PLACES = (("Runs", ""), ("Sweeps", "sweeps"), ("Platform", "platform"), ("Gym", "gym"))
"""Title and path of those that need no server."""


class Place(Struct, frozen=True):
    title: str
    path: str
    is_here: bool


def mark_here(request: Request, places: Iterable[tuple[str, str]]) -> list[Place]:
    """The places with the one that a request is for."""
    here = own_path(request.scope).split("/")[1]
    return [Place(title, path, here == path or (not path and here in RUN_PATHS)) for title, path in places]
