"""How families of models write tool calls, by name. Begin at `registry`."""

from __future__ import annotations

from palestra.chat.tool_formats.protocol import Block, BlockReader, ToolFormat
from palestra.chat.tool_formats.registry import TOOL_FORMATS, detect, register, tool_format

__all__ = ["TOOL_FORMATS", "Block", "BlockReader", "ToolFormat", "detect", "register", "tool_format"]
