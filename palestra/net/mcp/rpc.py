"""JSON-RPC as MCP uses it: one message at a time, errors with a status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NotRequired, TypedDict, TypeGuard

import msgspec

from palestra.util.json_types import JsonObject

PARSE_ERROR, INVALID_REQUEST, NO_METHOD, INVALID_PARAMS, INTERNAL = -32700, -32600, -32601, -32602, -32603
HEADER_MISMATCH, UNKNOWN_VERSION = -32020, -32022
STATUS = {PARSE_ERROR: 400, INVALID_REQUEST: 400, INVALID_PARAMS: 400, HEADER_MISMATCH: 400, UNKNOWN_VERSION: 400}
MODERN_STATUS = STATUS | {NO_METHOD: 404}


class RpcMessage(TypedDict):
    """A request or a notification of JSON-RPC, as `read_message` has checked it."""

    jsonrpc: str
    method: str
    id: NotRequired[str | int]
    """A notification has none."""
    params: NotRequired[JsonObject]


class RpcResponse(NamedTuple):
    status: int
    body: bytes
    """Empty if there is no answer to send."""


class RpcError(Exception):
    def __init__(self, code: int, message: str, data: object = None) -> None:
        super().__init__(message)
        self.code, self.message, self.data = code, message, data


def read_message(body: bytes) -> RpcMessage:
    """Raises RpcError."""
    try:
        message = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RpcError(PARSE_ERROR, "the body is not valid JSON") from None
    if isinstance(message, list):
        raise RpcError(INVALID_REQUEST, "MCP no longer has batches; send one message at a time")
    if not _is_message(message):
        raise RpcError(INVALID_REQUEST, "the body is not a JSON-RPC 2.0 request")
    if "id" in message and (isinstance(message["id"], bool) or not isinstance(message["id"], str | int)):
        raise RpcError(INVALID_REQUEST, "the id of a request must be a string or a whole number")
    if not isinstance(message.get("params", {}), dict):
        raise RpcError(INVALID_REQUEST, "params must be an object")
    return message


def _is_message(found: object) -> TypeGuard[RpcMessage]:
    """Whether it has the version and the method; `id` and `params` are checked next."""
    return isinstance(found, dict) and found.get("jsonrpc") == "2.0" and isinstance(found.get("method"), str)


def result_answer(request_id: str | int, result: bytes) -> RpcResponse:
    return RpcResponse(200, b'{"jsonrpc":"2.0","id":' + msgspec.json.encode(request_id) + b',"result":' + result + b"}")


def error_answer(request_id: str | int | None, error: RpcError, statuses: Mapping[int, int] = STATUS) -> RpcResponse:
    data = {} if error.data is None else {"data": error.data}
    content = {"code": error.code, "message": error.message, **data}
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": request_id, "error": content})
    return RpcResponse(statuses.get(error.code, 200), body)
