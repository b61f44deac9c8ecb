"""A resources server's tools at `/mcp`, for agents that use MCP."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
from starlette.datastructures import Headers

from palestra.gym.errors import BadCall
from palestra.gym.servers.handlers import ToolSpec
from palestra.gym.servers.states import Session, SessionStates
from palestra.gym.sessions import SessionSigner
from palestra.gym.wire import GymRequest, GymResponse, encoded
from palestra.net import mcp
from palestra.util.json_types import JsonObject

TOKEN_HEADER = "X-NeMo-Gym-Session-Token"
PURPOSE = "mcp"


class McpEndpoint:
    """The endpoint; it is also the protocol's `Toolset`."""

    def __init__(
        self,
        name: str,
        signer: SessionSigner,
        states: SessionStates,
        tool_specs: Callable[[], Sequence[ToolSpec]],
        call_tool: Callable[[Session, str, Any], Awaitable[Any]],
    ) -> None:
        """Takes what it needs from a server: name, signer of tokens, sessions, tools and how to call one."""
        self._name, self._signer, self._states = name, signer, states
        self._tool_specs, self._call_tool = tool_specs, call_tool
        self._prefix = f"mcp__{name}__"

    @property
    def key(self) -> str:
        return f"gym-{self._name}"

    @property
    def title(self) -> str:
        return self._name

    @property
    def version(self) -> str:
        tools = [(one.name, one.description, one.parameters) for one in self.tools]
        return hashlib.sha256(orjson.dumps(tools)).hexdigest()[:12]

    @property
    def tools(self) -> Sequence[ToolSpec]:
        return self._tool_specs()

    @property
    def instructions(self) -> str:
        """Empty: what the model has to do comes with its task."""
        return ""

    def invitation(self, session_id: str) -> JsonObject:
        """Returns what `/seed_session` adds to its answer."""
        headers = {TOKEN_HEADER: self._signer.signed(session_id)}
        return {"mcp": {"server_name": self._name, "url_path": "/mcp", "transport": "http", "headers": headers}}

    def with_bare_names(self, row: Any) -> object:
        """Replaces `mcp__<server>__<tool>` by the tool's name: for the verdict only, the row keeps what was called."""
        response = row.get("response") if isinstance(row, dict) else None
        output = response.get("output") if isinstance(response, dict) else None
        if not isinstance(output, list) or not any(self._is_ours(one) for one in output):
            return row
        bare = [
            {**one, "name": one["name"].removeprefix(self._prefix)} if self._is_ours(one) else one for one in output
        ]
        return {**row, "response": {**row["response"], "output": bare}}

    def _is_ours(self, item: object) -> bool:
        return (
            isinstance(item, dict)
            and item.get("type") == "function_call"
            and isinstance(item.get("name"), str)
            and item["name"].startswith(self._prefix)
        )

    async def answer(self, call: GymRequest) -> GymResponse:
        session_id = self._signer.session_of(call.headers.get(TOKEN_HEADER.lower(), ""))
        if session_id is None:
            raise BadCall(401, f"{TOKEN_HEADER} is missing or belongs to another server; /seed_session returns it")
        try:
            message = mcp.read_message(orjson.dumps(call.body))
        except mcp.RpcError as error:
            found = mcp.error_answer(None, error)
        else:
            found = mcp.begin(self, Headers(call.headers), message)
        if isinstance(found, mcp.ToolRequest):
            session = Session(session_id, self._states, call.rollout_id)
            found = found.answered(await self._called(session, found.name, found.arguments))
        return GymResponse(status=found.status, body=found.body)

    async def _called(self, session: Session, name: str, arguments: object) -> mcp.ToolResult:
        try:
            found = await self._call_tool(session, name, arguments)
        except BadCall as error:
            return mcp.ToolResult(orjson.dumps({"detail": error.detail}).decode(), is_error=True)
        except Exception as error:  # boundary: a tool that fails is an answer, too, and the model continues
            return mcp.ToolResult(repr(error), is_error=True)
        return mcp.ToolResult(found if isinstance(found, str) else encoded(found).decode())
