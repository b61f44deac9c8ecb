"""Tools of an environment: methods marked with `@tool` in a `ToolGroup`.

Owns: finding and calling them by name. Never touches: how a policy writes a call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any


class tool:  # noqa: N801 - a decorator, called so in skyrl_gym
    """Marks a method of a ToolGroup as a tool, under the method's name."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.name: str = func.__name__
        self.__doc__ = func.__doc__

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self.func, instance)


class ToolGroup:
    """A set of tools of an environment: its methods that are marked with `tool`."""

    def __init__(self, name: str) -> None:
        self.name = name
        found = {key: getattr(type(self), key, None) for key in dir(type(self))}
        self._tools: dict[str, Callable[..., Any]] = {
            mark.name: getattr(self, key) for key, mark in found.items() if isinstance(mark, tool)
        }

    def get_name(self) -> str:
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        return self._tools.get(name)

    def get_tool_names(self) -> list[str]:
        return list(self._tools)

    def execute_tool(self, name: str, *args: object, **kwargs: object) -> object:
        found = self.get_tool(name)
        if found is None:
            raise ValueError(f"no tool {name!r} in the group {self.name!r} (it has {', '.join(self._tools) or 'none'})")
        return found(*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self._tools, self.name)
