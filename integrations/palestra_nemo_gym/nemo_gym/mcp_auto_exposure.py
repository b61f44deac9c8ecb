"""The tools of a resources server at `/mcp` too, for agents that speak MCP."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from itsdangerous import BadSignature, TimestampSigner, URLSafeSerializer
from pydantic import BaseModel
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from nemo_gym.base_resources_server import (
    NEMO_GYM_MCP_METADATA_KEY,
    NEMO_GYM_MCP_SESSION_TOKEN_HEADER,
    RESERVED_MCP_TOOL_NAMES,
    MCPServerMetadata,
)
from nemo_gym.in_process import InProcessResponse, body_of, post_within, session_in
from nemo_gym.json_types import JsonMapping, JsonObject
from nemo_gym.middleware import LIFE, cookie_key
from nemo_gym.rollout_correlation import RolloutContextMiddleware

MCP_URL_PATH = "/mcp"
VERSION = "2025-06-18"
ANY_OBJECT = {"type": "object", "additionalProperties": True}
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_METHOD_NOT_FOUND, _INVALID_REQUEST = -32601, -32600


@dataclass(frozen=True, slots=True)
class MCPTool:
    name: str
    input_schema: JsonObject
    description: str | None

    def described(self) -> JsonObject:
        described = {} if self.description is None else {"description": self.description}
        return {"name": self.name, "inputSchema": self.input_schema, **described}


class CatchAll:
    """A route such as `/{path}`: what it answers to, only the server knows."""

    def tool(self, name: str, input_schema: JsonObject | None = None, description: str | None = None) -> MCPTool:
        return MCPTool(name, input_schema or ANY_OBJECT, description)


def maybe_auto_expose(server: Any, app: FastAPI) -> dict[str, MCPTool] | None:
    """Where the config says so. Raises ValueError where its routes cannot be tools."""
    if not getattr(server.config, "expose_tools_over_mcp", False):
        return None
    tools = _tools(server, app)
    is_prefix_taken_off = bool(app.user_middleware) and app.user_middleware[0].cls is RolloutContextMiddleware
    app.user_middleware.insert(int(is_prefix_taken_off), Middleware(_McpEndpoint, server=server, tools=tools))
    return tools


def _tools(server: Any, app: FastAPI) -> dict[str, MCPTool]:
    routes = [one for one in app.routes if isinstance(one, APIRoute) and "POST" in (one.methods or ())]
    if any(getattr(one, "path", None) == MCP_URL_PATH for one in app.routes):
        raise ValueError(f"{type(server).__name__} serves {MCP_URL_PATH} itself: turn expose_tools_over_mcp off")
    own = [one for one in routes if "{" not in one.path and one.path.lstrip("/") not in RESERVED_MCP_TOOL_NAMES]
    catchall = CatchAll() if any("{" in one.path for one in routes) else None
    tools: dict[str, MCPTool] = {}
    for tool in server.mcp_tools([_tool_of(one) for one in own], catchall) or ():
        if not _NAME.fullmatch(tool.name) or tool.name in RESERVED_MCP_TOOL_NAMES or tool.name in tools:
            raise ValueError(
                f"{type(server).__name__}: {tool.name!r} cannot be a tool over MCP: a name is of letters, digits, - "
                f"and _, there once, and none of {', '.join(sorted(RESERVED_MCP_TOOL_NAMES))}"
            )
        tools[tool.name] = tool
    return tools


def _tool_of(route: APIRoute) -> MCPTool:
    """Its arguments are the body that its handler takes."""
    body = next(iter(route.dependant.body_params), None)
    model: Any = body.field_info.annotation if body is not None else None
    is_model = isinstance(model, type) and issubclass(model, BaseModel)
    schema = model.model_json_schema() if is_model else ANY_OBJECT
    return MCPTool(route.path.lstrip("/"), schema, (route.description or "").strip() or None)


class _McpEndpoint:
    """In front of the server: it answers `/mcp`, and changes what goes to and comes from two other routes."""

    def __init__(self, app: ASGIApp, server: Any, tools: dict[str, MCPTool]) -> None:
        self._app = app
        self._server = server
        self._tools = tools
        self._cookie = server.get_session_middleware_key()
        key = cookie_key(self._cookie)
        self._cookies = TimestampSigner(key)
        self._tokens = URLSafeSerializer(key, salt="mcp")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").rstrip("/")
        if scope["type"] != "http" or path not in (MCP_URL_PATH, "/seed_session", "/verify"):
            await self._app(scope, receive, send)
            return
        if path == MCP_URL_PATH:
            response = await self._answer(scope, receive)
        elif path == "/seed_session":
            response = await self._seeded(scope, await body_of(receive))
        else:
            response = await self._verified(scope, await body_of(receive))
        await response(scope, receive, send)

    # The two routes

    async def _seeded(self, scope: Scope, body: bytes) -> Response:
        """Its answer says how to reach the tools of this session."""
        session_id, is_new = session_in(scope, self._cookie, self._cookies)
        answer = await post_within(self._app, scope, body, self._signed(session_id) if is_new else None)
        answered = answer.value()
        if answer.is_ok and isinstance(answered, dict) and NEMO_GYM_MCP_METADATA_KEY not in answered:
            row = _object(body)
            token = {"sid": session_id, "life": LIFE, "tools": self._server.mcp_allowed_tools_for_session(row)}
            metadata = MCPServerMetadata(
                server_name=self._server.config.name,
                headers={NEMO_GYM_MCP_SESSION_TOKEN_HEADER: str(self._tokens.dumps(token))},
            )
            return answer.with_value({**answered, NEMO_GYM_MCP_METADATA_KEY: metadata.model_dump()})
        return answer.response()

    async def _verified(self, scope: Scope, body: bytes) -> Response:
        """The verdict is about bare names; the row keeps what was called."""
        row = _object(body)
        called = {one["call_id"]: one["name"] for one in _calls(row) if one.get("call_id")}
        for one in _calls(row):
            one["name"] = self._server.normalize_tool_name(one["name"])
        answer = await post_within(self._app, scope, json.dumps(row).encode() if called else body)
        answered = answer.value()
        if not called or not isinstance(answered, dict):
            return answer.response()
        for one in _calls(answered):
            one["name"] = called.get(one.get("call_id"), one["name"])
        return answer.with_value(answered)

    # MCP, without sessions of its own and without streams

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        if scope["method"] != "POST":
            return JSONResponse({"error": "only POST: there are no streams here"}, status_code=405)
        message = _object(await body_of(receive))
        identity, method = message.get("id"), message.get("method")
        if not isinstance(method, str):
            problem = {"code": _INVALID_REQUEST, "message": "not a JSON-RPC request"}
            return JSONResponse({"jsonrpc": "2.0", "id": identity, "error": problem}, status_code=400)
        if identity is None:
            return Response(status_code=202)
        given = message.get("params")
        result = await self._result(method, given if isinstance(given, dict) else {}, scope)
        if result is None:
            problem = {"code": _METHOD_NOT_FOUND, "message": f"there is no method {method}"}
            return JSONResponse({"jsonrpc": "2.0", "id": identity, "error": problem})
        return JSONResponse({"jsonrpc": "2.0", "id": identity, "result": result})

    async def _result(self, method: str, params: JsonObject, scope: Scope) -> JsonObject | None:
        if method == "initialize":
            answered = {"name": self._server.config.name, "version": "1"}
            version = params.get("protocolVersion") or VERSION
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": answered}
        if method == "ping":
            return {}
        claims = self._claims(scope)
        allowed = claims.get("tools") if claims else None
        if method == "tools/list":
            return {
                "tools": [one.described() for one in self._tools.values() if allowed is None or one.name in allowed]
            }
        if method != "tools/call":
            return None
        name = str(params.get("name"))
        if name not in self._tools:
            return _failed(f"Unknown tool: {name!r}. Available tools: {sorted(self._tools)}")
        if claims is None or claims["life"] != LIFE:
            return _failed(f"{NEMO_GYM_MCP_SESSION_TOKEN_HEADER} is missing, or not of this server's session")
        if allowed is not None and name not in allowed:
            return _failed(f"Tool {name!r} is not allowed for this session.")
        return await self._called(name, params.get("arguments") or {}, claims["sid"], scope)

    async def _called(self, name: str, arguments: object, session_id: str, scope: Scope) -> JsonObject:
        inner = {**scope, "path": f"/{name}", "raw_path": f"/{name}".encode()}
        answer: InProcessResponse = await post_within(
            self._app, inner, json.dumps(arguments).encode(), self._signed(session_id)
        )
        value, text = answer.value(), answer.body.decode(errors="replace")
        if not answer.is_ok:
            return _failed(f"HTTP {answer.status} from POST /{name}: {text}")
        content = [{"type": "text", "text": value if isinstance(value, str) else text}]
        structured = {"structuredContent": value} if isinstance(value, dict) else {}
        return {"content": content, "isError": False, **structured}

    def _claims(self, scope: Scope) -> JsonObject | None:
        header = NEMO_GYM_MCP_SESSION_TOKEN_HEADER.lower().encode()
        token = next((value for name, value in scope["headers"] if name == header), b"")
        try:
            return self._tokens.loads(token)
        except BadSignature:
            return None

    def _signed(self, session_id: str) -> str:
        """The cookie of that session, as Starlette writes it."""
        value = self._cookies.sign(b64encode(json.dumps({"session_id": session_id, "life": LIFE}).encode()))
        return f"{self._cookie}={value.decode()}"


def _failed(text: str) -> JsonObject:
    return {"content": [{"type": "text", "text": text}], "isError": True}


def _object(body: bytes) -> JsonObject:
    try:
        found = json.loads(body or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _calls(row: JsonMapping) -> list[JsonObject]:
    response = row.get("response")
    output = response.get("output") if isinstance(response, dict) else None
    items = output if isinstance(output, list) else []
    return [
        one
        for one in items
        if isinstance(one, dict) and one.get("type") == "function_call" and isinstance(one.get("name"), str)
    ]
