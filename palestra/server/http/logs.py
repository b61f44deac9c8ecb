"""The server's log: lines on stderr, as text or JSON, that never contain a key."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, TextIO

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.types import EventDict, Processor, WrappedLogger

from palestra.config.redaction import redact

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Observe = Callable[[str, int, float], None]
"""Route, status, seconds: `Metrics.request`."""

current_request: ContextVar[Scope | None] = ContextVar("request", default=None)
"""Lines that are logged during a request have its id."""
_REQUEST_ID = "palestra.request_id"

# These statuses are normal on a busy server, and not worth a line at info.
ROUTINE_STATUSES = {408, 429}


def set_up_logs(level: str = "info", *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Sets up logging for this process: our own lines and those of libraries. If called again, it replaces what it set
    up before."""
    out: TextIO = stream or sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        _add_request_id,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    handler = _Handler(out)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[ProcessorFormatter.remove_processors_meta, *_render(as_json, out), _redact_line],
        )
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    # Libraries log much at info, so theirs is shown at debug only.
    root.setLevel(logging.INFO if number <= logging.DEBUG else max(number, logging.WARNING))
    logging.getLogger("palestra").setLevel(number)
    logging.getLogger("uvicorn.access").disabled = True


def request_id() -> str:
    """Returns the id of the request that is being answered; empty outside of one. It is made when first needed: most
    requests are short, and nothing is logged about them."""
    scope = current_request.get()
    if scope is None:
        return ""
    found = scope.get(_REQUEST_ID)
    if found is None:
        found = scope[_REQUEST_ID] = os.urandom(8).hex()
    return found


def _add_request_id(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    if made := request_id():
        line.setdefault("request_id", made)
    return line


class _Handler(logging.StreamHandler[TextIO]):
    """A class of our own, so that setting up again finds it."""


def _render(as_json: bool, stream: TextIO) -> list[Processor]:
    if as_json:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    # Plain tracebacks: rich ones show local variables, and break lines even in the middle of a key.
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain, pad_event_to=0)]


def _redact_line(_logger: WrappedLogger, _method: str, line: EventDict | str) -> str:
    """Redacts the finished line, as the last processor: whatever field, library or traceback contains a key."""
    return redact(str(line))


def _template(scope: Scope) -> str:
    """Returns the route's template. Not the path: ids in paths are many, and a signed one grants access. A route of
    FastAPI does not know the prefix with which it was included, but the scope does."""
    included = scope.get("fastapi", {}).get("effective_route_context")
    return getattr(included or scope.get("route"), "path", "unknown")


class RequestLog:
    """ASGI middleware: one line and one observation per request, and its id on every line logged meanwhile."""

    def __init__(self, app: App, observe: Observe | None = None) -> None:
        self.app, self.observe = app, observe
        # Bound once, with the configured level: a line that is not logged then costs nothing.
        self.log = structlog.get_logger("palestra.request").bind()
        self._tells_all = self.log.is_enabled_for(logging.DEBUG)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, started = 500, time.perf_counter()  # 500: what the client gets if the app raises

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = current_request.set(scope)
        try:
            return await self.app(scope, receive, watch)
        finally:
            self._over(scope, status, time.perf_counter() - started)
            current_request.reset(token)

    def _over(self, scope: Scope, status: int, seconds: float) -> None:
        route = _template(scope)
        if self.observe:
            self.observe(route, status, seconds)
        is_routine = status < 400 or status in ROUTINE_STATUSES
        if self._tells_all or not is_routine:
            line = self.log.debug if is_routine else self.log.info
            client, _ = scope.get("client") or ("", 0)
            took = round(seconds * 1000, 1)
            line("request", method=scope["method"], path=route, status=status, ms=took, client=client)
