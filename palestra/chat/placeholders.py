"""Short conversations that replace long ones while a template renders, with marks by which its output is found."""

from __future__ import annotations

import re
from collections.abc import Sequence

from palestra.chat.errors import ChatError
from palestra.chat.special_text import SpecialText
from palestra.util.json_types import JsonMapping, JsonObject

Message = JsonMapping

HELLO: Message = {"role": "user", "content": "Hello"}
WORDS: Message = {"role": "assistant", "content": "Words"}


class TemplatePlaceholders:
    def __init__(self, text: SpecialText) -> None:
        self._content, self._thought, self._arguments, self._tool = (text.mark("S", number) for number in range(4))
        self._end = text.mark("E")
        self._any = re.compile("|".join((self._content, self._thought, self._arguments)))
        parameters = {"type": "object", "properties": {}}
        function = {"name": self._tool, "description": self._tool, "parameters": parameters}
        self.tools = [{"type": "function", "function": function}]

    def turn(self, message: Message, thought: bool) -> JsonObject:
        """Returns a short message of the same shape."""
        calls = message.get("tool_calls") or ()
        content_mark = self._content if message.get("content") or not calls else ""
        placeholder: JsonObject = {"role": "assistant", "content": content_mark}
        if thought:
            placeholder["reasoning_content"] = self._thought
        if calls:
            placeholder["tool_calls"] = [
                {**call, "function": {"name": call["function"]["name"], "arguments": {"argument": self._arguments}}}
                for call in calls
            ]
        return placeholder

    def is_all_shown(self, placeholder: Message, text: str) -> bool:
        """Whether a text contains all parts of the placeholder."""
        marks = [placeholder["content"], placeholder.get("reasoning_content", "")]
        return all(mark in text for mark in marks) and ("tool_calls" not in placeholder or self._arguments in text)

    def after(self, text: str) -> str | None:
        """Returns what comes after a turn; None if no part of the turn is shown."""
        ends = [found.end() for found in self._any.finditer(text)]
        return text[ends[-1] :] if ends else None

    def has_tools(self, text: str) -> bool:
        return self._tool in text

    def left_open(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages with a mark after the last word."""
        *before, last = messages
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise ChatError("the last message cannot be continued: it must be the assistant's, without tool calls")
        # The space shows whether the template strips content; transformers uses the same trick.
        return [*before, {**last, "content": f"{last.get('content') or ''}{self._end} "}]

    def cut_at_end(self, text: str) -> str:
        """Returns the text up to the last word of an answer that was left open."""
        before, found, after = text.rpartition(self._end)
        if not found:
            raise ChatError("the last message cannot be continued: the chat template does not show it")
        return before if after.startswith(" ") else before.rstrip()
