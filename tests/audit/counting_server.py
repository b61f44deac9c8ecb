"""An MCP server over HTTP, whose one tool keeps its count for all sessions. Its argument is the port."""

from __future__ import annotations

import sys
from typing import Any

from mcp.server.mcpserver import MCPServer

server = MCPServer("counting")
count = [0]


@server.tool()
def add(number: int) -> dict[str, Any]:
    """Add to the count."""
    count[0] += number
    return {"count": count[0]}


if __name__ == "__main__":
    server.run("streamable-http", port=int(sys.argv[1]))
