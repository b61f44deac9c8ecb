"""With mcp 1.x, in a venv of its own: connects to the address given, says what it found as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from mcp import ClientSession  # pyright: ignore
from mcp.client.streamable_http import streamablehttp_client  # pyright: ignore


async def main(url: str) -> None:
    async with streamablehttp_client(url) as (reading, writing, _), ClientSession(reading, writing) as session:
        begun = await session.initialize()
        await session.send_ping()
        tools = await session.list_tools()
        good = await session.call_tool("put", {"value": 7})
        bad = await session.call_tool("get", {"name": "nowhere"})
        told = {
            "version": begun.protocolVersion,
            "server": begun.serverInfo.name,
            "tools": [tool.name for tool in tools.tools],
            "good": [good.isError, [block.text for block in good.content]],
            "bad": [bad.isError, [block.text for block in bad.content]],
        }
    print(json.dumps(told))


asyncio.run(main(sys.argv[1]))
