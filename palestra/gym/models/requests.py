"""Checks bodies of the Responses API by their keys; and adapts those that streaming harnesses send."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeGuard

from palestra.gym.errors import BadRequest
from palestra.types.gym import TOKEN_FIELDS
from palestra.types.openai import FunctionTool, ResponsesParams
from palestra.util.json_types import JsonMapping, JsonPayload

log = logging.getLogger(__name__)

NUMBER, LIST, TEXT = (int, float), (list,), (str,)

FIELDS: Mapping[str, tuple[type, ...]] = {
    "background": (bool,),
    "include": LIST,
    "input": (str, list),
    "instructions": TEXT,
    "max_output_tokens": (int,),
    "max_tool_calls": (int,),
    "metadata": (dict,),
    "model": TEXT,
    "parallel_tool_calls": (bool,),
    "previous_response_id": TEXT,
    "prompt": (dict,),
    "reasoning": (dict,),
    "service_tier": TEXT,
    "store": (bool,),
    "temperature": NUMBER,
    "text": (dict,),
    "tool_choice": (str, dict),
    "tools": LIST,
    "top_logprobs": (int,),
    "top_p": NUMBER,
    "truncation": TEXT,
    "user": TEXT,
    "stream": (bool,),
}
"""Fields of a plain request, and their types; null means absent."""

MEMORY = ("previous_response_id", "prompt", "background")
"""Fields that refer to something stored under an id, which no gym has: a conversation without its history would be
wrong."""

ROLES = ("user", "assistant", "system", "developer")
NAMESPACE = "__"


def checked(body: JsonMapping) -> ResponsesParams:
    """Returns the body without nulls. Raises BadRequest."""
    params: Any = {}
    for key, value in body.items():
        kinds = FIELDS.get(key)
        if kinds is None:
            raise BadRequest((key,), "Extra inputs are not permitted", kind="extra_forbidden", given=value)
        if value is None:
            continue
        if not isinstance(value, kinds) or (kinds in (NUMBER, (int,)) and isinstance(value, bool)):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise BadRequest((key,), f"Input should be {names}", kind="type_error", given=value)
        params[key] = value
    if "input" not in params:
        raise BadRequest(("input",), "Field required", kind="missing")
    for key in MEMORY:
        if params.get(key):
            raise BadRequest((key,), "responses are not stored by id; send the whole conversation as `input`")
    if isinstance(params["input"], list):
        for at, item in enumerate(params["input"]):
            _check_item(at, item)
    return params


def _check_item(at: int, item: object) -> None:
    if not isinstance(item, dict):
        raise BadRequest(("input", at), "Input should be an object", kind="type_error", given=item)
    kind = item.get("type")
    if not isinstance(kind, str | None):
        raise BadRequest(("input", at, "type"), "Input should be text", kind="type_error", given=kind)
    if kind is None and item.get("role") not in ROLES:
        raise BadRequest(("input", at, "type"), "an item needs a `type`, or a message's `role`", given=item)
    if kind == "message" and item.get("role") not in ROLES:
        raise BadRequest(("input", at, "role"), f"Input should be one of {', '.join(ROLES)}", given=item.get("role"))
    given = [key for key in TOKEN_FIELDS if item.get(key) is not None]
    if given and len(given) != len(TOKEN_FIELDS):
        missing = ", ".join(key for key in TOKEN_FIELDS if key not in given)
        raise BadRequest(("input", at), f"send all three token fields or none; missing: {missing}")


# Streaming harnesses


def fitted(body: JsonMapping) -> tuple[JsonPayload, dict[str, tuple[str, str]]]:
    """Converts a streaming harness's body to a plain one, and returns how the names of its grouped tools were joined.

    What a gym does not support is dropped and logged: losing a tool or a note is better than losing the rollout.
    """
    params = {key: value for key, value in body.items() if key in FIELDS and key != "stream"}
    dropped = [key for key in body if key not in FIELDS]
    if dropped:
        log.info("fields of a streaming request that are not supported: %s", ", ".join(sorted(map(str, dropped))))
    joined: dict[str, tuple[str, str]] = {}
    tools = _flattened(params.get("tools"), joined)
    items = params.get("input")
    if isinstance(items, list):
        params["input"] = [fit for one in items if (fit := _fit_item(one, tools, joined)) is not None]
    if tools:
        params["tools"] = tools
    else:
        params.pop("tools", None)
    return params, joined


def _flattened(tools: object, joined: dict[str, tuple[str, str]]) -> list[FunctionTool]:
    """Returns plain function tools; those of a namespace get one joined name."""
    flat: list[FunctionTool] = []
    for tool in tools if isinstance(tools, list) else ():
        if not isinstance(tool, dict):
            continue
        if _is_function(tool):
            flat.append(tool)
        elif tool.get("type") == "namespace":
            group = str(tool.get("name") or "")
            for one in tool.get("tools") or ():
                if _is_named(one):
                    name = f"{group}{NAMESPACE}{one['name']}"
                    joined[name] = (group, one["name"])
                    flat.append({**one, "type": "function", "name": name})
        else:
            log.warning("a tool of type %r cannot be converted to a function: dropped", tool.get("type"))
    return flat


def _is_function(tool: object) -> TypeGuard[FunctionTool]:
    return _is_named(tool) and tool.get("type") == "function"


def _is_named(tool: object) -> TypeGuard[FunctionTool]:
    """In a namespace, a tool may go without its type."""
    return isinstance(tool, dict) and isinstance(tool.get("name"), str)


CHAT_ITEMS = ("message", "reasoning", "function_call", "function_call_output")


def _fit_item(item: object, tools: list[FunctionTool], joined: dict[str, tuple[str, str]]) -> JsonPayload | None:
    if not isinstance(item, dict):
        return None
    kind = item.get("type") or ("message" if item.get("role") in ROLES else None)
    if kind == "additional_tools":
        tools.extend(_flattened(item.get("tools"), joined))
        return None
    if kind not in CHAT_ITEMS:
        log.warning("an input item of type %r in a streaming request is not supported: dropped", kind)
        return None
    if kind == "function_call" and item.get("namespace"):
        rest = {key: value for key, value in item.items() if key != "namespace"}
        return {**rest, "name": f"{item['namespace']}{NAMESPACE}{item.get('name')}"}
    return item
