"""The answers of a server with tools to MCP's methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from palestra import __version__
from palestra.net.mcp.rpc import (
    INVALID_PARAMS,
    MODERN_STATUS,
    NO_METHOD,
    STATUS,
    RpcError,
    RpcMessage,
    RpcResponse,
    error_answer,
    result_answer,
)
from palestra.net.mcp.versions import HANDSHAKE, META, SUPPORTED, McpHeaders, check_envelope, is_modern, version_of
from palestra.util.json_types import JsonObject, JsonPayload

CAPABILITIES = {"tools": {"listChanged": False}}
TOOLS_TTL_MS = 3_600_000  # a server's tools do not change while it runs
CACHED = {"resultType": "complete", "ttlMs": TOOLS_TTL_MS, "cacheScope": "public"}
MAX_NAME = 200

_lists: dict[tuple[str, str, bool], bytes] = {}  # by key, version and era


class ListedTool(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def parameters(self) -> JsonPayload:
        """JSON Schema of the arguments."""
        ...


class Toolset(Protocol):
    """A set of tools that is offered over MCP, such as an app."""

    @property
    def key(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def version(self) -> str:
        """Version of the tools; it differs if the tools differ."""
        ...

    @property
    def tools(self) -> Sequence[ListedTool]: ...
    @property
    def instructions(self) -> str:
        """Instructions for the model, when it connects; empty: none."""
        ...


class ToolResult(msgspec.Struct, frozen=True):
    """The result of a tool call over MCP."""

    text: str
    """The text that the model reads, most often one JSON object."""
    is_error: bool = False


@dataclass(slots=True)
class ToolRequest:
    """A tool call to be made, and how to answer with its result."""

    name: str
    arguments: Any
    _id: str | int
    _is_modern: bool
    _has_session: bool
    """It comes from a client of OpenEnv's, which looks for the result under `data`."""
    _statuses: Mapping[int, int]

    def answered(self, result: ToolResult) -> RpcResponse:
        content: dict[str, object] = {"content": [{"type": "text", "text": result.text}], "isError": result.is_error}
        if self._has_session:
            content["data"] = msgspec.Raw(result.text.encode())
        if self._is_modern:
            content["resultType"] = "complete"
        return result_answer(self._id, msgspec.json.encode(content))

    def failed(self, code: int, message: str) -> RpcResponse:
        return error_answer(self._id, RpcError(code, message), self._statuses)


def begin(
    toolset: Toolset, headers: McpHeaders | None, message: RpcMessage, statuses: Mapping[int, int] = STATUS
) -> RpcResponse | ToolRequest:
    """`headers` None: it did not come over HTTP. `statuses`: those of errors in the handshake era."""
    if "id" not in message:
        return RpcResponse(202, b"")  # notifications: nothing here depends on one
    version = version_of(headers)
    modern = is_modern(message, version)
    statuses = MODERN_STATUS if modern else statuses
    try:
        if modern:
            check_envelope(message, headers, version)
        if message["method"] == "tools/call":
            return _tool_request(message["id"], message.get("params", {}), modern, statuses)
        return result_answer(message["id"], _result(toolset, message, modern))
    except RpcError as e:
        return error_answer(message["id"], e, statuses)


def _tool_request(request_id: str | int, params: JsonObject, modern: bool, statuses: Mapping[int, int]) -> ToolRequest:
    name, arguments = params.get("name"), params.get("arguments")
    if not isinstance(name, str):
        raise RpcError(INVALID_PARAMS, "tools/call needs the name of a tool")
    arguments = {} if arguments is None else arguments
    return ToolRequest(name, arguments, request_id, modern, "session_id" in params, statuses)


def _result(toolset: Toolset, message: RpcMessage, modern: bool) -> bytes:
    params = message.get("params", {})
    match message["method"]:
        case "tools/list":
            if params.get("cursor") is not None:
                raise RpcError(INVALID_PARAMS, "there is no such page; the first page has all tools")
            return _tools_list(toolset, modern)
        case "initialize" if not modern:
            return _initialized(toolset, params)
        case "ping" if not modern:
            return b"{}"
        case "server/discover" if modern:
            return _discovered(toolset)
        case method:
            raise RpcError(NO_METHOD, f"there is no method {method[:MAX_NAME]!r} here")


def _tools_list(toolset: Toolset, modern: bool) -> bytes:
    known = (toolset.key, toolset.version, modern)
    if known not in _lists:
        tools = [{"name": t.name, "description": t.description, "inputSchema": t.parameters} for t in toolset.tools]
        _lists[known] = msgspec.json.encode({"tools": tools, **(CACHED if modern else {})})
    return _lists[known]


def _initialized(toolset: Toolset, params: JsonObject) -> bytes:
    requested = params.get("protocolVersion")
    version = requested if requested in HANDSHAKE else HANDSHAKE[-1]
    about = {"protocolVersion": version, "capabilities": CAPABILITIES, "serverInfo": _server(toolset)}
    return msgspec.json.encode({**about, **_instructions(toolset)})


def _discovered(toolset: Toolset) -> bytes:
    meta = {f"{META}/serverInfo": _server(toolset)}
    about = {"supportedVersions": SUPPORTED, "capabilities": CAPABILITIES, "_meta": meta}
    return msgspec.json.encode({**about, **CACHED, **_instructions(toolset)})


def _instructions(toolset: Toolset) -> dict[str, str]:
    return {"instructions": toolset.instructions} if toolset.instructions else {}


def _server(toolset: Toolset) -> dict[str, str]:
    return {"name": f"palestra-{toolset.key}", "title": toolset.title, "version": f"{__version__}+{toolset.version}"}
