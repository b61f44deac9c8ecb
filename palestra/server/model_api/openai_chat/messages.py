"""Converts messages and tools of a request to the form that chat templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from palestra.chat.pictures import PictureMark
from palestra.chat.tool_calls import MAX_DEPTH, is_too_deep, read_json
from palestra.server.core.errors import ApiError
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonObject

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles, and what templates call them: few know `developer`."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of content parts, and the key of their text."""
NO_MARKS: Mapping[str, PictureMark] = {}
MAX_MESSAGES = 16384  # each is processed several times, however short it is
MAX_NAME = 128
MAX_IDS_SHOWN = 8
PROMPT_IDS, SAMPLED_IDS, LOGPROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
TOKEN_FIELDS = (PROMPT_IDS, SAMPLED_IDS, LOGPROBS)
"""Fields that NeMo Gym's agents carry along on answers."""


def read_messages(given: Sequence[Message], marks: Mapping[str, PictureMark] = NO_MARKS) -> list[Message]:
    """`marks`: what stands for pictures, by the places of their parts."""
    if not given:
        raise invalid("messages", "messages is empty; send at least one")
    if len(given) > MAX_MESSAGES:
        raise invalid("messages", f"messages: {len(given)} were sent, but at most {MAX_MESSAGES} are allowed")
    messages = [_message(message, f"messages[{i}]", marks) for i, message in enumerate(given)]
    calls = CallsSoFar()
    for i, message in enumerate(messages):
        calls.take(message, f"messages[{i}]")
    return messages


def read_tools(given: Sequence[JsonObject] | None) -> list[JsonObject] | None:
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)] if given else None


class CallsSoFar:
    """The tool calls of a conversation, message by message: a tool's result must belong to one of them."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self._has_answered = False

    def take(self, message: Message, where: str) -> None:
        if message["role"] == "assistant":
            self._has_answered = True
            self._ids.update((call["id"], None) for call in message.get("tool_calls", ()) if "id" in call)
        elif message["role"] == "tool":
            self._check(message.get("tool_call_id"), where)

    def _check(self, call_id: str | None, where: str) -> None:
        """Checks the id of a result. Without an id, as text environments send results, it belongs to the previous
        assistant message."""
        if call_id is None and not self._has_answered:
            raise _wrong(where, "this is a tool's result, but the assistant has not called a tool yet")
        if call_id is not None and call_id not in self._ids:
            known = ", ".join(map(shown, list(self._ids)[-MAX_IDS_SHOWN:])) or "none"
            raise _wrong(where, f"no call before it has the id {shown(call_id)}; ids of calls so far: {known}")


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """Token ids that came with a message: the whole conversation up to and including it."""

    ids: list[int]
    place: int


def given_tokens(given: Sequence[Message]) -> GivenTokens | None:
    """Returns the token ids of the last message that has them. Agents send them back as they got them, on each
    answer."""
    carrying = [place for place, message in enumerate(given) if any(message.get(k) is not None for k in TOKEN_FIELDS)]
    for place in carrying:
        if missing := [key for key in TOKEN_FIELDS if given[place].get(key) is None]:
            detail = f"{missing[0]} is missing; send all of {', '.join(TOKEN_FIELDS)} or none"
            raise _wrong(f"messages[{place}]", detail)
    if not carrying:
        return None
    last, where = given[carrying[-1]], f"messages[{carrying[-1]}]"
    if last.get("role") != "assistant":
        raise _wrong(where, f"{PROMPT_IDS} on a message that is not the assistant's")
    prompt, sampled = (_ids(last[key], f"{where}.{key}") for key in (PROMPT_IDS, SAMPLED_IDS))
    if not prompt:
        raise _wrong(f"{where}.{PROMPT_IDS}", "it is empty")
    if not isinstance(logprobs := last[LOGPROBS], list) or len(logprobs) != len(sampled):
        raise _wrong(f"{where}.{LOGPROBS}", f"it must be a list with one number for each of {SAMPLED_IDS}")
    return GivenTokens([*prompt, *sampled], carrying[-1])


def _ids(given: object, where: str) -> list[int]:
    if not isinstance(given, list) or not all(type(token) is int and 0 <= token < 2**31 for token in given):
        raise _wrong(where, "it must be a list of token ids")
    return given


def _message(given: Message, where: str, marks: Mapping[str, PictureMark]) -> Message:
    role = ROLES.get(role) if isinstance(role := given.get("role"), str) else None
    if role is None:
        raise _wrong(where, f"role is {shown(given.get('role'))}; it must be one of {', '.join(ROLES)}")
    calls = _calls(given.get("tool_calls"), f"{where}.tool_calls") if role == "assistant" else []
    content = given.get("content")
    if content is None and role != "assistant":
        raise _wrong(where, "content is missing")
    message: Message = {"role": role, "content": _text(content, f"{where}.content", marks)}
    if calls:
        message["tool_calls"] = calls
    for key in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (value := given.get(key)) is not None:
            if not isinstance(value, str):
                raise _wrong(where, f"{key} is {shown(value)}; it must be a string")
            message[key] = value
    if "reasoning" in message:
        message.setdefault("reasoning_content", message.pop("reasoning"))
    return message


def _text(content: object, where: str, marks: Mapping[str, PictureMark]) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "it must be a string, or a list of text parts")
    return "".join(_part(part, f"{where}[{i}]", marks) for i, part in enumerate(content))


def _part(part: Any, where: str, marks: Mapping[str, PictureMark]) -> str:
    if where in marks:
        return marks[where].text
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise _wrong(where, f"a part of type {shown(kind)}: this model reads text only", code="unsupported")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _wrong(where, f"{TEXT_PARTS[kind]} is {shown(text)}; it must be a string")
    return text


class RenderedFunction(TypedDict):
    name: str
    arguments: Any
    """An object, as templates expect it; text that could not be read as one stays text."""


class RenderedCall(TypedDict):
    """A tool call as chat templates read it."""

    id: NotRequired[str]
    type: str
    function: RenderedFunction


def _calls(given: object, where: str) -> list[RenderedCall]:
    if given is None:
        return []
    if not isinstance(given, list):
        raise _wrong(where, "it must be a list")
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(given)]


def _call(given: Any, where: str) -> RenderedCall:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(where, 'it must have the form {"type": "function", "function": {"name": …, "arguments": …}}')
    arguments = _arguments(function, where)
    call: RenderedCall = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": given["id"], **call} if isinstance(given.get("id"), str) else call


def _arguments(function: JsonObject, where: str) -> Any:
    """Parses arguments, as templates expect. Text that is not a JSON object, or one that templates could not handle,
    stays text."""
    given = function.get("arguments")
    if given is None or isinstance(given, dict):
        check_depth(given, f"{where}.function.arguments")
        return given or {}
    if not isinstance(given, str):
        raise _wrong(where, f"arguments are {shown(given)}; they must be JSON in a string")
    parsed = read_json(given or "{}")
    return parsed if isinstance(parsed, dict) else given


def check_depth(value: object, where: str) -> None:
    if is_too_deep(value):
        raise _wrong(where, f"it is nested more than {MAX_DEPTH} levels deep")


def _tool(given: JsonObject, where: str) -> JsonObject:
    """Returns the tool as it is: the template shows it to the model word for word."""
    check_depth(given, where)
    function = given.get("function")
    if given.get("type") != "function" or not isinstance(function, dict):
        raise _wrong(where, 'it must have the form {"type": "function", "function": {"name": …}}')
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise _wrong(where, f"function.name is {shown(name)}; it must be a string of 1 to {MAX_NAME} characters")
    if not isinstance(function.get("parameters") or {}, dict):
        raise _wrong(where, "function.parameters must be a JSON schema")
    if not isinstance(function.get("strict"), bool | None):
        raise _wrong(where, f"function.strict is {shown(function['strict'])}; it must be true or false")
    return given


def _wrong(where: str, detail: str, *, code: str | None = None) -> ApiError:
    return invalid(where, f"{where}: {detail}", code=code)
