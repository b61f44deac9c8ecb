"""The old name of `palestra.chat.tool_parsers`, for one version."""

from __future__ import annotations

from palestra.util.renamed import renamed

NEW = "palestra.chat.tool_parsers"
__getattr__ = renamed(
    __name__,
    Block=f"{NEW}:ToolCallBlock",
    BlockReader=f"{NEW}:ToolCallReader",
    TOOL_FORMATS=f"{NEW}:TOOL_FORMATS",
    ToolFormat=f"{NEW}:ToolParser",
    detect=f"{NEW}:detect",
    register=f"{NEW}:register",
    tool_format=f"{NEW}:tool_format",
)
