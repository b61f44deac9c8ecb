"""The tool-call formats of model families, by name. Begin at `registry`."""

from __future__ import annotations

from palestra.chat.tool_parsers.protocol import (
    AnswerFormat,
    AnswerStart,
    CallFormat,
    OutputParser,
    ToolCallBlock,
    ToolCallReader,
    ToolParser,
    for_tools,
)
from palestra.chat.tool_parsers.registry import TOOL_FORMATS, detect, register, tool_format

__all__ = [
    "TOOL_FORMATS",
    "AnswerFormat",
    "AnswerStart",
    "CallFormat",
    "OutputParser",
    "ToolCallBlock",
    "ToolCallReader",
    "ToolParser",
    "detect",
    "for_tools",
    "register",
    "tool_format",
]
