"""Any OpenEnv server as the world of a task: a real one, of the official package, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from palestra.environments.fleet import FleetTaskEnv
from tests.environments.fleet.conftest import call
from tests.waiting import until

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("PALESTRA_OPENENV_PYTHON") or ROOT / ".venv-openenv" / "bin" / "python")
SERVER = Path(__file__).with_name("openenv_server.py")


def counting(tmp_path: Path, url: str, **given: Any) -> FleetTaskEnv:
    (tmp_path / "tasks.json").write_text(json.dumps([{"key": "five", "prompt": "Count to 5.", "env_id": "counter"}]))
    config = {
        "tasks_file": str(tmp_path / "tasks.json"),
        "backend": "openenv",
        "openenv": {"url": url, "reset": {"goal": 5}, **given},
    }
    return FleetTaskEnv(config, {"task_key": "five", "max_turns": 9})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([PYTHON, SERVER, str(port)]) as process:

        def listens() -> bool:
            assert process.poll() is None
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        until(listens)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


@pytest.mark.e2e
@pytest.mark.skipif(not PYTHON.exists(), reason="needs a venv with openenv: make clients")
def test_episodes_at_an_openenv_server(tmp_path: Path, url: str):
    async def played(*actions: str, **given: Any) -> tuple[list[str], float | None, FleetTaskEnv]:
        env = counting(tmp_path, url, **given)
        await env.init_async([])
        try:
            steps = [await env.step_async(action) for action in actions]
        finally:
            await env.close_async()
        return [step["observations"][0]["content"] for step in steps], steps[-1]["reward"], env

    async def main() -> None:
        actions = (call("add", n=2), call("fail"), call("nope"), call("add", n=3), "<done>")
        response, reward, env = await played(*actions)
        assert response[0] == 'Tool result:\n{\n  "count": 2\n}'
        assert response[1].startswith("Error: ")
        assert response[2].startswith("Error: ")
        assert (reward, env.tool_errors) == (1.0, 2)
        assert [tool["function"]["name"] for tool in env.tools] == ["add", "fail"]
        assert env.tools[0]["function"]["parameters"]["required"] == ["n"]
        assert (await played(call("add", n=4), "<done>"))[1] == 0.0
        assert (await played("<done>"))[1] is None  # nobody has said a reward
        both = await asyncio.gather(*(played(call("add", n=n), "<done>") for n in (5, 6)))
        assert [reward for _, reward, _ in both] == [1.0, 0.0]

    asyncio.run(main())


FRAMES: dict[str, Any] = {
    "reset": {"type": "observation", "data": {"observation": {}, "reward": None}},
    "list_tools": {"type": "observation", "data": {"observation": {"tools": [{"name": "go"}]}, "reward": 0.0}},
    "finish": {"type": "observation", "data": {"observation": {}, "reward": 0.5, "done": True}},
    "refuse": {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no"}},
    "end": {"type": "error", "data": {"code": "SESSION_ERROR", "message": "gone"}},
}


async def scripted(connection: Any) -> None:
    """Answers by the frame's kind, the action's, or the tool's; some tools have no answer."""
    async for text in connection:
        frame = json.loads(text)
        seen.append(frame["data"])
        kind = frame["data"].get("type", frame["type"])
        response = FRAMES.get(frame["data"].get("tool_name") if kind == "call_tool" else kind)
        if response is not None:
            await connection.send(json.dumps(response))


seen: list[dict[str, Any]] = []


@pytest.mark.parametrize(
    ("actions", "reward"),
    [
        (["<done>"], 0.5),
        ([call("refuse"), "<done>"], 0.5),
        ([call("end")], "SESSION_ERROR"),
        ([call("silent"), call("go")], "was not read"),
    ],
)
def test_frames_of_every_kind(tmp_path: Path, actions: list[str], reward: float | str):
    websockets = pytest.importorskip("websockets.asyncio.server")

    async def main() -> float | None:
        async with websockets.serve(scripted, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            finish = {"type": "finish", "answer": "{answer}", "task": "{task_key}"}
            env = counting(tmp_path, f"http://127.0.0.1:{port}", finish=finish)
            env.settings = msgspec.structs.replace(env.settings, request_timeout_s=0.3)
            await env.init_async([])
            try:
                return [await env.step_async(action) for action in actions][-1]["reward"]
            finally:
                await env.close_async()

    if isinstance(reward, str):
        with pytest.raises(RuntimeError, match=reward):
            asyncio.run(main())
    else:
        assert asyncio.run(main()) == reward
        assert seen[-1] == {"type": "finish", "task": "five"}  # without an answer, as there was none


def test_what_is_wrong_with_a_server_is_said(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r"no OpenEnv server at http://127.0.0.1:9"):
        counting(tmp_path, "http://127.0.0.1:9").init([])
    with pytest.raises(RuntimeError, match=r"env_config.openenv: .*port"):
        counting(tmp_path, "http://127.0.0.1:9", port=9).init([])
