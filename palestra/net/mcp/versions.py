"""The protocol's two eras, and what a request of the modern one has to carry.

Handshake era (2024-11-05 to 2025-11-25): `initialize`, then calls, each of which stands alone. Modern era
(2026-07-28): no handshake; over HTTP, headers repeat what the body says, and must agree with it.
"""

from __future__ import annotations

import base64
import binascii
from typing import Protocol

from palestra.net.mcp.rpc import HEADER_MISMATCH, INVALID_PARAMS, UNKNOWN_VERSION, RpcError, RpcMessage

HANDSHAKE = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
MODERN = ("2026-07-28",)
SUPPORTED = [*MODERN, *reversed(HANDSHAKE)]
META = "io.modelcontextprotocol"
VERSION_HEADER, METHOD_HEADER, NAME_HEADER = "mcp-protocol-version", "mcp-method", "mcp-name"


class McpHeaders(Protocol):
    """The headers of a request, as Starlette has them."""

    def getlist(self, key: str, /) -> list[str]: ...


def is_modern(message: RpcMessage, version: str | None) -> bool:
    """`version`: the header's. What is no version of the handshake era is told what there is, in the modern way."""
    if version is not None:
        return version not in HANDSHAKE
    meta = message.get("params", {}).get("_meta")
    return isinstance(meta, dict) and f"{META}/protocolVersion" in meta


def check_envelope(message: RpcMessage, headers: McpHeaders | None, version: str | None) -> None:
    """Checks in the order of the specification: missing fields, contradictions, then the version. Raises RpcError."""
    meta = message.get("params", {}).get("_meta")
    if not isinstance(meta, dict):
        if version is not None and version not in MODERN:
            raise _unknown_version(version)
        raise RpcError(INVALID_PARAMS, f"params._meta must be an object with {META}/protocolVersion")
    missing = [name for name in ("protocolVersion", "clientCapabilities") if f"{META}/{name}" not in meta]
    if missing:
        raise RpcError(INVALID_PARAMS, f"params._meta lacks {', '.join(f'{META}/{name}' for name in missing)}")
    requested = meta[f"{META}/protocolVersion"]
    if headers is not None:
        _check_headers(headers, message, requested)
    if requested not in MODERN:
        raise _unknown_version(requested)


def _check_headers(headers: McpHeaders, message: RpcMessage, requested: object) -> None:
    version, method, name = (_only(headers, key) for key in (VERSION_HEADER, METHOD_HEADER, NAME_HEADER))
    if version is None or version != requested:
        raise RpcError(HEADER_MISMATCH, f"the header {VERSION_HEADER} is not the version in params._meta")
    if method != message["method"]:
        raise RpcError(HEADER_MISMATCH, f"the header {METHOD_HEADER} is not the method of the body")
    if method == "tools/call" and _decoded(name) != message.get("params", {}).get("name"):
        raise RpcError(HEADER_MISMATCH, f"the header {NAME_HEADER} is not the tool's name in the body")


def _only(headers: McpHeaders, name: str) -> str | None:
    """Returns the header's only value, without the spaces around it that parsers leave there."""
    values = headers.getlist(name)
    if len(values) > 1:
        raise RpcError(HEADER_MISMATCH, f"the header {name} was sent more than once")
    return values[0].strip(" \t") if values else None


def version_of(headers: McpHeaders | None) -> str | None:
    """The first that a header names."""
    values = headers.getlist(VERSION_HEADER) if headers is not None else []
    return values[0].strip(" \t") if values else None


def _unknown_version(requested: object) -> RpcError:
    data = {"supported": SUPPORTED, "requested": requested}
    return RpcError(UNKNOWN_VERSION, "Unsupported protocol version", data)


def _decoded(header: str | None) -> str | None:
    """A name that does not fit into a header comes as =?base64?…?=."""
    if header is None or not (header.startswith("=?base64?") and header.endswith("?=")):
        return header
    try:
        return base64.b64decode(header[9:-2], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
