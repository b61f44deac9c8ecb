"""The page of the running server, and its JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from palestra.server.core.telemetry.activity import EVERY_S, Activity
from palestra.server.pages.access import LookerNow, ServerAccess
from palestra.server.pages.server_charts import CHARTS, WORDS, point, read_charts
from palestra.server.pages.server_state import ServerReader, sees_all
from palestra.view.api import json_response
from palestra.view.live import pause
from palestra.view.rendering import render

api = APIRouter(prefix="/api/v1/server", tags=["server"])
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


async def _server(request: Request) -> ServerReader:
    return request.app.state.server


ServerNow = Annotated[ServerReader, Depends(_server)]


@api.get("")
async def show_server(server: ServerNow, caller: LookerNow) -> Response:
    """Engines, calls and models in training. Figures of all owners are for keys with the right `admin` or `metrics`; a
    trainer sees which engines run, and the models of its own owner."""
    return json_response(await server.read(caller))


@api.get("/charts")
async def show_server_charts(request: Request, caller: LookerNow) -> Response:
    """The last 15 minutes of every engine as charts, for keys with the right `admin` or `metrics`; else empty."""
    return json_response(read_charts(request.app.state.activity) if sees_all(caller) else {})


@api.get("/live", response_class=StreamingResponse)
async def watch_server(request: Request, caller: LookerNow) -> StreamingResponse:
    """Server-sent events every two seconds: `point`, with the newest values of the charts' curves. Ends with the key
    that reads it."""
    return StreamingResponse(_follow(request, sees_all(caller)), media_type="text/event-stream")


@pages.get("/server")
async def server_page(request: Request, server: ServerNow, caller: LookerNow) -> HTMLResponse:
    template = "server_tables.html" if "hx-request" in request.headers else "server.html"
    return render(request, template, server=await server.read(caller), charts=CHARTS, words=WORDS)


async def _follow(request: Request, with_figures: bool) -> AsyncIterator[bytes]:
    access: ServerAccess = request.app.state.access
    activity: Activity = request.app.state.activity
    is_stopping: Callable[[], bool] = request.app.state.is_stopping
    yield b"retry: 2000\n\n"
    while not is_stopping() and await access.admits(request.scope):
        readings = list(activity.readings)
        if len(readings) > 1:
            row = point(readings, len(readings) - 1) if with_figures else {"at": round(readings[-1].at)}
            yield b"event: point\ndata: %s\n\n" % msgspec.json.encode(row)
        await pause(EVERY_S, is_stopping)
