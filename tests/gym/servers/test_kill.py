"""A resources server is killed under load: every rollout gets an answer, and then they succeed again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from palestra.gym.scaffolding import make_server
from palestra.types.gym import PARAMS
from tests.ports import free_port

CLIENTS, EACH, KILL_AFTER = 16, 30, 60
PALESTRA = str(Path(sys.executable).with_name("palestra"))

COMPLETION = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "stub",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "It is 4."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


async def endpoint(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A model that always says the same."""
    body = json.dumps(COMPLETION).encode()
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            _, _, length = head.partition(b"content-length: ")
            await reader.readexactly(int(length.partition(b"\r\n")[0]) if length else 0)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
            writer.write(body)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A model endpoint's port, and the address of the head of a gym that uses it."""
    make_server("tally", tmp_path)
    port, head = free_port(), free_port()
    own = {"tally": {"resources_servers": {"tally": {"isolation": "process"}}}, "head_server": {"port": head}}
    (tmp_path / "more.yaml").write_text(json.dumps(own))
    files = [
        "resources_servers/tally/configs/tally.yaml",
        "responses_api_models/vllm_model/configs/vllm_model.yaml",
        "more.yaml",
    ]
    command = [PALESTRA, "gym", "run", *(word for file in files for word in ("-c", file))]
    command += ["--model-url", f"http://127.0.0.1:{port}/v1", "--model-api-key", "none", "--model", "stub"]
    command += ["++model_endpoint_readiness_timeout_seconds=0"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            for line in process.stderr:
                lines.append(line)
                if "servers ready" in line:
                    break
            else:
                pytest.fail("".join(lines))
            yield port, f"http://127.0.0.1:{head}"
        finally:
            process.terminate()


def instance(head: str, kind: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{head}/server_instances", timeout=10) as answer:
        return next(one for one in json.load(answer) if one["server_type"] == kind)


@pytest.mark.slow
def test_a_killed_world_costs_rollouts_but_no_answer(started: tuple[int, str]) -> None:
    port, head = started
    agent = instance(head, "responses_api_agents")["url"]
    victim = instance(head, "resources_servers")["pid"]
    row = {PARAMS: {"input": "Say it."}, "stock": {"bolts": 4}, "items": ["bolts"]}
    found: list[tuple[int, Any]] = []

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in range(EACH):
            async with session.post(f"{agent}/run", json=row) as answer:
                found.append((answer.status, await answer.json()))
            if len(found) == KILL_AFTER:
                os.kill(victim, signal.SIGKILL)

    async def played() -> None:
        async with await asyncio.start_server(endpoint, "127.0.0.1", port), aiohttp.ClientSession() as session:
            await asyncio.gather(*(client(session) for _ in range(CLIENTS)))

    asyncio.run(asyncio.wait_for(played(), 110))
    assert len(found) == CLIENTS * EACH
    good = [body for status, body in found if status == 200]
    bad = [body for status, body in found if status != 200]
    assert all(body["reward"] == 1.0 for body in good)
    # Those whose session was lost, or whose call broke on its way: at most one for each client.
    assert len(bad) <= CLIENTS
    kinds = {body["_ng_failure_class"] for body in bad}
    assert kinds <= {"session_lost", "server_died", "server_unreachable"}
    assert instance(head, "resources_servers")["pid"] != victim
