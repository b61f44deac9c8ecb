"""Tools of an environment: methods marked with `@tool` in a `ToolGroup`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from palestra.types.openai import ChatTool
from palestra.util.json_types import JsonObject

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


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

    def specs(self) -> list[ChatTool]:
        """Returns the tools in OpenAI's format, as far as the methods' signatures say."""
        return [_spec(name, method) for name, method in self._tools.items()]


def _spec(name: str, method: Callable[..., Any]) -> ChatTool:
    parameters = inspect.signature(method, eval_str=True).parameters
    schemas = {key: _schema(one.annotation) for key, one in parameters.items()}
    required = [key for key, one in parameters.items() if one.default is inspect.Parameter.empty]
    schema = {"type": "object", "properties": schemas, "required": required}
    return {"type": "function", "function": {"name": name, "description": method.__doc__ or "", "parameters": schema}}


def _schema(annotation: Any) -> JsonObject:
    known = JSON_TYPES.get(getattr(annotation, "__origin__", annotation))
    return {} if known is None else {"type": known}
