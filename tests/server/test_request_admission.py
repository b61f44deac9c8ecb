"""Requests that come in thousands begin in order, few in each turn of the event loop; others do not wait for them."""

from __future__ import annotations

import asyncio
from typing import Any

from palestra.server.http.request_admission import AT_ONCE, RequestAdmission


def test_few_begin_in_each_turn_in_their_order_and_a_short_call_passes_them():
    begun: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["name"])

    async def call(path: str, name: str) -> None:
        nothing: Any = None
        await admission({"type": "http", "path": path, "name": name}, nothing, nothing)

    async def crowd() -> None:
        many = [asyncio.ensure_future(call("/many", str(number))) for number in range(10 * AT_ONCE)]
        await asyncio.sleep(0)
        assert len(begun) == AT_ONCE
        await call("/other", "short")
        for _ in range(4):
            before = len(begun)
            await asyncio.sleep(0)
            assert len(begun) - before <= AT_ONCE
        await asyncio.gather(*many)

    admission = RequestAdmission(app, {"/many"})
    asyncio.run(crowd())
    assert begun.index("short") == AT_ONCE
    begun.remove("short")
    assert begun == [str(number) for number in range(10 * AT_ONCE)]
