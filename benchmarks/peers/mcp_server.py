"""The official MCP server with one tool, stateless and JSON only: the fastest it can be asked to be.

python benchmarks/peers/mcp_server.py          # prints its address, serves until stdin closes
"""

from __future__ import annotations

import socket
import sys
import threading
from typing import Any

import uvicorn

items: dict[str, int] = {}


def set_item(name: str, value: int) -> dict[str, Any]:
    """Give an item a value; a new name makes a new item."""
    items[name] = value
    return {"name": name, "value": value}


def main() -> None:
    from mcp.server.mcpserver import MCPServer  # pyright: ignore[reportMissingImports]

    server = MCPServer("peer")
    server.tool(name="set")(set_item)
    app = server.streamable_http_app(stateless_http=True, json_response=True)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
    threading.Thread(target=lambda: (sys.stdin.read(), setattr(running, "should_exit", True)), daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", flush=True)
    running.run(sockets=[listener])


if __name__ == "__main__":
    main()
