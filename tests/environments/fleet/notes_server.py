"""A real MCP server for the tests, by the official package of either version: notes in memory, over stdio or HTTP."""

from __future__ import annotations

import os
import sys
from base64 import b64decode
from typing import Any

try:
    from mcp.server.mcpserver import Image
    from mcp.server.mcpserver import MCPServer as Server
except ModuleNotFoundError:
    from mcp.server.fastmcp import FastMCP as Server  # type: ignore[import-not-found, no-redef]
    from mcp.server.fastmcp import Image  # type: ignore[import-not-found, no-redef]

server = Server("notes")
notes: list[str] = []
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
"""A red pixel, as a PNG file."""


@server.tool()
def add(text: str, times: int | None = 1) -> dict[str, Any]:
    """Write a note."""
    notes.extend([text] * (times or 1))
    return {"count": len(notes)}


@server.tool()
def read() -> dict[str, Any]:
    """Read all notes."""
    return {"notes": notes}


@server.tool()
def plain() -> str:
    """Say it in words."""
    return "just words"


@server.tool(structured_output=False)
def look() -> Any:
    """Shows a picture."""
    return ["A dot:", Image(data=b64decode(DOT), format="png")]


@server.tool()
def fail() -> str:
    """Never works."""
    raise RuntimeError("no")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    server.run("stdio" if len(sys.argv) < 2 else sys.argv[1])  # type: ignore[arg-type]
