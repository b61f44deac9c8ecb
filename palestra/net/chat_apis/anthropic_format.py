"""The words of Anthropic's Messages API for all who speak it: our client, the model endpoint, a gym's model servers.

That differs: the endpoint reads turns of a chat and refuses the rest, a gym reads items of Responses by NeMo Gym's
rules.
"""

from __future__ import annotations

from palestra.types.anthropic import MessageBlock, MessageEnding, MessageEvent, MessageHead
from palestra.util.json_types import JsonMapping, JsonPayload

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
"""Stop reasons by the finish reasons of chat completions."""
TOOL_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
"""Choices that name no tool, as OpenAI calls them."""
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "signature": ("signature_delta", "signature"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""What comes in pieces: the type of a piece, and the field that has it."""
PING: MessageEvent = {"type": "ping"}
MESSAGE_STOP: MessageEvent = {"type": "message_stop"}


def new_message(message_id: str, model: str) -> MessageHead:
    """Returns a message without its content."""
    return {"id": message_id, "type": "message", "role": "assistant", "model": model}


def tool_use(call_id: object, name: object, arguments: JsonMapping) -> MessageBlock:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def prompt_tokens(usage: JsonMapping) -> int:
    """Returns all tokens of the prompt: those from a cache are counted apart."""
    cached = (usage.get("cache_read_input_tokens"), usage.get("cache_creation_input_tokens"))
    return usage["input_tokens"] + sum(filter(None, cached))


# Events


def message_start(message: JsonPayload) -> MessageEvent:
    """Begins a message whose content and end are not known yet."""
    return {"type": "message_start", "message": {**message, "content": [], "stop_reason": None, "stop_sequence": None}}


def block_start(index: int, block: MessageBlock) -> MessageEvent:
    return {"type": "content_block_start", "index": index, "content_block": block}


def block_delta(index: int, kind: str, piece: str) -> MessageEvent:
    """Returns a piece of a block, or of its signature; see `DELTAS`."""
    delta, field = DELTAS[kind]
    return {"type": "content_block_delta", "index": index, "delta": {"type": delta, field: piece}}


def block_stop(index: int) -> MessageEvent:
    return {"type": "content_block_stop", "index": index}


def message_delta(ending: MessageEnding, usage: JsonPayload) -> MessageEvent:
    return {"type": "message_delta", "delta": ending, "usage": usage}
