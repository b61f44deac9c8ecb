"""With mcp 1.x, in a venv of its own: connects to the address or the command given, says what it found as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from mcp import ClientSession, StdioServerParameters  # pyright: ignore
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client  # pyright: ignore


async def main(where: str, *args: str) -> None:
    local = StdioServerParameters(command=where, args=list(args))
    opened = streamablehttp_client(where) if where.startswith("http://") else stdio_client(local)
    async with opened as streams, ClientSession(streams[0], streams[1]) as session:
        begun = await session.initialize()
        await session.send_ping()
        tools = await session.list_tools()
        good = await session.call_tool("put", {"value": 7})
        bad = await session.call_tool("get", {"name": "nowhere"})
        response = {
            "version": begun.protocolVersion,
            "server": begun.serverInfo.name,
            "tools": [tool.name for tool in tools.tools],
            "good": [good.isError, [block.text for block in good.content]],
            "bad": [bad.isError, [block.text for block in bad.content]],
        }
    print(json.dumps(response))


asyncio.run(main(*sys.argv[1:]))
