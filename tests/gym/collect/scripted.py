"""A gym of somebody else's making, for the collector: a head, an agent and a verifier on real sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from palestra.net.http_client import HttpClient

Reply = Callable[[dict[str, Any], int], Awaitable[web.StreamResponse]]


async def right(row: dict[str, Any], attempt: int) -> web.StreamResponse:
    """Every row is worth its `worth`, 1 by default."""
    return web.json_response(result_of(row))


def result_of(row: dict[str, Any]) -> dict[str, Any]:
    response = {"output": [], "usage": {"output_tokens": 3}}
    return {
        "responses_create_params": row["responses_create_params"],
        "response": response,
        "reward": row.get("worth", 1.0),
    }


class ScriptedGym:
    """`reply` answers `/run`, given the row and how often it was asked before; `verify` is what grading gives."""

    def __init__(self) -> None:
        self.reply: Reply = right
        self.asked: Counter[tuple[int, int]] = Counter()
        self.rows: list[dict[str, Any]] = []
        self.verify: Callable[[dict[str, Any]], dict[str, Any]] = lambda row: {"reward": 0.5}
        self.mode = "stateless"
        self.running = 0
        self.most_running = 0
        self.url = ""

    async def _run(self, request: web.Request) -> web.StreamResponse:
        row = await request.json()
        key = row["_ng_task_index"], row["_ng_rollout_index"]
        self.rows.append(row)
        self.asked[key] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.reply(row, self.asked[key] - 1)
        finally:
            self.running -= 1

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.verify(await request.json()))

    async def _aggregate(self, request: web.Request) -> web.StreamResponse:
        response = (await request.json())["verify_responses"]
        heavy = any("responses_create_params" in one for one in response)
        return web.json_response({"agent_metrics": {"count": len(response), "heavy": heavy}, "key_metrics": {}})

    async def _mode(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.mode)

    async def _instances(self, request: web.Request) -> web.StreamResponse:
        kinds = {"player": "responses_api_agents", "grader": "resources_servers"}
        return web.json_response(
            [{"config_path": name, "server_type": kind, "url": self.url} for name, kind in kinds.items()]
        )

    async def _settings(self, request: web.Request) -> web.StreamResponse:
        block = "player: {responses_api_agents: {simple_agent: {resources_server: {name: grader}, max_steps: 3}}}"
        return web.json_response(block)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[HttpClient]:
        app = web.Application()
        app.add_routes(
            [
                web.post("/run", self._run),
                web.post("/verify", self._verify),
                web.post("/aggregate_metrics", self._aggregate),
                web.get("/reverify_mode", self._mode),
                web.get("/server_instances", self._instances),
                web.get("/global_config_dict_yaml", self._settings),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with HttpClient() as client:
                yield client
        finally:
            await runner.cleanup()


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 60))
