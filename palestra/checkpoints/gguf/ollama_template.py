"""A model's chat template in the language of Ollama, where that can say the same.

Ollama does not read Jinja. What a template writes around texts, calls and results is found by rendering conversations
of marked words and cutting the text at these. A template that joins its parts in any other way is noticed, since
longer conversations then come out differently; it has no translation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palestra.chat.errors import ChatError
from palestra.util.json_types import JsonObject

Render = Callable[[Sequence[JsonObject], Sequence[JsonObject] | None, bool], str]
"""The text of a conversation: its messages, tools, and whether an answer is asked for."""
SYSTEM, TOOLS = "MARKSYSTEM", "MARKTOOLS"
_USERS, _ANSWERS, _RESULT = ("MARKUSERA", "MARKUSERB", "MARKUSERC"), ("MARKANSWERA", "MARKANSWERB"), "MARKRESULT"
Head = tuple[str, ...]
"""What comes before the first user's text: texts, and SYSTEM and TOOLS where these stand."""


@dataclass(frozen=True, slots=True)
class ToolTexts:
    head: Head
    head_with_system: Head
    between_tools: str
    whole: bool
    """A tool is shown as a whole, and not its `function` alone."""
    indent: int | None
    open: str
    """Between what begins an answer and the name of its first call."""
    middle: str
    """Between the name of a call and its arguments."""
    between: str
    close: str
    after_text: str
    """Between the text of an answer and its calls."""
    result: str
    result_end: str


@dataclass(frozen=True, slots=True)
class TemplateTexts:
    """What a chat template writes, part by part."""

    head: Head
    head_with_system: Head
    user: str
    """Before the text of every user but the first."""
    user_end: str
    answer: str
    answer_end: str
    prompt: str
    """What asks for an answer."""
    tools: ToolTexts | None
    """None: the template shows no tools, or in a way that Ollama's language has not."""


def read_texts(render: Render, stops: Sequence[str], bos: str) -> TemplateTexts | None:
    """`stops`: what ends a turn. `bos`: the token that Ollama puts before each prompt by itself, or nothing. None where
    the template cannot be said in Ollama's language."""

    def shown(messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None = None, asks: bool = False) -> str:
        return render(messages, tools, asks).removeprefix(bos)

    try:
        texts = _plain_texts(shown, stops)
        if texts is None or not _is_same(texts, shown, None):
            return None
    except ChatError:
        return None
    try:
        with_tools = replace(texts, tools=_tool_texts(shown, texts))
        return with_tools if with_tools.tools is not None and _is_same(with_tools, shown, _TOOLS) else texts
    except ChatError:
        return texts


def _plain_texts(shown: Callable[..., str], stops: Sequence[str]) -> TemplateTexts | None:
    turns = [_user(0), _answer(0), _user(1), _answer(1), _user(2)]
    marks = (_USERS[0], _ANSWERS[0], _USERS[1], _ANSWERS[1], _USERS[2])
    text, asking = shown(turns), shown(turns, asks=True)
    gaps, with_system = _cut(text, marks), _cut(shown([_system(), _user(0)]), (SYSTEM, _USERS[0]))
    if gaps is None or with_system is None or not asking.startswith(text):
        return None
    head, after_user, after_answer, *again, user_end = gaps
    if again != [after_user, after_answer] or not after_user.startswith(user_end) or with_system[2] != user_end:
        return None
    answer_end = _turn_end(after_answer, stops)
    return TemplateTexts(
        head=(head,),
        head_with_system=(with_system[0], SYSTEM, with_system[1]),
        user=after_answer.removeprefix(answer_end),
        user_end=user_end,
        answer=after_user.removeprefix(user_end),
        answer_end=answer_end,
        prompt=asking.removeprefix(text),
        tools=None,
    )


def _turn_end(text: str, stops: Sequence[str]) -> str:
    """The beginning of a text up to the first token that ends a turn, with the line's end behind it."""
    found = min(((text.index(stop), stop) for stop in stops if stop in text), default=None)
    if found is None:
        return ""
    end = found[0] + len(found[1])
    return text[: end + 1] if text[end : end + 1] == "\n" else text[:end]


def _tool_texts(shown: Callable[..., str], texts: TemplateTexts) -> ToolTexts | None:
    plain, with_system = shown([_user(0)], _TOOLS), shown([_system(), _user(0)], _TOOLS)
    form = next((form for form in _FORMS if all(_tool_json(tool, *form) in plain for tool in _TOOLS)), None)
    one, two, spoken = (shown([_user(0), call, _result(), _user(1)], _TOOLS) for call in (_CALL, _CALLS, _SPOKEN_CALL))
    if form is None or not texts.answer_end:
        return None
    first, second = (_tool_json(tool, *form) for tool in _TOOLS)
    between_tools = plain[plain.index(first) + len(first) : plain.index(second)]
    both = f"{first}{between_tools}{second}"
    heads = [_head(text.replace(both, TOOLS), texts.user_end) for text in (plain, with_system)]
    arguments = next((form for form in (_args("A"), _args("A", tight=True)) if form in one), "MARKNONE")
    gaps = _cut(one, (_USERS[0], "MARKCALLA", arguments, _RESULT, _USERS[1]))
    begin = texts.user_end + texts.answer
    if gaps is None or None in heads or not gaps[1].startswith(begin) or not gaps[4].endswith(texts.user):
        return None
    close, found, result = gaps[3].partition(texts.answer_end)
    later = _cut(two, (arguments, "MARKCALLB"))
    with_call = _cut(spoken, (_ANSWERS[0], "MARKCALLA"))
    open_ = gaps[1].removeprefix(begin)
    if not found or later is None or with_call is None or not with_call[1].endswith(open_):
        return None
    head, head_with_system = heads
    assert head is not None
    assert head_with_system is not None
    return ToolTexts(
        head=head,
        head_with_system=head_with_system,
        between_tools=between_tools,
        whole=form[0],
        indent=form[1],
        open=open_,
        middle=gaps[2],
        between=later[1],
        close=close,
        after_text=with_call[1].removesuffix(open_),
        result=result,
        result_end=gaps[4].removesuffix(texts.user),
    )


def _head(text: str, user_end: str) -> Head | None:
    """The parts before the first user's text, if nothing but the usual comes behind it."""
    before, _, behind = text.partition(_USERS[0])
    return tuple(re.split(f"({SYSTEM}|{TOOLS})", before)) if behind == user_end else None


def _cut(text: str, marks: Sequence[str]) -> list[str] | None:
    """What stands before, between and behind the marks, if each is there once, in this order."""
    if any(text.count(mark) != 1 for mark in marks):
        return None
    gaps = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            return None
        gaps.append(before)
    return [*gaps, text]


def _is_same(texts: TemplateTexts, shown: Callable[..., str], tools: list[JsonObject] | None) -> bool:
    """Whether parts that are put together are what the template writes."""
    talk = [_user(0), _answer(0), _user(1), _answer(1), _user(2)]
    if tools is not None:
        talk = [_user(0), _CALL, _result(), _answer(0), _user(1), _SPOKEN_CALL, _result(), _answer(1), _user(2)]
    talks = [messages for n in (len(talk), 1) for messages in (talk[:n], [_system(), *talk[:n]])]
    return all(compose(texts, messages, tools) == shown(messages, tools, True) for messages in talks)


def compose(texts: TemplateTexts, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None) -> str:
    """The prompt for an answer as Ollama writes it, but for the spaces in JSON."""
    by_role = {message["role"]: message.get("content") or "" for message in messages}
    head = texts.head_with_system if "system" in by_role else texts.head
    shown_tools = ""
    if tools and texts.tools is not None:
        head = texts.tools.head_with_system if "system" in by_role else texts.tools.head
        form = (texts.tools.whole, texts.tools.indent)
        shown_tools = texts.tools.between_tools.join(_tool_json(tool, *form) for tool in tools)
    fills = {SYSTEM: by_role.get("system", ""), TOOLS: shown_tools}
    text, starts = "", "".join(fills.get(part, part) for part in head)
    for message in messages:
        content = message.get("content") or ""
        match message["role"]:
            case "user":
                text += (texts.user if text else starts) + content + texts.user_end
            case "assistant":
                text += texts.answer + content + _calls_text(texts.tools, message) + texts.answer_end
            case "tool" if texts.tools is not None:
                text += texts.tools.result + content + texts.tools.result_end
    return text + texts.prompt


def _calls_text(tools: ToolTexts | None, message: JsonObject) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    if not calls or tools is None:
        return ""
    shown = [f"{call['name']}{tools.middle}{json.dumps(call['arguments'])}" for call in calls]
    return (tools.after_text if message.get("content") else "") + tools.open + tools.between.join(shown) + tools.close


_FORMS = [(whole, indent) for indent in (None, 4, 2) for whole in (True, False)]


def _tool_json(tool: JsonObject, whole: bool, indent: int | None) -> str:
    return json.dumps(tool if whole else tool["function"], ensure_ascii=False, indent=indent)


def _args(letter: str, *, tight: bool = False) -> str:
    return json.dumps({"key": f"MARKVALUE{letter}"}, separators=(",", ":") if tight else None)


def _call(letter: str) -> JsonObject:
    return {"type": "function", "function": {"name": f"MARKCALL{letter}", "arguments": {"key": f"MARKVALUE{letter}"}}}


def _calling(text: str, *letters: str) -> JsonObject:
    return {"role": "assistant", "content": text, "tool_calls": [_call(letter) for letter in letters]}


_CALL, _CALLS, _SPOKEN_CALL = _calling("", "A"), _calling("", "A", "B"), _calling(_ANSWERS[0], "A")


def _system() -> JsonObject:
    return {"role": "system", "content": SYSTEM}


def _user(number: int) -> JsonObject:
    return {"role": "user", "content": _USERS[number]}


def _answer(number: int) -> JsonObject:
    return {"role": "assistant", "content": _ANSWERS[number]}


def _result() -> JsonObject:
    return {"role": "tool", "content": _RESULT, "name": "MARKCALLA", "tool_call_id": "call00000"}


def _tool(name: str) -> JsonObject:
    key: dict[str, Any] = {"key": {"type": "string"}}
    parameters = {"type": "object", "properties": key, "required": ["key"]}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}


_TOOLS = [_tool("MARKTOOLA"), _tool("MARKTOOLB")]
