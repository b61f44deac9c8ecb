"""MCP for one instance: stateless, JSON only, both eras of the protocol.

Owns: messages in, messages out. Never touches: sockets, sessions, which instance it is: whoever asks says that.
Handshake era (2024-11-05 to 2025-11-25): `initialize`, then calls, each of which stands alone. Modern era (2026-07-28):
no handshake; over HTTP, headers repeat what the body says, and must agree with it.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from palestra import __version__
from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.faces.http import Headers
from palestra.environments.platform.toolbox import ToolResult

log = logging.getLogger(__name__)

HANDSHAKE = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN = ("2026-07-28",)
PARSE_ERROR, INVALID_REQUEST, NO_METHOD, INVALID_PARAMS, INTERNAL = -32700, -32600, -32601, -32602, -32603
HEADER_MISMATCH, UNKNOWN_VERSION = -32020, -32022
STATUS = {PARSE_ERROR: 400, INVALID_REQUEST: 400, INVALID_PARAMS: 400, HEADER_MISMATCH: 400, UNKNOWN_VERSION: 400}
MODERN_STATUS = STATUS | {NO_METHOD: 404}
META = "io.modelcontextprotocol"
VERSION_HEADER, METHOD_HEADER, NAME_HEADER = "mcp-protocol-version", "mcp-method", "mcp-name"
CAPABILITIES = {"tools": {"listChanged": False}}
TOOLS_TTL_MS = 3_600_000  # an app's tools do not change while it runs
MAX_NAME = 200

_lists: dict[tuple[str, str, bool], bytes] = {}  # by key, version and era

Answer = tuple[int, bytes]
ToolCall = Callable[[str, Any], ToolResult]


class ListedTool(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def parameters(self) -> dict[str, Any]: ...


class Toolset(Protocol):
    """What is offered: an app, or whatever else has tools."""

    @property
    def key(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def version(self) -> str:
        """Another one where the tools are others."""
        ...

    @property
    def tools(self) -> Sequence[ListedTool]: ...
    @property
    def instructions(self) -> str:
        """For the model, when it connects; empty: none."""
        ...


class RpcError(Exception):
    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.code, self.message, self.data = code, message, data


def mcp_answer(app: Toolset, call: ToolCall, headers: Headers | None, body: bytes) -> Answer:
    """Status and body; an empty body where there is nothing to say. `headers` None: it did not come over HTTP."""
    try:
        message = read_message(body)
    except RpcError as e:
        return error_answer(None, e)
    return message_answer(app, call, headers, message)


def message_answer(
    app: Toolset, call: ToolCall, headers: Headers | None, message: dict[str, Any], statuses: Mapping[int, int] = STATUS
) -> Answer:
    """`statuses`: of errors in the handshake era."""
    if "id" not in message:
        return 202, b""  # notifications: nothing here depends on one
    is_modern = _is_modern(message, headers)
    try:
        if is_modern:
            _check_envelope(message, headers)
        result = _result(app, call, message, is_modern)
    except RpcError as e:
        return error_answer(message["id"], e, MODERN_STATUS if is_modern else statuses)
    return 200, result_bytes(message["id"], result)


def result_bytes(request_id: str | int, result: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":' + msgspec.json.encode(request_id) + b',"result":' + result + b"}"


def mcp_refusal(body: bytes, message: str) -> bytes:
    """To whatever was asked: there is no instance to ask."""
    try:
        request_id = read_message(body).get("id")
    except RpcError:
        request_id = None
    return error_answer(request_id, RpcError(INTERNAL, message))[1]


def read_message(body: bytes) -> dict[str, Any]:
    try:
        message = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RpcError(PARSE_ERROR, "the body is not JSON that can be read") from None
    if isinstance(message, list):
        raise RpcError(INVALID_REQUEST, "batches are not part of MCP any more: send one message at a time")
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0" or not isinstance(message.get("method"), str):
        raise RpcError(INVALID_REQUEST, "the body is not a JSON-RPC 2.0 request")
    if "id" in message and (isinstance(message["id"], bool) or not isinstance(message["id"], str | int)):
        raise RpcError(INVALID_REQUEST, "the id of a request is a string or a whole number")
    if not isinstance(message.get("params", {}), dict):
        raise RpcError(INVALID_REQUEST, "params must be an object")
    return message


def error_answer(request_id: str | int | None, error: RpcError, statuses: Mapping[int, int] = STATUS) -> Answer:
    told: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.data is not None:
        told["data"] = error.data
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": request_id, "error": told})
    return statuses.get(error.code, 200), body


# Eras


def _is_modern(message: dict[str, Any], headers: Headers | None) -> bool:
    """What is no version of the handshake era is told what there is, in the modern way."""
    version = None if headers is None else headers.get(VERSION_HEADER)
    if version is not None:
        return version not in HANDSHAKE
    meta = message.get("params", {}).get("_meta")
    return isinstance(meta, dict) and f"{META}/protocolVersion" in meta


def _check_envelope(message: dict[str, Any], headers: Headers | None) -> None:
    """In the order of the specification: what is missing, what disagrees, then the version."""
    version = None if headers is None else headers.get(VERSION_HEADER)
    meta = message.get("params", {}).get("_meta")
    if not isinstance(meta, dict):
        if version is not None and version not in MODERN:
            raise _unknown_version(version)
        raise RpcError(INVALID_PARAMS, f"params._meta must be an object with {META}/protocolVersion")
    missing = [name for name in ("protocolVersion", "clientCapabilities") if f"{META}/{name}" not in meta]
    if missing:
        raise RpcError(INVALID_PARAMS, f"params._meta lacks {', '.join(f'{META}/{name}' for name in missing)}")
    asked = meta[f"{META}/protocolVersion"]
    if headers is not None:
        _check_headers(headers, message, asked)
    if asked not in MODERN:
        raise _unknown_version(asked)


def _check_headers(headers: Headers, message: dict[str, Any], version: Any) -> None:
    method = message["method"]
    if repeated := headers.repeated((VERSION_HEADER, METHOD_HEADER, NAME_HEADER)):
        raise RpcError(HEADER_MISMATCH, f"the header {repeated} was sent more than once")
    if headers.get(VERSION_HEADER) is None or headers.get(VERSION_HEADER) != version:
        raise RpcError(HEADER_MISMATCH, f"the header {VERSION_HEADER} is not the version in params._meta")
    if headers.get(METHOD_HEADER) != method:
        raise RpcError(HEADER_MISMATCH, f"the header {METHOD_HEADER} is not the method of the body")
    if method == "tools/call" and _decoded(headers.get(NAME_HEADER)) != message["params"].get("name"):
        raise RpcError(HEADER_MISMATCH, f"the header {NAME_HEADER} is not the tool's name in the body")


def _unknown_version(asked: Any) -> RpcError:
    supported = [*MODERN, *reversed(HANDSHAKE)]
    return RpcError(UNKNOWN_VERSION, "Unsupported protocol version", {"supported": supported, "requested": asked})


def _decoded(header: str | None) -> str | None:
    """A name that does not fit into a header comes as =?base64?…?=."""
    if header is None or not (header.startswith("=?base64?") and header.endswith("?=")):
        return header
    try:
        return base64.b64decode(header[9:-2], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


# Methods


def _result(app: Toolset, call: ToolCall, message: dict[str, Any], is_modern: bool) -> bytes:
    params = message.get("params", {})
    match message["method"]:
        case "tools/call":
            return _called(app, call, params, is_modern)
        case "tools/list":
            if params.get("cursor") is not None:
                raise RpcError(INVALID_PARAMS, "there is no such page: all tools come in the first")
            return tools_list(app, is_modern)
        case "initialize" if not is_modern:
            return _initialized(app, params)
        case "ping" if not is_modern:
            return b"{}"
        case "server/discover" if is_modern:
            return _discovered(app)
        case method:
            raise RpcError(NO_METHOD, f"there is no method {method[:MAX_NAME]!r} here")


def _called(app: Toolset, call: ToolCall, params: dict[str, Any], is_modern: bool) -> bytes:
    name = params.get("name")
    if not isinstance(name, str):
        raise RpcError(INVALID_PARAMS, "tools/call needs the name of a tool")
    arguments = params.get("arguments")
    try:
        result = call(name, {} if arguments is None else arguments)
    except PlatformError as e:
        raise RpcError(INVALID_REQUEST, str(e)) from None
    except Exception:
        log.exception("the tool %s of %s broke", name[:MAX_NAME], app.key)
        raise RpcError(INTERNAL, "the tool broke; nothing was changed") from None
    told: dict[str, Any] = {"content": [{"type": "text", "text": result.text}], "isError": result.is_error}
    if "session_id" in params:  # a client of OpenEnv's, which looks for the result there
        told["data"] = msgspec.Raw(result.text.encode())
    return msgspec.json.encode(told | {"resultType": "complete"} if is_modern else told)


def tools_list(app: Toolset, is_modern: bool) -> bytes:
    known = (app.key, app.version, is_modern)
    if known not in _lists:
        tools = [{"name": t.name, "description": t.description, "inputSchema": t.parameters} for t in app.tools]
        cached = {"resultType": "complete", "ttlMs": TOOLS_TTL_MS, "cacheScope": "public"} if is_modern else {}
        _lists[known] = msgspec.json.encode({"tools": tools, **cached})
    return _lists[known]


def _initialized(app: Toolset, params: dict[str, Any]) -> bytes:
    asked = params.get("protocolVersion")
    version = asked if asked in HANDSHAKE else HANDSHAKE[-1]
    told = {"protocolVersion": version, "capabilities": CAPABILITIES, "serverInfo": _server(app)}
    return msgspec.json.encode({**told, **_instructions(app)})


def _discovered(app: Toolset) -> bytes:
    return msgspec.json.encode(
        {
            "supportedVersions": [*MODERN, *reversed(HANDSHAKE)],
            "capabilities": CAPABILITIES,
            "resultType": "complete",
            "ttlMs": TOOLS_TTL_MS,
            "cacheScope": "public",
            "_meta": {f"{META}/serverInfo": _server(app)},
            **_instructions(app),
        }
    )


def _instructions(app: Toolset) -> dict[str, str]:
    return {"instructions": app.instructions} if app.instructions else {}


def _server(app: Toolset) -> dict[str, str]:
    return {"name": f"palestra-{app.key}", "title": app.title, "version": f"{__version__}+{app.version}"}
