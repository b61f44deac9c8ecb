"""Short conversations in the place of long ones, with marks by which what a template made of them is found.

Owns: what stands in for a turn, for tools, for the end of an open answer. Never touches: templates, tokens.
"""

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
        self._words, self._thought, self._arguments, self._tool = (text.mark("S", number) for number in range(4))
        self._end = text.mark("E")
        self._said = re.compile("|".join((self._words, self._thought, self._arguments)))
        parameters = {"type": "object", "properties": {}}
        function = {"name": self._tool, "description": self._tool, "parameters": parameters}
        self.tools = [{"type": "function", "function": function}]

    def turn(self, message: Message, thought: bool) -> JsonObject:
        """A message of the same shape."""
        calls = message.get("tool_calls") or ()
        words = self._words if message.get("content") or not calls else ""
        placeholder: JsonObject = {"role": "assistant", "content": words}
        if thought:
            placeholder["reasoning_content"] = self._thought
        if calls:
            placeholder["tool_calls"] = [
                {**call, "function": {"name": call["function"]["name"], "arguments": {"argument": self._arguments}}}
                for call in calls
            ]
        return placeholder

    def is_all_shown(self, placeholder: Message, text: str) -> bool:
        """Whether all that a turn says is in a text."""
        marks = [placeholder["content"], placeholder.get("reasoning_content", "")]
        return all(mark in text for mark in marks) and ("tool_calls" not in placeholder or self._arguments in text)

    def after(self, text: str) -> str | None:
        """What comes after a turn; None where none of it is shown."""
        ends = [found.end() for found in self._said.finditer(text)]
        return text[ends[-1] :] if ends else None

    def has_tools(self, text: str) -> bool:
        return self._tool in text

    def left_open(self, messages: Sequence[Message]) -> list[Message]:
        """With a mark after the last word."""
        *before, last = messages
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise ChatError("the last message cannot be continued: it must be the assistant's, without tool calls")
        # The space shows whether the template strips what is said; transformers has the same trick.
        return [*before, {**last, "content": f"{last.get('content') or ''}{self._end} "}]

    def cut_at_end(self, text: str) -> str:
        """Up to the last word of an answer that was left open."""
        before, found, after = text.rpartition(self._end)
        if not found:
            raise ChatError("the last message cannot be continued: the chat template does not show it")
        return before if after.startswith(" ") else before.rstrip()
