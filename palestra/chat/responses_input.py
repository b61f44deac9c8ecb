"""Converts a Responses request to a chat request: its items to messages, its tools and its format to those of a chat.

Everything that the model said between two inputs is one message: its reasoning, its text, its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from palestra.chat.errors import ChatError
from palestra.types.gym import ROUTED_EXPERTS, TOKEN_FIELDS
from palestra.types.openai import ChatTool, ChatToolCall, ContentPart
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonPayload

Item = JsonMapping
FieldPath = tuple[str | int, ...]
CallTokens: TypeAlias = dict[str, Any]
"""Token ids and logprobs of a call by the names in `TOKEN_FIELDS`, with `ROUTED_EXPERTS` where there are any."""

ROLES = ("user", "assistant", "system", "developer")
INSTRUCTING = ("system", "developer")
BLANK_LINE = {"type": "text", "text": "\n\n"}
SCHEMA_FIELDS = ("name", "description", "schema", "strict")
SHOWN = 100  # characters of the request's text in an error message


class ChatDialect(StrEnum):
    OURS = "ours"
    """Our own chat API: it reads the parts of either API, takes reasoning as a field, and token ids with every turn of
    the model. An item with ids is the last one of its turn."""
    PLAIN = "plain"
    """Any endpoint, by NeMo Gym's rules: the model's output is one text with its reasoning in think tags, an empty turn
    is left out, and only the last token ids are sent."""


class ItemError(ChatError):
    """An item, a tool or a choice that cannot be expressed in a chat request."""

    def __init__(
        self,
        place: FieldPath,
        detail: str,
        *,
        field: str | None = None,
        is_unsupported: bool = False,
        given: object = None,
    ) -> None:
        super().__init__(detail)
        self.place, self.field = place, field
        """The place in the request, and the wrong field there, if there is one."""
        self.is_unsupported = is_unsupported
        self.given = given


class LocatedMessage(NamedTuple):
    message: Message
    place: FieldPath
    """Place in the request; of several items, the first."""


@dataclass(slots=True)
class _Turn:
    """What the model has said so far in this turn."""

    place: FieldPath
    thoughts: list[str] = field(default_factory=list)
    content: list[Any] = field(default_factory=list)
    calls: list[ChatToolCall] = field(default_factory=list)
    tokens: CallTokens = field(default_factory=dict)


def chat_messages(
    given: str | Sequence[Item],
    instructions: str | None,
    dialect: ChatDialect,
    *,
    with_ids: bool = True,
    before: Sequence[LocatedMessage] = (),
) -> list[LocatedMessage]:
    """Converts the input to messages that come after those `before` it. Raises ItemError."""
    reader = _Reader(dialect, with_ids)
    reader.found += before
    if isinstance(given, str):
        is_plain = dialect is ChatDialect.PLAIN
        content = [{"type": "text", "text": given}] if is_plain else given
        reader.found.append(LocatedMessage({"role": "user", "content": content}, ("input",)))
    else:
        for at, item in enumerate(given):
            reader.read(item, ("input", at))
        reader.end()
    return _instructed(reader.found, instructions, dialect) if instructions else reader.found


class _Reader:
    def __init__(self, dialect: ChatDialect, with_ids: bool) -> None:
        self.found: list[LocatedMessage] = []
        self._is_plain, self._with_ids = dialect is ChatDialect.PLAIN, with_ids
        self._turn: _Turn | None = None
        self._last_ids: tuple[Message, CallTokens] | None = None
        """A message and its ids, in the plain dialect."""

    def read(self, item: Item, place: FieldPath) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "item_reference":
            detail = "items are not stored by id; send the item itself"
            raise ItemError(place, detail, field="type", is_unsupported=True, given=kind)
        if not isinstance(kind, str) or kind not in _KINDS:
            detail = f"type is {_shown(kind)}, which is not supported; send one of {', '.join(_KINDS)}"
            raise ItemError(place, detail, field="type", is_unsupported=True, given=kind)
        _KINDS[kind](self, item, place)
        if self._with_ids and (tokens := _tokens(item, place)):
            self._take_ids(tokens, item, place)

    def end(self) -> None:
        self._flush()
        if self._last_ids is not None:  # only the last ids count: others would only be more bytes
            message, ids = self._last_ids
            message |= ids

    def _take_ids(self, tokens: CallTokens, item: Item, place: FieldPath) -> None:
        if self._is_plain:
            if item.get(ROUTED_EXPERTS) is not None:
                tokens[ROUTED_EXPERTS] = item[ROUTED_EXPERTS]
            if self._turn is not None:
                self._turn.tokens = tokens
            return
        if self._turn is None:
            raise ItemError(place, f"{TOKEN_FIELDS[1]} is allowed only on output of the model")
        self._turn.tokens = tokens
        self._flush()

    def _flush(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None or (self._is_plain and not (turn.content or turn.calls)):
            return
        content = "".join(turn.content) if self._is_plain else turn.content
        message: Message = {"role": "assistant", "content": content or None}
        if turn.thoughts:
            message["reasoning_content"] = "\n".join(turn.thoughts)
        if turn.calls:
            message["tool_calls"] = turn.calls
        if not self._is_plain:
            message |= turn.tokens
        elif turn.tokens:
            self._last_ids = (message, turn.tokens)
        self.found.append(LocatedMessage(message, turn.place))

    def _assistant_turn(self, place: FieldPath) -> _Turn:
        if self._turn is None:
            self._turn = _Turn(place)
        return self._turn

    def _message(self, item: Item, place: FieldPath) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            detail = f"role is {_shown(role)}; it must be one of {', '.join(ROLES)}"
            raise ItemError(place, detail, field="role", given=role)
        if role == "assistant" and self._is_plain:
            self._assistant_turn(place).content += filter(None, [_text(content, (*place, "content"))])
        elif content is None:
            raise ItemError(place, "content is missing", field="content")
        elif role == "assistant":
            self._assistant_turn(place).content += _parts(content)
        else:
            self._flush()
            shown = _chat_content(content, place) if self._is_plain else content
            self.found.append(LocatedMessage({"role": role, "content": shown}, place))

    def _reasoning(self, item: Item, place: FieldPath) -> None:
        texts = _thoughts(item, "content", place) or _thoughts(item, "summary", place)
        turn = self._assistant_turn(place)
        if self._is_plain:
            turn.content += [f"<think>{text}</think>" for text in texts if text]
            return
        if not texts and item.get("encrypted_content"):
            detail = "reasoning encrypted elsewhere cannot be read; leave the item out"
            raise ItemError(place, detail, is_unsupported=True)
        turn.thoughts += texts

    def _call(self, item: Item, place: FieldPath) -> None:
        call_id, name, arguments = (_string(item, key, place) for key in ("call_id", "name", "arguments"))
        call: ChatToolCall = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant_turn(place).calls.append(call)

    def _output(self, item: Item, place: FieldPath) -> None:
        self._flush()
        call_id, output = _string(item, "call_id", place), item.get("output")
        if output is None:
            raise ItemError(place, "output is missing", field="output")
        if self._is_plain and isinstance(output, list):
            output = [_text_part(part, (*place, "output", at)) for at, part in enumerate(output)]
        self.found.append(LocatedMessage({"role": "tool", "tool_call_id": call_id, "content": output}, place))


_KINDS: dict[str, Callable[[_Reader, Item, FieldPath], None]] = {
    "message": _Reader._message,
    "reasoning": _Reader._reasoning,
    "function_call": _Reader._call,
    "function_call_output": _Reader._output,
}


def _instructed(found: list[LocatedMessage], instructions: str, dialect: ChatDialect) -> list[LocatedMessage]:
    """Joins the instructions and the system messages at the beginning: templates expect one system message, at the
    beginning."""
    count = next((at for at, one in enumerate(found) if one.message["role"] not in INSTRUCTING), len(found))
    contents = [instructions, *(one.message["content"] for one in found[:count])]
    content: Any = [part for one in contents for part in (BLANK_LINE, *_parts(one))][1:]
    if dialect is ChatDialect.PLAIN:
        content = "".join(part.get("text", "") for part in content)
    return [LocatedMessage({"role": "system", "content": content}, ("instructions",)), *found[count:]]


# Parts of items


def _parts(content: object) -> list[Any]:
    """Returns the parts; invalid content is refused where messages are read."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _text(content: object, place: FieldPath) -> str:
    """Returns the text of an assistant message; a turn that only makes calls has none."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise ItemError(place, "Input should be text or a list of parts", given=content)
    return "".join(str(part.get("text") or part.get("refusal") or "") for part in content)


def _chat_content(content: object, place: FieldPath) -> object:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ItemError(place, "content must be text or a list of parts", field="content", given=content)
    return [_chat_part(part, (*place, "content", at)) for at, part in enumerate(content)]


def _chat_part(part: Any, place: FieldPath) -> ContentPart:
    match part:
        case {"type": "input_image", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail") or "auto"}}
        case {"type": "input_video", "video_url": str(url)}:
            return {"type": "video_url", "video_url": {"url": url}}
        case _:
            return _text_part(part, place)


def _text_part(part: object, place: FieldPath) -> ContentPart:
    match part:
        case {"type": "input_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case _:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            detail = (
                f"a part of type {kind!r} is not supported; send text, or in a message the URL of an image or video"
            )
            raise ItemError(place, detail, given=part)


def _thoughts(item: Item, key: str, place: FieldPath) -> list[str]:
    """Returns reasoning; `content` has it in full, `summary` what is shown of it."""
    parts = item.get(key) or []
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise ItemError(place, f"{key} must be a list of texts")
    return [_string(part, "text", (*place, key, at)) for at, part in enumerate(parts)]


def _tokens(item: Item, place: FieldPath) -> CallTokens:
    """Returns the token ids, which are all on the last item of a call, or missing."""
    tokens = {key: value for key in TOKEN_FIELDS if (value := item.get(key)) is not None}
    if tokens and len(tokens) < len(TOKEN_FIELDS):
        missing = ", ".join(key for key in TOKEN_FIELDS if key not in tokens)
        raise ItemError(place, f"{missing} missing; send {', '.join(TOKEN_FIELDS)}, or none of them")
    return tokens


def _string(item: Item, key: str, place: FieldPath) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        whole = f"not a complete {item['type']}: " if item.get("type") == "function_call" else ""
        raise ItemError(place, f"{whole}{key} is {_shown(value)}; it must be a string")
    return value


def _shown(value: object) -> str:
    return repr(value)[:SHOWN]


# Tools and formats


def chat_tools(tools: Iterable[Any], without: Collection[str]) -> list[ChatTool]:
    """Converts tools. Empty fields and those in `without` are left out, because templates show the rest to the
    model."""
    return [_chat_tool(tool, {"type", *without}, ("tools", at)) for at, tool in enumerate(tools)]


def _chat_tool(tool: Any, without: Collection[str], place: FieldPath) -> ChatTool:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else type(tool).__name__
    if kind != "function":
        detail = f"a tool of type {_shown(kind)} is not supported; only functions that the client runs are"
        raise ItemError(place, detail, is_unsupported=True)
    function: Any = {key: value for key, value in tool.items() if key not in without and value not in (None, False)}
    return {"type": "function", "function": function}


def chat_tool_choice(choice: Any, dialect: ChatDialect) -> object:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": [*tools]}:
            if dialect is ChatDialect.PLAIN:
                names = [one.get("name") if isinstance(one, Mapping) else None for one in tools]
                tools = [{"type": "function", "function": {"name": name}} for name in names]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
        case Mapping():
            detail = f'{_shown(choice)} is not here; send auto, none, required or {{"type": "function", "name": …}}'
            raise ItemError(("tool_choice",), detail, is_unsupported=True, given=choice)
        case _:
            return choice


def chat_format(text_format: Any) -> JsonPayload | None:
    """Converts `text.format` to `response_format`; None: text. Kinds that only an endpoint knows are passed on."""
    match text_format:
        case {"type": "json_schema"}:
            given = {key: text_format[key] for key in SCHEMA_FIELDS if text_format.get(key) is not None}
            return {"type": "json_schema", "json_schema": given}
        case {"type": str(kind)} if kind != "text":
            return {**text_format}
        case _:
            return None
