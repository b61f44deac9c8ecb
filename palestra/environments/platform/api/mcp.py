"""Calls of an instance's tools that arrive as messages of MCP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from palestra.environments.platform.errors import PlatformError
from palestra.net.mcp import (
    INTERNAL,
    INVALID_REQUEST,
    STATUS,
    McpHeaders,
    RpcError,
    RpcMessage,
    RpcResponse,
    ToolRequest,
    ToolResult,
    Toolset,
    begin,
    error_answer,
    read_message,
)

log = logging.getLogger(__name__)

ToolCall = Callable[[str, Any], ToolResult]


def mcp_answer(app: Toolset, call: ToolCall, headers: McpHeaders | None, body: bytes) -> RpcResponse:
    try:
        message = read_message(body)
    except RpcError as e:
        return error_answer(None, e)
    return message_answer(app, call, headers, message)


def message_answer(
    app: Toolset, call: ToolCall, headers: McpHeaders | None, message: RpcMessage, statuses: Mapping[int, int] = STATUS
) -> RpcResponse:
    begun = begin(app, headers, message, statuses)
    if not isinstance(begun, ToolRequest):
        return begun
    try:
        return begun.answered(call(begun.name, begun.arguments))
    except PlatformError as e:
        return begun.failed(INVALID_REQUEST, str(e))
    except Exception:  # boundary: an error of the tool; the connection continues
        log.exception("the tool %s of %s failed unexpectedly", begun.name[:200], app.key)
        return begun.failed(INTERNAL, "the tool failed unexpectedly; nothing was changed")


def mcp_refusal(body: bytes, message: str) -> bytes:
    """Returns an error for any request: there is no instance."""
    try:
        request_id = read_message(body).get("id")
    except RpcError:
        request_id = None
    return error_answer(request_id, RpcError(INTERNAL, message)).body
