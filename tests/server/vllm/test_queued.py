"""How many requests wait in a vLLM server, as it tells."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from palestra.server.vllm.client import QUEUED, VllmClient
from tests.server.vllm.conftest import Vllm

TOLD = """# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="a b"} 3.0
vllm:num_requests_waiting{engine="1",model_name="a b"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a b",reason="capacity"} 9.0
vllm:num_requests_running{engine="0",model_name="a b"} 50.0
"""


@pytest.mark.parametrize(
    ("status", "text", "queued"),
    [
        (200, TOLD, 7),
        (200, "nothing of it", 0),
        (404, "", 0),
        (200, f"{QUEUED}}} many", 0),
        (200, f"{QUEUED}}} NaN", 0),
    ],
)
def test_requests_that_wait_are_added_up(status: int, text: str, queued: int) -> None:
    async def work() -> None:
        async def metrics(_: web.Request) -> web.Response:
            return web.Response(status=status, text=text)

        app = web.Application()
        app.router.add_get("/metrics", metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = VllmClient(f"http://127.0.0.1:{runner.addresses[0][1]}", None, request_s=5.0)
        try:
            assert await client.queued() == queued
        finally:
            await client.close()
            await runner.cleanup()

    asyncio.run(work())


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_vllm_tells_how_many_wait(vllms: tuple[Vllm, Vllm]) -> None:
    assert QUEUED in vllms[0].http.get("/metrics").text
