"""Chats by an endpoint's text completions: one prompt as it is, for base models, or a template rendered here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from palestra.gym.errors import BadRequest, GymConfigError
from palestra.types.openai import ChatCompletion
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from palestra.chat.templates import ChatTemplate


OF_CHATS = frozenset(
    {
        "chat_template_kwargs",
        "logprobs",
        "max_completion_tokens",
        "messages",
        "metadata",
        "parallel_tool_calls",
        "reasoning_effort",
        "service_tier",
        "store",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)
"""Fields that text completions do not have, or have in another form."""


def template_of(folder: Path, where: str) -> ChatTemplate:
    """Loads a template. Raises GymConfigError. The import is here, because a server that renders nothing needs no
    tokenizer."""
    from palestra.chat import ChatError
    from palestra.chat.templates import ChatTemplate
    from palestra.chat.tokenizer_files import read_tokenizer

    try:
        files = read_tokenizer(folder)
        return ChatTemplate(files.templates, files.named, files.where)
    except ChatError as e:
        raise GymConfigError(f"the model server {where!r}: render_chat_template: {e}") from None


def text_request(body: JsonMapping, template: ChatTemplate | None, *, with_ids: bool) -> JsonObject:
    """Returns the completions request. With a template, tool calls come back as the text that the model wrote."""
    request = {key: value for key, value in body.items() if key not in OF_CHATS}
    request["prompt"] = _prompt(body) if template is None else _rendered(template, body)
    if "max_tokens" not in request and body.get("max_completion_tokens") is not None:
        request["max_tokens"] = body["max_completion_tokens"]
    if with_ids:
        request["logprobs"] = 0
    elif body.get("logprobs"):
        request["logprobs"] = body.get("top_logprobs") or 0
    return request


def as_chat(answer: JsonMapping, *, model: str) -> ChatCompletion:
    choice = answer["choices"][0]
    return {
        "id": answer.get("id") or f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": answer.get("created") or int(time.time()),
        "model": answer.get("model") or model,
        "choices": [
            {
                "index": 0,
                "finish_reason": choice.get("finish_reason") or "stop",
                "message": {"role": "assistant", "content": choice["text"], "tool_calls": None},
            }
        ],
        "usage": answer.get("usage"),
    }


def _rendered(template: ChatTemplate, body: JsonMapping) -> str:
    from palestra.chat import ChatError

    messages = [
        message if message.get("content") is None else {**message, "content": _text(message)}
        for message in body["messages"]
    ]
    try:
        return template.render(messages, body.get("tools") or None, True, body.get("chat_template_kwargs") or {})
    except ChatError as e:
        raise BadRequest(("messages",), str(e)) from None


def _prompt(body: JsonMapping) -> str:
    messages = body["messages"]
    if body.get("tools"):
        raise BadRequest(("tools",), "use_completions_api supports tools only with render_chat_template")
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise BadRequest(
            ("messages",),
            "use_completions_api supports one user message, or a system and a user message, not "
            f"{', '.join(roles)}; for a model with a chat template, set use_completions_api: false",
        )
    return "\n\n".join(_text(message) for message in messages)


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(part["text"] for part in content)
    raise BadRequest(("messages",), "use_completions_api supports text only", given=content)
