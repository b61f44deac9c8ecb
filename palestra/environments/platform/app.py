"""An app: tables, what fills them, tools, task templates. Plain data; instances of it do the work."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Mapping, Set
from enum import StrEnum
from typing import Any

import msgspec

from palestra.environments.platform.people import Cast
from palestra.environments.platform.templates import TaskTemplate
from palestra.environments.platform.toolbox import Tool


class Size(StrEnum):
    """Of a seed: how much there is to look through."""

    TINY = "tiny"
    SMALL = "small"
    LARGE = "large"


class App(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    title: str
    description: str
    version: str
    """Of schema and seeds together: another one is another world."""
    schema: str
    fill: Callable[[sqlite3.Connection, random.Random, Size], Mapping[str, str]]
    """Puts rows into fresh tables, the same for the same numbers; returns the variables of a task in this world:
    LOGGED_IN_USER, LOGGED_IN_NAME, CURRENT_DATE."""
    fill_with: Callable[[sqlite3.Connection, random.Random, Size, Cast], Mapping[str, str]] | None = None
    """The same with people and a day that are given; None: it cannot be part of a world."""
    parts: tuple[App, ...] = ()
    """Of a world of several apps: those, in one database (`worlds.py`)."""
    tools: tuple[Tool, ...]
    templates: tuple[TaskTemplate, ...]
    fixed: Set[str] = frozenset()
    """Tables that no tool writes: they are not watched."""
    volatile: Mapping[str, Set[str]] = {}
    """Columns that no task looks at, by table."""

    @property
    def instructions(self) -> str:
        """For models that connect by MCP."""
        return f"{self.title}: {self.description}"

    def tool(self, name: str) -> Tool | None:
        return next((tool for tool in self.tools if tool.name == name), None)

    def template(self, name: str) -> TaskTemplate | None:
        return next((template for template in self.templates if template.name == name), None)

    def openai_tools(self) -> list[dict[str, Any]]:
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in self.tools
        ]
