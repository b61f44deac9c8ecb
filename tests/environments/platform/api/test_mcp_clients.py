"""The official clients, unmodified: mcp 2.x in this process, 1.x in a venv of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from palestra.environments.platform import APPS
from tests.environments.platform.api.conftest import Platform

OLD_PYTHON = Path(os.environ.get("PALESTRA_MCP1_PYTHON") or Path(__file__).parents[4] / ".venv-mcp1" / "bin" / "python")
TOOLS = [tool.name for tool in APPS["keys"].tools]
MISSING = '{"error":"not_found","message":"there is no item \'nowhere\'","hint":"list() shows them"}'


@pytest.mark.parametrize(
    ("mode", "version", "path"),
    [
        ("auto", "2026-07-28", "mcp"),
        ("legacy", "2025-11-25", "mcp"),
        ("2026-07-28", "2026-07-28", "api/v1/mcp"),
    ],
)
def test_mcp_2_plays(platform: Platform, mode: str, version: str, path: str):
    mcp = pytest.importorskip("mcp")
    root = platform.make()["urls"]["root"]

    async def play() -> None:
        async with mcp.Client(f"{root}{path}", mode=mode) as client:
            assert client.protocol_version == version
            assert [tool.name for tool in (await client.list_tools()).tools] == TOOLS
            good = await client.call_tool("put", {"value": 7})
            assert ([block.text for block in good.content], bool(good.is_error)) == (['{"put":7}'], False)
            bad = await client.call_tool("get", {"name": "nowhere"})
            assert ([block.text for block in bad.content], bad.is_error) == ([MISSING], True)
            unknown = await client.call_tool("launch", {})
            assert unknown.is_error

    asyncio.run(play())


def test_mcp_2_hears_why_an_instance_does_not_answer(platform: Platform):
    mcp = pytest.importorskip("mcp")
    made = platform.make()

    async def play() -> None:
        async with mcp.Client(f"{made['urls']['root']}mcp", mode="2026-07-28") as client:
            platform.http.delete(f"/v1/env/instances/{made['instance_id']}")
            with pytest.raises(mcp.MCPError, match="closed by its owner"):
                await client.call_tool("list", {})

    asyncio.run(play())


@pytest.mark.e2e
@pytest.mark.skipif(not OLD_PYTHON.exists(), reason="needs a venv with mcp<2: make clients")
def test_mcp_1_plays(platform: Platform):
    root = platform.make()["urls"]["root"]
    walk = Path(__file__).with_name("mcp1_walk.py")
    ran = subprocess.run([OLD_PYTHON, walk, f"{root}mcp"], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "version": "2025-11-25",
        "server": "palestra-keys",
        "tools": TOOLS,
        "good": [False, ['{"put":7}']],
        "bad": [True, [MISSING]],
    }
