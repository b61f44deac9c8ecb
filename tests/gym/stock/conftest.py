"""A gym whose resources servers and one agent were written for NeMo Gym, beside servers of ours.

def test_x(gym): gym.collected(...)        one gym for all tests; servers may be killed, they come back
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest
from aiohttp import web

from palestra.environments.gym.directory import ServerDirectory
from palestra.gym.collect.collection import CollectionRequest, CollectionStatus, collect
from palestra.gym.collect.playing import RowPlayer
from palestra.gym.collect.rows import Expansion
from palestra.gym.config import GymSources, ReservedPorts, load_gym
from palestra.gym.supervisor import Supervisor
from palestra.net.http_client import HttpClient
from tests.gym.stock.upstream import complete

FOLDERS = Path(__file__).parent / "folders"
PATIENCE_S = 100.0
START_S = 300.0  # with an environment to be built
NO_WAIT = "model_endpoint_readiness_timeout_seconds"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Result = TypeVar("Result")


class StockGym:
    """Runs in a thread of its own, with its loop. `complete` answers for the model."""

    def __init__(self, root: Path, complete: Handler, files: list[str], **settings: Any) -> None:
        self._root, self._complete, self._files, self._settings = root, complete, files, settings
        self.lines: list[str] = []
        self.supervisor: Supervisor
        self._loop = asyncio.new_event_loop()
        self._is_ready = threading.Event()
        self._end = asyncio.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._live(),), daemon=True)
        self._thread.start()
        assert self._is_ready.wait(START_S), self.lines
        if self._problem is not None:
            raise self._problem

    async def _live(self) -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self._complete)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        policy = {"policy_base_url": url, "policy_api_key": "x", "policy_model_name": "any"}
        given = {**policy, "head_server": {"host": "127.0.0.1", "port": 0}, NO_WAIT: 0, **self._settings}
        try:
            with ReservedPorts() as ports:
                sources = GymSources(files=self._files, initial=given, roots=[self._root])
                async with Supervisor(load_gym(sources, ports=ports), ports, self.lines.append) as self.supervisor:
                    await self.supervisor.ready()
                    self._is_ready.set()
                    await self._end.wait()
        except BaseException as problem:
            self._problem = problem
            self._is_ready.set()
        finally:
            await runner.cleanup()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(PATIENCE_S)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def url_of(self, name: str) -> str:
        return self.supervisor.config.servers[name].url

    def pid_of(self, name: str) -> int:
        return next(one["pid"] for one in self.supervisor.instances() if one["process_name"] == name)

    def collected(
        self, folder: Path, agent: str | None, rows: list[dict[str, Any]], told: Any = lambda _: None, repeats: int = 1
    ) -> CollectionStatus:
        """Results are at `out.jsonl` in the folder."""
        (folder / "in.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        expected = CollectionRequest(
            input=folder / "in.jsonl",
            output=folder / "out.jsonl",
            expansion=Expansion(agent=agent, repeats=repeats),
            concurrency=16,
        )

        async def play() -> CollectionStatus:
            async with HttpClient() as client:
                directory = await ServerDirectory.of_head(client, self.supervisor.head_url)
                player = RowPlayer(client, directory, expected.patience)
                return await collect(expected, player, await directory.settings(), told)

        return self.run(play())


@pytest.fixture(scope="session")
def gym() -> Iterator[StockGym]:
    made = StockGym(FOLDERS, complete, ["gym.yaml"])
    yield made
    made.close()


def row_of(text: str, **more: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": [{"role": "user", "content": text}]}, **more}


def adding(amounts: list[int], expected: int, **more: Any) -> dict[str, Any]:
    """Played by the tally's agent: one call for each amount."""
    tool = {
        "type": "function",
        "name": "add",
        "description": "Add an amount to the sum.",
        "parameters": {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]},
        "strict": True,
    }
    row = row_of(f"add {' '.join(map(str, amounts))}", expected=expected, **more)
    row["responses_create_params"]["tools"] = [tool]
    return row
