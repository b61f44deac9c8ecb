"""Layouts of rows that other tools use, and conversion between them without losing anything silently.

| layout | |
| --- | --- |
| `messages` | `messages`: OpenAI's, and ours for SFT |
| `prompt-completion` | `prompt`, `completion`: text or messages |
| `sharegpt` | `conversations` of `from` and `value` |
| `preferences` | `prompt`, `chosen`, `rejected`: ours for DPO |
| `prompts` | `prompt`: tasks of an environment |

All other fields of a row stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct, field

from palestra.data.conversations import conversation_of, pair_of
from palestra.data.errors import DatasetError
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonObject

FROM_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
TO_SHAREGPT = {"system": "system", "user": "human", "assistant": "gpt", "tool": "tool"}


class Layout(StrEnum):
    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt-completion"
    SHAREGPT = "sharegpt"
    PREFERENCES = "preferences"
    PROMPTS = "prompts"


OWN_FIELDS = {
    Layout.MESSAGES: ("messages",),
    Layout.PROMPT_COMPLETION: ("prompt", "completion", "response"),
    Layout.SHAREGPT: ("conversations",),
    Layout.PREFERENCES: ("prompt", "chosen", "rejected"),
    Layout.PROMPTS: ("prompt",),
}


class Content(Struct):
    """The content of a row, whatever its layout."""

    prompt: list[Message] | None
    """None: all is in the answer, whose assistant turns are all learned."""
    answer: list[Message] = field(default_factory=list)
    rejected: list[Message] = field(default_factory=list)
    others: JsonObject = field(default_factory=dict)
    """Fields that are no part of the layout."""

    @property
    def messages(self) -> list[Message]:
        return [*(self.prompt or []), *self.answer]


def layout_of(row: JsonMapping) -> Layout:
    """Raises DatasetError, without a place."""
    if "chosen" in row and "rejected" in row:
        return Layout.PREFERENCES
    if "conversations" in row:
        return Layout.SHAREGPT
    if "messages" in row:
        return Layout.MESSAGES
    if "prompt" in row:
        return Layout.PROMPT_COMPLETION if "completion" in row or "response" in row else Layout.PROMPTS
    known = "messages, conversations, prompt, or chosen and rejected"
    raise DatasetError(f"unknown layout (it has {', '.join(map(repr, row)) or 'nothing'}); it should have {known}")


def convert_row(row: JsonMapping, to: Layout, *, lossy: bool) -> JsonObject:
    """Returns the row in another layout. Raises DatasetError, without a place, also if something would be lost and this
    is not allowed."""
    layout = layout_of(row)
    content = read_row(row, layout)
    losses: list[str] = []
    fields = _write(content, to, losses)
    clash = fields.keys() & content.others.keys()
    if clash:
        raise DatasetError(f"it has a field {min(clash)!r} already, which the layout {to} needs; rename it first")
    if losses and not lossy:
        raise DatasetError(f"{to} cannot say all of it: {'; '.join(losses)}; to convert it all the same: --lossy")
    return content.others | fields


def read_row(row: JsonMapping, layout: Layout) -> Content:
    others = {key: value for key, value in row.items() if key not in OWN_FIELDS[layout]}
    match layout:
        case Layout.MESSAGES:
            return Content(None, conversation_of(row).messages, others=others)
        case Layout.PROMPT_COMPLETION:
            found = conversation_of(row)
            return Content(found.messages[: found.first], found.messages[found.first :], others=others)
        case Layout.SHAREGPT:
            return _sharegpt(row["conversations"], others)
        case Layout.PREFERENCES:
            pair = pair_of(row if "prompt" in row else _with_prompt(row))
            first = pair.chosen.first
            return Content(
                pair.chosen.messages[:first],
                pair.chosen.messages[first:],
                pair.rejected.messages[first:],
                others,
            )
        case Layout.PROMPTS:
            prompt = row["prompt"]
            as_chat = {"messages": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt}
            return Content(conversation_of(as_chat).messages, others=others)


def _with_prompt(row: JsonMapping) -> JsonObject:
    """Finds the prompt in pairs that repeat it in both answers: the messages with which both begin."""
    chosen, rejected = row["chosen"], row["rejected"]
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        raise DatasetError("no 'prompt', and 'chosen' and 'rejected' are no messages that begin with it")
    shared = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        shared += 1
    if not shared or shared == min(len(chosen), len(rejected)):
        raise DatasetError("no 'prompt', and 'chosen' and 'rejected' do not begin alike and then differ")
    return {**row, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _sharegpt(turns: object, others: JsonObject) -> Content:
    """Reads turns, and the fields beside them that LLaMA-Factory has: `system`, and `tools` as the text of JSON."""
    messages = _from_sharegpt(turns)
    if isinstance(system := others.get("system"), str):
        del others["system"]
        messages = [{"role": "system", "content": system}, *messages] if system else messages
    if isinstance(tools := others.get("tools"), str):
        try:
            others["tools"] = msgspec.json.decode(tools) if tools.strip() else []
        except msgspec.DecodeError as error:
            raise DatasetError(f"'tools' is not valid JSON ({error})") from None
    conversation_of({"messages": messages, "tools": others.get("tools")})
    return Content(None, messages, others=others)


def _from_sharegpt(turns: object) -> list[Message]:
    if not isinstance(turns, list):
        raise DatasetError("'conversations' should be a list of turns with from and value")
    messages: list[Message] = []
    for place, turn in enumerate(turns):
        role, value = (turn.get("from"), turn.get("value")) if isinstance(turn, Mapping) else (None, None)
        if role == "function_call":
            messages.append({"role": "assistant", "content": None, "tool_calls": [_call(value, place)]})
        elif role in FROM_SHAREGPT and isinstance(value, str):
            rest = {key: one for key, one in turn.items() if key not in ("from", "value")}
            messages.append({"role": FROM_SHAREGPT[role], "content": value, **rest})
        else:
            known = ", ".join((*FROM_SHAREGPT, "function_call"))
            raise DatasetError(f"conversations[{place}]: it should have a text as value and from one of {known}")
    return messages


def _call(value: object, place: int) -> JsonObject:
    try:
        call = msgspec.json.decode(value) if isinstance(value, str) else {}
        return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
    except (msgspec.DecodeError, TypeError, KeyError, AttributeError):
        problem = f"conversations[{place}]: the value of a function_call should be JSON with name and arguments"
        raise DatasetError(problem) from None


def _write(content: Content, to: Layout, losses: list[str]) -> JsonObject:
    """The fields of the layout; what they cannot say is added to `losses`."""
    if content.rejected and to is not Layout.PREFERENCES:
        losses.append("the rejected answer")
    match to:
        case Layout.MESSAGES:
            if content.prompt and any(one["role"] == "assistant" for one in content.prompt):
                losses.append("that answers within the prompt are not learned")
            return {"messages": content.messages}
        case Layout.SHAREGPT:
            return {"conversations": [_turn(message, losses) for message in content.messages]}
        case Layout.PROMPT_COMPLETION:
            prompt, answer = _divided(content, losses)
            return {"prompt": _plain(prompt, "user"), "completion": _plain(answer, "assistant")}
        case Layout.PREFERENCES:
            if not content.rejected:
                raise DatasetError("there is no rejected answer, which preferences need")
            chosen, rejected = _plain(content.answer, "assistant"), _plain(content.rejected, "assistant")
            return {"prompt": _plain(content.prompt or [], "user"), "chosen": chosen, "rejected": rejected}
        case Layout.PROMPTS:
            prompt, answer = _divided(content, losses) if content.answer else (content.prompt or [], [])
            if answer:
                losses.append("the answer")
            return {"prompt": _plain(prompt, "user")}


def _divided(content: Content, losses: list[str]) -> tuple[list[Message], list[Message]]:
    """The prompt, and the last answer with what belongs to it."""
    if content.prompt is not None:
        return content.prompt, content.answer
    messages = content.answer
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise DatasetError("there is no text of the assistant")
    if places[-1] == 0:
        raise DatasetError("it begins with the assistant, so there is no prompt")
    if len(places) > 1:
        losses.append(f"that {len(places)} answers are learned, not only the last")
    if messages[places[-1] + 1 :]:
        losses.append("what follows the last answer")
    return messages[: places[-1]], messages[places[-1] : places[-1] + 1]


def _plain(messages: Sequence[Message], role: str) -> str | list[Message]:
    """Text, if this is one message that is nothing but text."""
    if len(messages) == 1 and messages[0].keys() == {"role", "content"} and messages[0]["role"] == role:
        content = messages[0]["content"]
        return content if isinstance(content, str) else list(messages)
    return list(messages)


def _turn(message: Message, losses: list[str]) -> JsonObject:
    role = message["role"]
    if role not in TO_SHAREGPT:
        losses.append(f"the role {role}")
    losses += [f"{key} of a message" for key, value in message.items() if key not in ("role", "content") and value]
    if not isinstance(content := message.get("content"), str) and content:
        losses.append("content that is no text")
    return {"from": TO_SHAREGPT.get(role, "human"), "value": content if isinstance(content, str) else ""}
