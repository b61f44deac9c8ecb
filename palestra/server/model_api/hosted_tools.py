"""Tools that a vendor would run or has taught its own models: the server has none of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid

TOOLS = "tools."
"""Begins the names of tools among what was ignored."""


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """The server's settings of the same names."""

    hosted_tools: Literal["leave_out", "refuse"] = "leave_out"
    tool_namespaces: Literal["flatten", "leave_out"] = "flatten"


@dataclass(frozen=True, slots=True)
class LeftOutTools:
    """The tools of one request that are left out of the prompt."""

    settings: ToolSettings
    ignored: list[str] = field(default_factory=list)

    def take(self, kind: object, where: str) -> None:
        if self.settings.hosted_tools == "refuse" or not isinstance(kind, str):
            detail = f"a tool of type {shown(kind)} is not supported; only functions that the client runs are"
            raise invalid(where, f"{where}: {detail}", code="unsupported")
        self.note(kind)

    def note(self, name: str) -> None:
        self.ignored.append(f"{TOOLS}{name}")
