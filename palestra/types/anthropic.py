"""Shapes of JSON in Anthropic's Messages API, as our own code writes them or has checked them.

They are dictionaries: unknown fields stay where they are.
"""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict  # `extra_items` comes with Python 3.15


class MessageBlock(TypedDict, extra_items=Any):
    """A block of a message's content: text, thinking, a call, the result of one."""

    type: str


class MessageUsage(TypedDict, extra_items=Any):
    input_tokens: int
    output_tokens: int


class MessageEnding(TypedDict, extra_items=Any):
    """How an answer ended."""

    stop_reason: str | None
    stop_sequence: str | None


class MessageHead(TypedDict):
    """An answer without its content."""

    id: str
    type: str
    role: str
    model: str


class AnthropicMessage(TypedDict, extra_items=Any):
    """A whole answer."""

    id: str
    type: str
    role: str
    model: str
    stop_reason: str | None
    stop_sequence: str | None
    content: list[MessageBlock]
    usage: MessageUsage


class MessageEvent(TypedDict, extra_items=Any):
    """An event of a streamed answer."""

    type: str
    index: NotRequired[int]
