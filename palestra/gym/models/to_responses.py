"""A chat answer as a response.

Owns: thoughts in think tags, ids on the last item, what an endpoint counted. Never touches: the JSON of items
(`palestra.chat.responses_output`), the network.
"""

import re

from palestra.chat import responses_output as written
from palestra.chat.responses_output import call_item, ending, message_item, new_id, reasoning_item, text_part
from palestra.types.gym import ROUTED_EXPERTS, TOKEN_FIELDS
from palestra.util.json_types import JsonMapping, JsonObject

THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response(params: JsonMapping, completion: JsonMapping, *, model: str, has_thoughts: bool) -> JsonObject:
    """`completion` has its thinking in think tags and its ids on the message; only its first choice counts."""
    choice = completion["choices"][0]
    created = completion.get("created")
    return written.response_body(
        params,
        model=model,
        created_at=float(created) if created else None,
        output=output_items(choice["message"], has_thoughts=has_thoughts),
        usage=usage(completion.get("usage")),
        **ending(INCOMPLETE.get(choice.get("finish_reason"))),
    )


def output_items(message: JsonMapping, *, has_thoughts: bool) -> list[JsonObject]:
    """Reasoning, text, calls, in this order; ids on the last of them."""
    text = message.get("content") or ""
    thoughts: list[str] = []
    if has_thoughts and "<think>" in text:
        thoughts = THOUGHT.findall(text)
        text = THOUGHT.sub("", text)
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    items = written.output_items(
        reasoning_item(new_id("rs"), thoughts) if thoughts else None,
        message_item(new_id("msg"), [text_part(text)]),
        [call_item(call_id, function["name"], function["arguments"]) for call_id, function in calls],
        has_text=bool(text),
    )
    if message.get("prompt_token_ids") is not None:
        items[-1] |= {key: message[key] for key in TOKEN_FIELDS}
        if message.get(ROUTED_EXPERTS) is not None:
            items[-1][ROUTED_EXPERTS] = message[ROUTED_EXPERTS]
    return items


def usage(told: JsonMapping | None) -> JsonObject | None:
    if not told:
        return None
    cached = (told.get("prompt_tokens_details") or {}).get("cached_tokens")
    reasoned = (told.get("completion_tokens_details") or {}).get("reasoning_tokens")
    read, generated = told.get("prompt_tokens") or 0, told.get("completion_tokens") or 0
    return written.usage_body(read, generated, cached=cached, reasoned=reasoned)
