"""A model endpoint that does what the first user message says."""

from __future__ import annotations

import json
import re
from typing import Any
from uuid import uuid4

from aiohttp import web


async def complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    if body["model"] == "absent":
        return web.json_response({"error": "there is no such model"}, status=404)
    if text_of(body["messages"][0]) == "refuse":
        return web.json_response({"error": 'not "you"'}, status=403)
    return completion(said(body["messages"]))


def completion(message: dict[str, Any]) -> web.Response:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
    return web.json_response(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    )


def said(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """`add 3 4`: two calls, one after the other; `judge: …`: a verdict on capitals; else up."""
    expected = next(text_of(one) for one in messages if one["role"] == "user")
    if expected.startswith("judge: "):
        return {"role": "assistant", "content": "GOOD" if expected[7:].isupper() else "BAD"}
    amounts = re.findall(r"\d+", expected) if expected.startswith("add") else []
    done = sum(one["role"] == "tool" for one in messages)
    if done < len(amounts):
        return calling("add", {"amount": int(amounts[done])})
    return {"role": "assistant", "content": "up"}


def calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"id": f"call_{uuid4().hex}", "type": "function"}
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{**call, "function": function}]}


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
