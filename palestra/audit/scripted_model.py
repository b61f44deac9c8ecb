"""A model endpoint whose answers a policy of a probe says: for environments that call the model themselves."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from palestra.audit.episodes import text_of
from palestra.audit.policies import Moment, ProbePolicy
from palestra.net.serving import HttpServer
from palestra.types.rollouts import Message, Task
from palestra.util.json_types import JsonObject

MODEL = "audit"
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
LEAVES = "I have nothing more to say."
"""Said after a policy's last turn, so that an agent which goes on until there is an answer ends."""


class ScriptedModel:
    """Answers as the policy of the episodes that are being played. Which task a call is of, its messages say."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._policy: ProbePolicy | None = None
        self._tasks: Sequence[Task] = ()
        self.url = ""
        self.has_tools = False
        """Whether a request so far had tools."""

    def take(self, policy: ProbePolicy, tasks: Sequence[Task]) -> None:
        """Takes the policy and the tasks of the episodes to come. Tasks that are played at once have prompts of their
        own."""
        self._policy, self._tasks = policy, tasks

    def answer(self, body: JsonObject) -> JsonObject:
        """Returns a chat completion."""
        messages: list[Message] = body.get("messages") or []
        task = self._task_of(messages)
        turn = sum(message.get("role") == "assistant" for message in messages)
        policy, tools = self._policy, body.get("tools") or []
        self.has_tools |= bool(tools)
        if policy is None or task is None or turn >= policy.turns:
            return completion({"role": "assistant", "content": LEAVES})
        rng = random.Random(f"{self._seed}/{task.id}/{policy.name}/{turn}")
        content = policy.say(Moment(task, turn, messages, tools, rng))
        text = content.encode(errors="replace").decode()  # no server of a model sends half a character
        return completion(chat_message(text, has_tools=bool(tools)))

    def _task_of(self, messages: Sequence[Message]) -> Task | None:
        if len(self._tasks) == 1:
            return self._tasks[0]
        content = "\n".join(text_of(message) for message in messages)
        return next((task for task in self._tasks if text_of(task.prompt[-1]) in content), None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serves as an ASGI application."""
        assert scope["type"] == "http"
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message.get("body", b"")
        status, answer = 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
        if scope["path"].endswith("/chat/completions"):
            request = json.loads(body)
            answer = self.answer(request)
            if request.get("stream"):
                await _send(send, 200, b"text/event-stream", event_stream(answer))
                return
        elif not scope["path"].endswith("/models"):
            status, answer = 404, {"error": {"message": "the model of an audit answers /v1/chat/completions only"}}
        await _send(send, status, b"application/json", json.dumps(answer).encode())


async def _send(send: Any, status: int, content_type: bytes, body: bytes) -> None:
    headers = [(b"content-type", content_type)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def scripted_model(seed: int) -> AsyncIterator[ScriptedModel]:
    """Serves a model on a free port of loopback."""
    model = ScriptedModel(seed)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        model.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = HttpServer(model, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
        serving = asyncio.create_task(server.serve([listener]), name="audit-model")
        try:
            yield model
        finally:
            server.should_exit = True
            await serving


def chat_message(text: str, *, has_tools: bool) -> Message:
    """Returns the message of an assistant; calls in the text are tool calls, where the request has tools."""
    calls = (
        [found for number, one in enumerate(CALL.findall(text)) if (found := _call(number, one))] if has_tools else []
    )
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": CALL.sub("", text).strip() or None, "tool_calls": calls}


def _call(number: int, text: str) -> JsonObject | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    content = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": f"call_{number}", "type": "function", "function": {"name": found["name"], "arguments": content}}


def completion(message: Message) -> JsonObject:
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": f"chatcmpl-{time.monotonic_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def event_stream(answer: JsonObject) -> bytes:
    """Returns a chat completion as the events of a stream: its message in one piece, its end, its usage."""
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
    head = {**{name: answer[name] for name in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    pieces = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**head, "choices": [], "usage": answer["usage"]},
    ]
    return b"".join(b"data: %s\n\n" % json.dumps(piece).encode() for piece in pieces) + b"data: [DONE]\n\n"
