"""An answer as the Responses API writes it: items, and around them the request told back.

Owns: the JSON. Never touches: how an answer came about.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.chat import ChatTokenizer
from palestra.server.model_api.chat.events import ChatAnswer, Choice, DrawnToken, Finish, ToolCall, Usage
from palestra.server.model_api.chat.token_names import LOWEST, Names
from palestra.server.model_api.responses.schemas import ResponsesRequest

Item = dict[str, Any]

TOLD_BACK = (
    *("background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id"),
    *("prompt", "reasoning", "service_tier", "temperature", "text", "top_logprobs", "top_p", "truncation", "user"),
)
"""Fields of a request that its response has too, null where nothing was said."""


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True)
class Header:
    """What a response has from its beginning to its end."""

    call: ResponsesRequest
    response_id: str = field(default_factory=lambda: new_id("resp"))
    created_at: float = field(default_factory=time.time)

    def body(self, status: str, output: Sequence[Item] = (), **more: Any) -> dict[str, Any]:
        call = self.call
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "model": call.model,
            "status": status,
            "output": list(output),
            "usage": None,
            "incomplete_details": None,
            "error": None,
            "tool_choice": "auto" if call.tool_choice is None else call.tool_choice,
            "parallel_tool_calls": call.parallel_tool_calls is not False,
            "tools": call.tools or [],
            **{name: getattr(call, name, None) for name in TOLD_BACK},
            **more,
        }

    def ended(self, answer: ChatAnswer, output: Sequence[Item]) -> dict[str, Any]:
        is_cut = answer.choices[0].finish is Finish.LENGTH
        return self.body(
            "incomplete" if is_cut else "completed",
            output,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage=_usage(answer.usage),
            trace_id=answer.trace_id,
        )


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def response_body(header: Header, answer: ChatAnswer) -> dict[str, Any]:
    return header.ended(answer, _output(header.call, answer))


def _output(call: ResponsesRequest, answer: ChatAnswer) -> list[Item]:
    """Reasoning, text, calls; an empty text only where there is nothing else."""
    (choice,) = answer.choices
    items: list[Item] = []
    if choice.reasoning:
        items.append(reasoning_item(new_id("rs"), choice.reasoning.lstrip("\n")))
    if choice.content or not (items or choice.calls):
        logprobs = entries(call, answer.tokenizer, choice.tokens)
        items.append(message_item(new_id("msg"), choice.content or "", logprobs, ending_of(choice)))
    items += [call_item(one) for one in choice.calls]
    return with_tokens(call, answer, items)


def with_tokens(call: ResponsesRequest, answer: ChatAnswer, items: list[Item]) -> list[Item]:
    """NeMo Gym's fields, on the last item of the call, if they were asked for."""
    if call.return_token_ids:
        sequence = answer.choices[0].sequence
        items[-1] |= {
            "prompt_token_ids": list(answer.prompt),
            "generation_token_ids": list(sequence.tokens),
            "generation_log_probs": [max(logprob, LOWEST) for logprob in sequence.logprobs],
        }
    return items


def ending_of(choice: Choice) -> str:
    """Of its text: calls after it were whole."""
    return "incomplete" if choice.finish is Finish.LENGTH and not choice.calls else "completed"


def entries(call: ResponsesRequest, tokenizer: ChatTokenizer, tokens: Sequence[DrawnToken]) -> list[dict[str, Any]]:
    """Logprobs, if they were asked for: of all that was drawn, as chat completions tell it, thinking and calls too."""
    if not call.wants_logprobs:
        return []
    return Names(tokenizer, bool(call.return_tokens_as_token_ids)).entries(tokens)


# Items


def reasoning_item(item_id: str, text: str | None) -> Item:
    """The whole of it as a summary: what clients show and send back. None: not yet."""
    summary = [] if text is None else [summary_part(text)]
    return {"id": item_id, "type": "reasoning", "summary": summary, "encrypted_content": None}


def summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def message_item(item_id: str, text: str | None, logprobs: Sequence[dict[str, Any]], status: str) -> Item:
    content = [] if text is None else [text_part(text, logprobs)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def text_part(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def call_item(call: ToolCall, *, arguments: str | None = None, status: str = "completed") -> Item:
    return {
        "id": call.id,
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments if arguments is None else arguments,
        "status": status,
    }
