"""Reading and joining Responses objects, as plain mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import msgspec
from msgspec import Struct

from palestra.chat.responses_output import ECHOED
from palestra.gym.errors import BadCall, BadReply, FieldProblem
from palestra.types.gym import PARAMS
from palestra.types.openai import ModelResponse, ResponseItem, ResponsesParams, ResponseUsage
from palestra.util.json_types import JsonMapping, JsonObject

PARAM_DEFAULTS: JsonObject = dict.fromkeys([*ECHOED, "include", "model", "store", "stream"]) | {
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
"""Defaults of `responses_create_params`; `input` has none."""
PARAM_NAMES = frozenset({*PARAM_DEFAULTS, "input"})


def checked_params(params: Any, where: list[str]) -> ResponsesParams:
    """Checks `responses_create_params`. Raises BadCall (422) as NeMo Gym does."""
    if not isinstance(params, dict):
        raise BadCall(422, [_problem("missing" if params is None else "dict_type", where, params)])
    problems = [_problem("extra_forbidden", [*where, name], params[name]) for name in params if name not in PARAM_NAMES]
    if not isinstance(params.get("input"), str | list):
        problems.append(_problem("missing", [*where, "input"], params.get("input")))
    if params.get("stream"):
        problems.append(_problem("literal_error", [*where, "stream"], params["stream"]))
    if problems:
        raise BadCall(422, problems)
    checked: Any = params
    return checked


def _problem(kind: str, where: list[str], given: object) -> FieldProblem:
    fields = {
        "missing": "Field required",
        "dict_type": "Input should be an object",
        "extra_forbidden": "Extra inputs are not permitted",
        "literal_error": "Input should be False: a rollout does not stream",
    }
    return {"type": kind, "loc": ["body", *where], "msg": fields[kind], "input": given}


def filled_row(row: JsonObject) -> JsonObject:
    """A row with all fields of the request filled in, as in NeMo Gym's rows."""
    return {**row, PARAMS: PARAM_DEFAULTS | row[PARAMS]}


def input_items(params: ResponsesParams) -> list[ResponseItem]:
    """Returns the input of a Responses request as items, also if it is a text."""
    given = params["input"]
    return [{"role": "user", "content": given, "type": "message"}] if isinstance(given, str) else given


def checked_response(found: Any, name: str) -> ModelResponse:
    """The answer of a model. Raises BadReply if it is not a Responses object."""
    if not _is_response(found):
        raise BadReply(f"{name} returned no Responses object: {str(found)[:500]}")
    return found


def _is_response(found: object) -> TypeGuard[ModelResponse]:
    output = found.get("output") if isinstance(found, dict) else None
    return isinstance(output, list) and all(isinstance(one, dict) and "type" in one for one in output)


def checked_object(found: object, name: str) -> JsonObject:
    """The JSON object in a server's answer. Raises BadReply if it is not an object."""
    if not isinstance(found, dict):
        raise BadReply(f"{name} returned no JSON object: {str(found)[:500]}")
    return found


class _Part(Struct):
    type: str
    text: str | None = None


class _Item(Struct):
    type: str
    content: Any = None


class _Given(Struct):
    output: list[_Item]


def check_given(response: object) -> None:
    """Checks a response to be graded. Raises BadCall (422) if it is not a Responses object."""
    try:
        items = msgspec.convert(response, _Given).output
        for item in items:
            if item.type == "message":
                parts = msgspec.convert(item.content, str | list[_Part] | None)
                if not isinstance(parts, str) and any(p.type == "output_text" and p.text is None for p in parts or ()):
                    raise msgspec.ValidationError("an `output_text` has no `text`")
    except msgspec.ValidationError as error:
        fields = f"Input should be a Responses object: {error}"
        problem = {"type": "type_error", "loc": ["body", "response"], "msg": fields, "input": response}
        raise BadCall(422, [problem]) from None


def checked_verdict(found: Any, name: str) -> JsonObject:
    """The verdict of a resources server. Raises BadReply if it cannot be trained on."""
    reward = found.get("reward") if isinstance(found, dict) else None
    if not isinstance(reward, int | float):
        raise BadReply(f"{name} returned no reward: {str(found)[:500]}")
    return found


def function_calls(output: list[ResponseItem]) -> list[ResponseItem]:
    """The function calls among the output items."""
    return [one for one in output if one["type"] == "function_call"]


def unanswered_calls(output: list[ResponseItem]) -> list[ResponseItem]:
    """Function calls without an output; of two with the same id, the last."""
    answered = {one.get("call_id") for one in output if one["type"] == "function_call_output"}
    return list(
        {one.get("call_id"): one for one in function_calls(output) if one.get("call_id") not in answered}.values()
    )


def has_message(output: list[ResponseItem]) -> bool:
    """Whether the output has a message of the assistant."""
    return any(one["type"] == "message" and one.get("role", "assistant") == "assistant" for one in output)


def output_text(response: JsonMapping) -> str:
    """The text of the assistant, without its reasoning."""
    parts: list[str] = []
    for item in response.get("output", ()):
        if item.get("type") != "message" or item.get("role", "assistant") != "assistant":
            continue
        content = item.get("content")
        if isinstance(content, str):
            parts.append(content)
        else:
            parts += [part["text"] for part in content or () if part.get("type") == "output_text"]
    return "".join(parts)


def tool_output(call_id: str | None, output: str) -> ResponseItem:
    """The item that answers a function call."""
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def user_message(text: str) -> ResponseItem:
    """The item of a user's message."""
    return {"type": "message", "role": "user", "content": text}


# Usage


def added_usage(total: ResponseUsage | None, one: ResponseUsage | None) -> ResponseUsage | None:
    """The sum of two usages; a detail that one of them lacks is left out."""
    if total is None or one is None:
        return one if total is None else total
    found: ResponseUsage = {}
    for name in {**total, **one}:
        found[name] = _added(total.get(name), one.get(name))
    return found


def _added(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return {name: _added(a.get(name), b.get(name)) for name in {**a, **b}}
    return None if a is None or b is None else a + b
