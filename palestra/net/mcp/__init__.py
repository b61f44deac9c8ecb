"""MCP for the platform's and the gym's servers: stateless, JSON only, both eras of the protocol.

The way in is `begin`: it answers a message, or says which tool is to be called.

Ours, because a tool call is what an agent's turn waits for. In one run of `benchmarks/local_platform.py` beside the
official package's server (mcp 2.3, stateless, JSON only: the fastest it can be asked to be), on two busy cores, a call
takes the server 0.47 ms of CPU instead of 1.07 ms, and 32 clients get 1,108 calls/s instead of 635; in a later run,
0.31 ms instead of 0.81 ms, and 1,869 calls/s instead of 1,362. The gym's servers answer by it, too (`gym/servers/mcp`).
Clients are the official package's (`palestra.environments.fleet.mcp_client`); tests hold this server against them and
against the protocol's conformance suite.
"""

from __future__ import annotations

from palestra.net.mcp.rpc import (
    INTERNAL,
    INVALID_PARAMS,
    INVALID_REQUEST,
    STATUS,
    RpcError,
    RpcMessage,
    RpcResponse,
    error_answer,
    read_message,
    result_answer,
)
from palestra.net.mcp.server import ListedTool, ToolRequest, ToolResult, Toolset, begin
from palestra.net.mcp.versions import McpHeaders

__all__ = [
    "INTERNAL",
    "INVALID_PARAMS",
    "INVALID_REQUEST",
    "STATUS",
    "ListedTool",
    "McpHeaders",
    "RpcError",
    "RpcMessage",
    "RpcResponse",
    "ToolRequest",
    "ToolResult",
    "Toolset",
    "begin",
    "error_answer",
    "read_message",
    "result_answer",
]
