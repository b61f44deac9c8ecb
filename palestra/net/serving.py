"""Makes every HTTP server of this project."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from palestra.net.bounded_http import HttpBounds, bounded_http

__all__ = ["HttpBounds", "HttpServer"]


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its caller."""

    def __init__(self, app: Any, *, bounds: HttpBounds | None = None, **settings: Any) -> None:
        """`settings`: those of `uvicorn.Config`."""
        http = bounded_http(bounds or HttpBounds())
        super().__init__(uvicorn.Config(app, http=http, access_log=False, **settings))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
