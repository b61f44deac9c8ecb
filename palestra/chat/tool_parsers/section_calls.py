"""A section of calls between special tokens, each a name and JSON: DeepSeek and Kimi.

The two forms:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    <|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>…
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from palestra.chat.tool_calls import ParsedCall, read_json
from palestra.chat.tool_parsers import lark
from palestra.chat.tool_parsers.json_end import JsonEnd
from palestra.chat.tool_parsers.protocol import ToolCallBlock, ToolCallReader
from palestra.util.json_types import JsonMapping

LONGEST = 256  # characters before the JSON; a longer text is not a name


@dataclass(frozen=True, slots=True)
class SectionFormat:
    """The marks of a family around calls. A section's first call comes with the section's opening, later ones alone."""

    name: str
    opening: str
    call: str
    separator: str
    call_end: str
    closing: str
    head: str
    """Regular expression of what stands between `call` and the JSON; its group `name` is the function's."""
    before_name: str = ""
    after_name: str = ""
    """Regular expression of what the model writes between the name and the separator."""
    fence: str = ""
    """What may stand between the JSON and `call_end`."""

    @property
    def markers(self) -> tuple[str, ...]:
        return self.opening, self.call

    @property
    def openings(self) -> tuple[str, ...]:
        return ()

    @property
    def tags(self) -> tuple[str, ...]:
        return self.opening, self.call, self.separator, self.call_end, self.closing

    def block(self, marker: str) -> ToolCallReader:
        begin = rf"\s*{re.escape(self.call)}" if marker == self.opening else ""
        return _Reader(self, re.compile(rf"{begin}\s*{self.head}\s*(?=\{{)"))

    def grammar(self, tools: Sequence[JsonMapping], *, parallel: bool, special: Mapping[str, int]) -> str:
        opening, call, separator, end, closing = (lark.tag(text, special) for text in self.tags)
        several = "calls_block+" if parallel else "calls_block"
        after = f" /{self.after_name}/" if self.after_name else ""
        return lark.rules(
            [f"calls: {opening} {several} {closing}", f"calls_block: {call} calls_one {end}"],
            tools,
            lambda name, arguments: f"{lark.literal(self.before_name + name)}{after} {separator} {arguments}",
        )


class _Reader:
    """Reads one call. It ends with its closing token; if the model forgot it, at the next token or at the end."""

    def __init__(self, form: SectionFormat, head: re.Pattern[str]) -> None:
        self._form, self._pattern = form, head
        self._head, self._written, self._after = "", "", ""
        self._json: JsonEnd | None = None
        self._name = ""
        self._call: ParsedCall | None = None

    def feed(self, text: str) -> ToolCallBlock | None:
        if self._json is None:
            self._head += text
            found = self._pattern.match(self._head[:LONGEST])
            if found is None:
                return ToolCallBlock(rest=self._head) if len(self._head) >= LONGEST else None
            self._name, text = found["name"], self._head[found.end() :]
            self._head, self._json = self._head[: found.end()], JsonEnd()
        if self._call is None:
            ended = self._json.feed(text)
            if ended is None:
                return None
            self._written, text = ended.text, ended.rest
            value = None if ended.is_broken else read_json(ended.text)
            if not isinstance(value, dict):
                return ToolCallBlock(text=self._head + ended.text, rest=ended.rest)
            self._call = ParsedCall(name=self._name, arguments=value)
        self._after += text
        return self._end(self._call, at_end=False)

    def finish(self) -> ToolCallBlock:
        if self._json is None:
            return ToolCallBlock(rest=self._head)
        found = self._end(self._call, at_end=True) if self._call else None
        return found or ToolCallBlock(text=self._head + self._json.fed)

    def _end(self, call: ParsedCall, at_end: bool) -> ToolCallBlock | None:
        form, rest = self._form, self._after.lstrip()
        for expected in filter(None, (form.fence, form.call_end)):
            if expected.startswith(rest) and rest != expected and not at_end:
                return None
            if rest.startswith(expected):
                rest = rest[len(expected) :].lstrip()
            elif expected == form.call_end:  # forgotten
                is_token = rest[:1] in ("<", "")
                return ToolCallBlock(calls=[call], rest=rest) if is_token else self._unreadable()
        if rest.startswith(form.closing):
            return ToolCallBlock(calls=[call], rest=rest[len(form.closing) :])
        return None if form.closing.startswith(rest) and not at_end else ToolCallBlock(calls=[call], rest=rest)

    def _unreadable(self) -> ToolCallBlock:
        return ToolCallBlock(text=self._head + self._written, rest=self._after)


_NAME = r"(?P<name>[\w.-]+)"
_SEP = "<｜tool▁sep｜>"
DEEPSEEK = SectionFormat(
    name="deepseek",
    opening="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>",
    separator=_SEP,
    call_end="<｜tool▁call▁end｜>",
    closing="<｜tool▁calls▁end｜>",
    # V3 and R1 write the type first, and JSON between fences; V3.1 does not.
    head=rf"(?:function{re.escape(_SEP)})?{_NAME}(?:{re.escape(_SEP)}|\s*```json)",
    fence="```",
)
KIMI = SectionFormat(
    name="kimi",
    opening="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    closing="<|tool_calls_section_end|>",
    head=rf"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*{re.escape('<|tool_call_argument_begin|>')}",
    before_name="functions.",
    after_name=":[0-9]{1,3}",
)
