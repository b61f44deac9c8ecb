"""Writes an answer as a Message: blocks in the order they were generated."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from itertools import groupby
from typing import NotRequired, TypedDict

from palestra.chat.output_parser import ContentPiece, ReasoningPiece
from palestra.net.chat_apis.anthropic_format import STOP_REASONS, new_message, tool_use
from palestra.server.model_api.anthropic_messages.schemas import MessagesRequest
from palestra.server.model_api.openai_chat.events import ChatAnswer, ChatChoice, ChatFinishReason, TokenUsage, ToolCall
from palestra.server.model_api.openai_chat.token_logprobs import LOWEST
from palestra.types.anthropic import MessageBlock, MessageEnding, MessageUsage
from palestra.util.json_types import JsonPayload

Piece = ReasoningPiece | ContentPiece | ToolCall


def whole(answer: ChatAnswer, call: MessagesRequest) -> JsonPayload:
    (choice,) = answer.choices
    ids = {"prompt_token_ids": list(answer.prompt)} if call.return_token_ids else {}
    return {
        **new_message(answer.response_id, answer.model),
        "content": blocks(choice.pieces, call),
        **ended(choice),
        "usage": usage(answer.usage),
        **ids,
        **extras(answer, call),
    }


def ended(choice: ChatChoice) -> MessageEnding:
    has_stop_sequence = choice.finish is ChatFinishReason.STOP and choice.stop is not None
    reason = "stop_sequence" if has_stop_sequence else STOP_REASONS[choice.finish]
    stop = choice.stop if isinstance(choice.stop, str) else None
    return {"stop_reason": reason, "stop_sequence": stop, "stop_details": None}


def usage(used: TokenUsage) -> MessageUsage:
    """Returns the usage. `input_tokens` are those that had to be read: Anthropic counts cached tokens separately."""
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens,
        "cache_read_input_tokens": used.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"thinking_tokens": used.reasoning_tokens},
    }


class MessageExtras(TypedDict):
    """Our extensions of a message."""

    trace_id: str
    token_ids: NotRequired[list[int]]
    logprobs: NotRequired[list[float]]


def extras(answer: ChatAnswer, call: MessagesRequest) -> MessageExtras:
    """Returns our extensions, which are known when the answer is complete."""
    if not call.return_token_ids:
        return {"trace_id": answer.trace_id}
    tokens = answer.choices[0].tokens
    ids, logprobs = [one.token for one in tokens], [max(one.logprob, LOWEST) for one in tokens]
    return {"trace_id": answer.trace_id, "token_ids": ids, "logprobs": logprobs}


# Blocks


def blocks(pieces: Iterable[Piece], call: MessagesRequest) -> list[MessageBlock]:
    """Returns blocks; neighbouring pieces of one kind are one block."""
    found: list[MessageBlock] = []
    for kind, group in groupby((piece for piece in pieces if not is_silent(piece)), key=type):
        if kind is ToolCall:
            calls = (one for one in group if isinstance(one, ToolCall))
            found += [tool_use(one.id, one.name, json.loads(one.arguments)) for one in calls]
            continue
        text = "".join(one.text for one in group if not isinstance(one, ToolCall))
        if kind is ReasoningPiece:
            thinking = text if call.shows_thinking else ""
            found.append({"type": "thinking", "thinking": thinking, "signature": signature(text)})
        else:
            found.append({"type": "text", "text": text})
    return found


def is_silent(piece: Piece) -> bool:
    """Whether a piece shows nothing, e.g. a think block that was opened and closed again."""
    return not isinstance(piece, ToolCall) and not piece.text


def signature(thought: str) -> str:
    """Returns a signature, which clients expect. It proves nothing, so it is not checked when the reasoning comes
    back."""
    return f"palestra-{blake2b(thought.encode(), digest_size=16).hexdigest()}"
