"""Shapes of JSON in OpenAI's APIs, as our own code writes them or has checked them."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from palestra.util.json_types import JsonMapping


class ChatFunction(TypedDict):
    """A function that a model may call."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[JsonMapping]
    """JSON Schema of the arguments."""
    strict: NotRequired[bool]


class ChatTool(TypedDict):
    """A tool in a chat request."""

    type: str
    function: ChatFunction
