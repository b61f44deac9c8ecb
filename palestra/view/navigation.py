"""The links of the navigation at the head of every page."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import Request
from msgspec import Struct

from palestra.view.access import own_path

RUN_PATHS = ("", "runs", "compare")
LINKS = (("Runs", ""), ("Sweeps", "sweeps"), ("Platform", "platform"), ("Gym", "gym"))
"""Title and path of those that need no server."""


class NavLink(Struct, frozen=True):
    title: str
    path: str
    is_here: bool


def mark_here(request: Request, links: Iterable[tuple[str, str]]) -> list[NavLink]:
    """The links, with the one marked that leads to the page of a request."""
    here = own_path(request.scope).split("/")[1]
    return [NavLink(title, path, here == path or (not path and here in RUN_PATHS)) for title, path in links]
