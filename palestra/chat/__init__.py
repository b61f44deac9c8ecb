"""Converts conversations to tokens, and finds tool calls in model output. Begin at `tokenizer`, then
`conversation_cache`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from palestra.chat.errors import ChatError
from palestra.chat.tool_calls import ParsedCall, ParseFailure, parse_tool_call

if TYPE_CHECKING:
    from palestra.chat.tokenizer import ChatTokenizer

__all__ = [
    "ChatError",
    "ChatTokenizer",
    "ParseFailure",
    "ParsedCall",
    "parse_tool_call",
]


def __getattr__(name: str) -> Any:
    """Imports ChatTokenizer on first use: environments parse tool calls where tokenizers and jinja2 are not
    installed."""
    if name == "ChatTokenizer":
        from palestra.chat.tokenizer import ChatTokenizer

        return ChatTokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
