"""A connection to an MCP server, by the official `mcp` package: its 1.x and its 2.x.

The package's transports must be closed by the task that opened them, so each connection has a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from palestra.environments.fleet.backend import ToolAnswer
from palestra.environments.fleet.errors import BackendError
from palestra.environments.fleet.tool_schemas import openai_tool
from palestra.environments.guarded_calls import error_text
from palestra.types.openai import ChatTool
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

MAX_PAGES = 100  # of a server's list of tools
CONNECTION_CLOSED = -32000
LOST = {"ClosedResourceError", "BrokenResourceError", "EndOfStream", "ConnectionError", "TransportError"}
LATE = {"TimeoutException"}


class McpAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A URL, or a command whose input and output is the connection."""

    url: str | None = None
    command: tuple[str, ...] = ()
    headers: Mapping[str, str] = {}
    env: Mapping[str, str] = {}

    def __str__(self) -> str:
        return self.url or " ".join(self.command)


class McpConnection:
    def __init__(self, address: McpAddress, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._task: asyncio.Task[None] | None = None
        self._client: Any = None
        self._is_open = asyncio.Event()

    async def open(self) -> None:
        """Connects. Raises BackendError."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(ready), name="mcp-connection")
        await ready

    async def close(self) -> None:
        self._is_open.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def list_tools(self) -> list[ChatTool]:
        found: list[ChatTool] = []
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = _wire(await self._request(self._client.list_tools(**({} if cursor is None else {"cursor": cursor}))))
            found += [openai_tool(t["name"], t.get("description"), t.get("inputSchema")) for t in page["tools"]]
            cursor = page.get("nextCursor")
            if not cursor:
                break
        return found

    async def call_tool(self, name: str, arguments: JsonPayload) -> ToolAnswer:
        return answer_of(_wire(await self._request(self._client.call_tool(name, arguments))))

    async def _request(self, request: Any) -> Any:
        """Sends a request; if the connection ends first there is no answer, however long one waits."""
        assert self._task is not None
        asking = asyncio.ensure_future(request)
        try:
            await asyncio.wait({asking, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise BackendError(f"the connection to {self._address} ended")
            return asking.result()
        except Exception as e:  # boundary: the client's transports raise any kind of error
            if _is_lost(e):
                raise BackendError(f"the connection to {self._address} is lost: {error_text(e)}") from e
            raise
        finally:
            asking.cancel()

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        try:
            async with _client(self._address, self._timeout_s) as self._client:
                ready.set_result(None)
                await self._is_open.wait()
        except Exception as e:  # boundary: raised to the caller of `open`
            if not ready.done():
                ready.set_exception(BackendError(f"no MCP server at {self._address}: {_innermost(e)}"))


@contextlib.asynccontextmanager
async def _client(address: McpAddress, timeout_s: float) -> AsyncIterator[Any]:
    """Gives an object with `list_tools` and `call_tool`."""
    try:
        import mcp
    except ModuleNotFoundError:
        raise BackendError("MCP servers need the package mcp; to install: pip install 'palestra[platform]'") from None
    transport = _transport(address, timeout_s)
    if hasattr(mcp, "Client"):
        async with mcp.Client(transport, read_timeout_seconds=timeout_s) as client:
            yield client
        return
    limit: Any = timedelta(seconds=timeout_s)
    async with transport as streams, mcp.ClientSession(streams[0], streams[1], limit) as session:
        await session.initialize()
        yield session


def _transport(address: McpAddress, timeout_s: float) -> Any:
    if address.url is None:
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client

        command, *args = address.command
        return stdio_client(StdioServerParameters(command=command, args=args, env=dict(address.env) or None))
    from mcp.client import streamable_http

    headers = dict(address.headers)
    if hasattr(streamable_http, "streamable_http_client"):
        return _http_transport(address.url, headers, timeout_s)
    return streamable_http.streamablehttp_client(address.url, headers=headers, timeout=timeout_s)  # pyright: ignore


@contextlib.asynccontextmanager
async def _http_transport(url: str, headers: dict[str, str], timeout_s: float) -> AsyncIterator[Any]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    # For plain http no certificates are read: that takes longer than all the rest of connecting.
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout_s, verify=not url.startswith("http://")) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


def _wire(answer: Any) -> JsonObject:
    """Returns the JSON as it was sent: names of attributes differ between the two versions, those do not."""
    return answer.model_dump(mode="json", by_alias=True, exclude_none=True)


def answer_of(result: JsonMapping) -> ToolAnswer:
    """Converts a result: a single text is parsed as JSON if it is valid; several become a list of texts; pictures
    become parts of a message."""
    blocks: Sequence[JsonMapping] = result.get("content") or []
    texts = [block["text"] for block in blocks if block.get("type") == "text"]
    if result.get("isError"):
        return ToolAnswer(None, "\n".join(texts) or "the tool failed without a word")
    if any(block.get("type") == "image" for block in blocks):
        return ToolAnswer([_part(block) for block in blocks if block.get("type") in ("text", "image")])
    if len(texts) == 1:
        return ToolAnswer(_read(texts[0]))
    if texts:
        return ToolAnswer(texts)
    return ToolAnswer(result.get("structuredContent"))


def _part(block: JsonMapping) -> JsonPayload:
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    address = f"data:{block.get('mimeType', 'image/png')};base64,{block['data']}"
    return {"type": "image_url", "image_url": {"url": address}}


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_lost(error: Exception) -> bool:
    """Whether the connection failed, and not the server's call. It is decided by class names, because the package has
    several kinds of errors."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    code = getattr(error, "code", getattr(getattr(error, "error", None), "code", None))
    return code == CONNECTION_CLOSED or bool(kinds & LOST and not kinds & LATE)


def _innermost(error: BaseException) -> str:
    """Returns the innermost error: task groups wrap errors in groups of one."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error_text(error)
