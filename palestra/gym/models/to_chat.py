"""A Responses request as a chat request.

Owns: NeMo Gym's rules for items, tools and fields in this direction. Never touches: settings of a server, the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from palestra.gym.models.errors import BadRequest, Place
from palestra.gym.records import TOKEN_FIELDS

Item = Mapping[str, Any]
Message = dict[str, Any]

SAME = ("metadata", "service_tier", "store", "temperature", "top_p", "user")
"""Fields that both APIs have in the same words."""


def chat_request(params: Mapping[str, Any], *, with_ids: bool) -> dict[str, Any]:
    """`params` as `requests.checked` gives them; the model's name is the caller's to add."""
    given = params["input"]
    if isinstance(given, str):
        messages: list[Message] = [{"role": "user", "content": [{"type": "text", "text": given}]}]
    else:
        messages = _Conversation(with_ids).read(given)
    instructions = params.get("instructions")
    if instructions:
        messages = _instructed(instructions, messages)
    body: dict[str, Any] = {"messages": messages}
    for key in SAME:
        if key in params:
            body[key] = params[key]
    if "max_output_tokens" in params:
        body["max_tokens"] = params["max_output_tokens"]
    if params.get("top_logprobs"):
        body |= {"logprobs": True, "top_logprobs": params["top_logprobs"]}
    effort = params.get("reasoning", {}).get("effort")
    if effort is not None:
        body["reasoning_effort"] = effort
    return body | _tools(params) | _format(params)


class _Conversation:
    """What the assistant says between two others is one message: reasoning, text, calls."""

    def __init__(self, with_ids: bool) -> None:
        self._with_ids = with_ids
        self._messages: list[Message] = []
        self._said: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._ids: dict[str, Any] | None = None
        self._last: tuple[Message, dict[str, Any]] | None = None

    def read(self, items: list[Item]) -> list[Message]:
        for at, item in enumerate(items):
            kind = item.get("type") or "message"
            take = _TAKERS.get(kind)
            if take is None:
                raise BadRequest(("input", at, "type"), f"an item of type {kind!r} has no form in a chat", given=kind)
            try:
                take(self, item, ("input", at))
            except (KeyError, TypeError, AttributeError) as e:
                raise BadRequest(("input", at), f"not a whole {kind} item ({type(e).__name__}: {e})") from None
            if self._with_ids and item.get("prompt_token_ids"):
                self._ids = {key: item[key] for key in TOKEN_FIELDS}
                if item.get("routed_experts") is not None:
                    self._ids["routed_experts"] = item["routed_experts"]
        self._flush()
        if self._last is not None:  # of several the last one counts: the others would only be bytes
            message, ids = self._last
            message |= ids
        return self._messages

    def _flush(self) -> None:
        if self._said or self._calls:
            message: Message = {"role": "assistant", "content": "".join(self._said) or None}
            if self._calls:
                message["tool_calls"] = self._calls
            self._messages.append(message)
            if self._ids is not None:
                self._last = (message, self._ids)
            self._said, self._calls = [], []
        self._ids = None

    def message(self, item: Item, place: Place) -> None:
        role, content = item["role"], item.get("content")
        if role == "assistant":
            said = _spoken(content)
            if said:
                self._said.append(said)
            return
        self._flush()
        if isinstance(content, list):
            content = [_part(part, (*place, "content", at)) for at, part in enumerate(content)]
        elif not isinstance(content, str):
            raise BadRequest((*place, "content"), "Input should be text or a list of parts", given=content)
        self._messages.append({"role": role, "content": content})

    def reasoning(self, item: Item, place: Place) -> None:
        del place
        texts = [one["text"] for one in item.get("summary") or ()]
        self._said.extend(f"<think>{text}</think>" for text in texts if text)

    def call(self, item: Item, place: Place) -> None:
        del place
        function = {"arguments": item["arguments"], "name": item["name"]}
        self._calls.append({"id": item["call_id"], "type": "function", "function": function})

    def output(self, item: Item, place: Place) -> None:
        self._flush()
        output = item["output"]
        if isinstance(output, list):
            output = [_only_text(part, (*place, "output", at)) for at, part in enumerate(output)]
        self._messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})


_TAKERS: dict[str, Callable[[_Conversation, Item, Place], None]] = {
    "message": _Conversation.message,
    "reasoning": _Conversation.reasoning,
    "function_call": _Conversation.call,
    "function_call_output": _Conversation.output,
}


def _spoken(content: Any) -> str:
    """An assistant's text; a turn of calls alone has none."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or part.get("refusal") or "" for part in content)


def _part(part: Item, place: Place) -> dict[str, Any]:
    match part.get("type"):
        case "input_text":
            return {"type": "text", "text": part["text"]}
        case "input_image" if isinstance(part.get("image_url"), str):
            return {
                "type": "image_url",
                "image_url": {"url": part["image_url"], "detail": part.get("detail") or "auto"},
            }
        case "input_video" if isinstance(part.get("video_url"), str):
            return {"type": "video_url", "video_url": {"url": part["video_url"]}}
        case kind:
            raise BadRequest(
                place, f"a part of type {kind!r} has no form in a chat: text, or the URL of an image or video"
            )


def _only_text(part: Item, place: Place) -> dict[str, Any]:
    if part.get("type") != "input_text":
        raise BadRequest(place, f"a tool's output holds text only, not a part of type {part.get('type')!r}")
    return {"type": "text", "text": part["text"]}


def _instructed(instructions: str, messages: list[Message]) -> list[Message]:
    """One system message with all that comes before the conversation: many templates know no second one."""
    parts, at = [instructions], 0
    while at < len(messages) and messages[at]["role"] in ("system", "developer"):
        content = messages[at]["content"]
        parts.append(content if isinstance(content, str) else "".join(part.get("text", "") for part in content))
        at += 1
    return [{"role": "system", "content": "\n\n".join(parts)}, *messages[at:]]


def _tools(params: Mapping[str, Any]) -> dict[str, Any]:
    tools, choice = params.get("tools"), params.get("tool_choice")
    if not tools:
        if choice == "required":
            raise BadRequest(("tool_choice",), "tool_choice='required' requires at least one tool")
        return {}
    chosen: dict[str, Any] = {"tools": [_tool(tool, at) for at, tool in enumerate(tools)]}
    if choice is not None:
        chosen["tool_choice"] = _choice(choice)
    if "parallel_tool_calls" in params:
        chosen["parallel_tool_calls"] = params["parallel_tool_calls"]
    return chosen


def _tool(tool: Any, at: int) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function" or "name" not in tool:
        kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
        raise BadRequest(("tools", at), f"only function tools, with a name, have a form in a chat; this is {kind!r}")
    kept = {key: value for key, value in tool.items() if key not in ("type", "strict") and value is not None}
    return {"type": "function", "function": kept}


def _choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "allowed_tools":
            tools = [{"type": "function", "function": {"name": one.get("name")}} for one in choice.get("tools") or ()]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
        case kind:
            raise BadRequest(("tool_choice",), f"a choice of type {kind!r} has no form in a chat", given=choice)


def _format(params: Mapping[str, Any]) -> dict[str, Any]:
    asked = params.get("text", {}).get("format")
    if not isinstance(asked, dict) or asked.get("type", "text") == "text":
        return {}
    if asked["type"] == "json_schema":
        schema = {key: value for key, value in asked.items() if key != "type"}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"response_format": asked}
