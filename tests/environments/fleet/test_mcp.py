"""Any MCP server as the world of a task: a real one in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from palestra.chat.picture_files import read_pictures
from palestra.environments.fleet import FleetAttempt, FleetGrade, FleetSettings, FleetTask, FleetTaskEnv, ToolAnswer
from palestra.environments.fleet.backends.mcp_server import McpBackend
from palestra.environments.fleet.mcp_client import answer_of
from palestra.environments.session import EnvSession
from palestra.types import VisionCard
from palestra.types.pictures import PictureSizes
from tests.environments.fleet.conftest import call

CARD = VisionCard(sizes=PictureSizes(multiple=16, min_pixels=256, max_pixels=65536), image_token=9)

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="needs mcp")

SERVER = Path(__file__).with_name("notes_server.py")
OLD_PYTHON = Path(os.environ.get("PALESTRA_MCP1_PYTHON") or Path(__file__).parents[3] / ".venv-mcp1" / "bin" / "python")
CHECKS = "tests.environments.fleet.checks"


def notes(tmp_path: Path, check: str = "wrote_hello", **mcp: Any) -> FleetTaskEnv:
    row = {"key": "hello", "prompt": "Write hello.", "env_id": "notes"}
    (tmp_path / "tasks.json").write_text(json.dumps([row]))
    given = {"command": [sys.executable, str(SERVER)], "verifier": f"{CHECKS}:{check}", **mcp}
    config = {"tasks_file": str(tmp_path / "tasks.json"), "backend": "mcp", "mcp": given}
    return FleetTaskEnv(config, {"task_key": "hello", "max_turns": 9})


async def played(env: FleetTaskEnv, *actions: str) -> list[Any]:
    try:
        await env.init_async([])
        return [await env.step_async(action) for action in actions]
    finally:
        await env.close_async()


def test_an_episode_at_a_server_of_its_own(tmp_path: Path):
    env = notes(tmp_path)
    actions = [call("add", text="hello"), call("plain"), call("fail"), call("nope"), call("add"), "<done>"]
    steps = asyncio.run(played(env, *actions))
    response = [step["observations"][0]["content"] for step in steps]
    assert response[0] == 'Tool result:\n{\n  "count": 1\n}'
    assert response[1] == "Tool result:\njust words"
    assert all(text.startswith("Error: ") for text in response[2:5])
    assert (steps[-1]["reward"], env.tool_errors, env.tool_calls) == (1.0, 3, 5)
    add = env.tools[0]["function"]
    assert (add["name"], add["parameters"]["required"]) == ("add", ["text"])
    assert add["parameters"]["properties"] == {"text": {"type": "string"}, "times": {"type": "integer"}}


def test_an_episode_is_brought_into_the_same_state_in_a_process_of_its_own(tmp_path: Path):
    async def go() -> None:
        with ThreadPoolExecutor(1) as pool:
            first, copy = (EnvSession(notes(tmp_path), pool, timeout_s=30) for _ in range(2))
            first.note_turns()
            await first.init([])
            await first.step(call("add", text="hello"))
            state = await first.snapshot()
            await first.step(call("add", text="bye"))
            assert state.repeated is not None
            await copy.restore(state)
            read = [await session.step(call("read")) for session in (first, copy)]
            assert ["bye" in str(step.observations) for step in read] == [True, False]
            assert (await copy.step("<done>")).reward == 1.0
            for session in (first, copy):
                await session.close()

    asyncio.run(go())


def test_pictures_of_tools_are_shown_beside_their_words(tmp_path: Path):
    (step,) = asyncio.run(played(notes(tmp_path), call("look")))
    words, picture = step["observations"][0]["content"]
    assert words == {"type": "text", "text": "Tool result:\nA dot:"}
    assert read_pictures([{"role": "user", "content": [picture]}], CARD).files[0].media_type == "image/png"


@pytest.mark.slow
def test_verifiers_that_do_not_know_or_break(tmp_path: Path):
    actions = (call("read"), call("read"), "<done>")
    assert asyncio.run(played(notes(tmp_path, "called_twice"), *actions))[-1]["reward"] == 1.0
    unknown, idle = notes(tmp_path, "called_twice"), notes(tmp_path)
    assert asyncio.run(played(unknown, "<done>"))[-1]["reward"] is None
    assert asyncio.run(played(idle, "<done>"))[-1]["reward"] == 0.0  # another process: nobody wrote there
    assert asyncio.run(played(notes(tmp_path, "breaks"), "<done>"))[-1]["reward"] is None


def finished(check: str, calls: int) -> FleetGrade:
    """What a check of `checks.py` comes to. No server is needed for that."""
    task = FleetTask(task_key="hello", prompt="Write hello.", env_key="notes")
    backend = McpBackend(task, FleetSettings(mcp={"command": ["none"], "verifier": f"{CHECKS}:{check}"}))
    backend._calls = [("read", {}, ToolAnswer({}))] * calls
    return asyncio.run(backend.verify(FleetAttempt()))


def test_a_check_that_asserts_has_judged_and_one_that_returns_no_score_has_not():
    assert finished("asserts", 1).score == 1.0
    failed = finished("asserts", 0)
    assert (failed.score, "nothing was called" in failed.error) == (0.0, True)
    assert finished("counts", 1).score == 1.0
    for check, calls, shown in (("counts", 2, "2"), ("called_twice", 0, "None")):
        unknown = finished(check, calls)
        assert unknown.score is None
        assert unknown.error == f"the verifier returned {shown}, but a score must be a number from 0 to 1"


@pytest.mark.slow
def test_a_server_that_dies_fails_the_episode_and_not_the_policy(tmp_path: Path):
    with pytest.raises(RuntimeError, match="connection"):
        asyncio.run(played(notes(tmp_path), call("die"), call("read")))


@pytest.mark.slow
def test_sync_calls_keep_one_connection(tmp_path: Path):
    env = notes(tmp_path)
    env.init([])
    assert env.step(call("add", text="hello"))["reward"] == 0.0
    assert env.step("<done>")["reward"] == 1.0
    env.close()


@pytest.mark.parametrize(
    ("mcp", "words"),
    [
        ({"url": "http://127.0.0.1:9/mcp", "command": []}, "no MCP server at http://127.0.0.1:9/mcp"),
        ({"command": ["no-such-program"]}, "no MCP server at no-such-program"),
        ({"url": "http://x"}, "either a url or a command"),
        ({"verifier": None}, "must name the function that grades an episode"),
        ({"verifier": "tests:nope"}, "verifier 'tests:nope'"),
        ({"port": 1}, "port"),
    ],
)
def test_what_is_wrong_with_a_server_is_said(tmp_path: Path, mcp: dict[str, Any], words: str):
    with pytest.raises(RuntimeError, match=words):
        notes(tmp_path, **mcp).init([])


def test_answers_of_every_kind():
    text = {"type": "text", "text": "[1]"}
    assert answer_of({"content": [text]}).result == [1]
    assert answer_of({"content": [text, text]}).result == ["[1]", "[1]"]
    assert answer_of({"content": [], "structuredContent": {"a": 1}}).result == {"a": 1}
    assert answer_of({"content": []}).result is None
    assert answer_of({"content": [text], "isError": True}).error == "[1]"
    image = {"type": "image", "data": "QQ==", "mimeType": "image/png"}
    assert answer_of({"content": [text, image]}).result == [
        {"type": "text", "text": "[1]"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}},
    ]


@pytest.mark.e2e
@pytest.mark.skipif(not OLD_PYTHON.exists(), reason="needs a venv with mcp 1.x and msgspec: make clients")
def test_the_older_package_plays_too(tmp_path: Path):
    """This file's first test, in a Python where `mcp` is 1.x."""
    root = str(Path(__file__).parents[3])
    program = f"""
import asyncio, pathlib, sys
sys.path.insert(0, {root!r})
import mcp
assert not hasattr(mcp, "Client")
from palestra.environments.fleet import FleetTaskEnv
config = {{"tasks_file": {str(tmp_path / "tasks.json")!r}, "backend": "mcp",
          "mcp": {{"command": [sys.executable, {str(SERVER)!r}], "verifier": "{CHECKS}:wrote_hello"}}}}
env = FleetTaskEnv(config, {{"task_key": "hello"}})
env.init([])
env.step({call("add", text="hello")!r})
print(env.step("<done>")["reward"])
env.close()
"""
    notes(tmp_path)
    ran = subprocess.run([OLD_PYTHON, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.split() == ["1.0"], ran.stderr
