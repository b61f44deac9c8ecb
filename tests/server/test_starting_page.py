"""While a server starts, browsers see a page that says how far it is, and programs a 503 as before."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx

from palestra.server.app import StartingGate


def get(gate: StartingGate, path: str, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport: Any = httpx.ASGITransport(gate)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def test_the_page_says_how_long_the_server_has_been_starting_and_what_it_waits_for():
    gate = StartingGate(time.monotonic())
    first = get(gate, "/")
    assert (first.status_code, first.headers["content-type"]) == (503, "text/html; charset=utf-8")
    assert "The server is starting, for 0 s so far." in first.text
    assert "the models come next" in first.text
    gate.engines = lambda: {"ephebe": None, "big<model>": "the engine is not running"}
    page = get(gate, "/ui/", accept="text/html,*/*")
    assert page.headers["retry-after"] == "1"
    assert "1 of 2 models are ready; waiting for big&lt;model&gt; (the engine is not running)." in page.text
    gate.standing_by = "standing by: another server uses the database"
    assert "Standing by: another server uses the database" in get(gate, "/").text


def test_programs_get_what_they_got():
    gate = StartingGate(time.monotonic())
    reason = "the server is starting, for 0 s so far; ask again in a moment"
    assert get(gate, "/api/v1/create_session").json() == {"detail": reason}
    assert get(gate, "/readyz", accept="text/html").json()["reasons"] == [reason]
    assert get(gate, "/healthz").status_code == 200
