"""Unfinished items of a streamed response, and their events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from palestra.chat.responses_output import message_item, new_id, reasoning_item, summary_part, text_part
from palestra.server.model_api.openai_chat.events import ToolCall
from palestra.server.model_api.openai_responses.tools import ResponseTools
from palestra.types.openai import LogprobEntry, ResponseItem
from palestra.util.json_types import JsonMapping

IN_PROGRESS = "in_progress"


class ResponseEvent(NamedTuple):
    """An event, without its number."""

    kind: str
    says: JsonMapping


class OpenItem(Protocol):
    index: int

    def begin(self) -> Iterator[ResponseEvent]: ...

    def end(self) -> Iterator[ResponseEvent]:
        """Yields the events of the end, except for the one with the whole item."""
        ...

    def item(self) -> ResponseItem:
        """Returns the item as it is by now."""
        ...


class OpenReasoning:
    def __init__(self, index: int):
        self.index, self._id, self._text = index, new_id("rs"), ""
        self._at = {"item_id": self._id, "output_index": index, "summary_index": 0}

    def begin(self) -> Iterator[ResponseEvent]:
        yield _added(self.index, reasoning_item(self._id, []))
        yield ResponseEvent("reasoning_summary_part.added", self._at | {"part": summary_part("")})

    def more(self, text: str) -> Iterator[ResponseEvent]:
        text = text if self._text else text.lstrip("\n")  # drop line breaks between two pieces of reasoning
        self._text += text
        yield ResponseEvent("reasoning_summary_text.delta", self._at | {"delta": text})

    def end(self) -> Iterator[ResponseEvent]:
        yield ResponseEvent("reasoning_summary_text.done", self._at | {"text": self._text})
        yield ResponseEvent("reasoning_summary_part.done", self._at | {"part": summary_part(self._text)})

    def item(self) -> ResponseItem:
        return reasoning_item(self._id, [self._text])


class OpenMessage:
    def __init__(self, index: int):
        self.index, self._id, self._text = index, new_id("msg"), ""
        self._at = {"item_id": self._id, "output_index": index, "content_index": 0}
        self.logprobs: list[LogprobEntry] = []
        self.status = IN_PROGRESS

    def begin(self) -> Iterator[ResponseEvent]:
        yield _added(self.index, message_item(self._id, [], IN_PROGRESS))
        yield ResponseEvent("content_part.added", self._at | {"part": text_part("", [])})

    def more(self, text: str, logprobs: Sequence[LogprobEntry]) -> Iterator[ResponseEvent]:
        self._text += text
        self.logprobs += logprobs
        yield ResponseEvent("output_text.delta", self._at | {"delta": text, "logprobs": logprobs})

    def end(self) -> Iterator[ResponseEvent]:
        yield ResponseEvent("output_text.done", self._at | {"text": self._text, "logprobs": self.logprobs})
        yield ResponseEvent("content_part.done", self._at | {"part": text_part(self._text, self.logprobs)})

    def item(self) -> ResponseItem:
        return message_item(self._id, [text_part(self._text, self.logprobs)], self.status)


class OpenCall:
    """A call, which is complete from the beginning, because it is emitted when its end is known."""

    def __init__(self, index: int, call: ToolCall, tools: ResponseTools):
        self.index, self._call, self._tools = index, call, tools
        self._at = {"item_id": call.id, "output_index": index}

    def begin(self) -> Iterator[ResponseEvent]:
        yield _added(self.index, self._tools.item(self._call, IN_PROGRESS, is_begun=True))
        if self._tools.is_custom(self._call):
            yield ResponseEvent("custom_tool_call_input.delta", self._at | {"delta": self._tools.text(self._call)})
        else:
            yield ResponseEvent("function_call_arguments.delta", self._at | {"delta": self._call.arguments})

    def end(self) -> Iterator[ResponseEvent]:
        if self._tools.is_custom(self._call):
            yield ResponseEvent("custom_tool_call_input.done", self._at | {"input": self._tools.text(self._call)})
        else:
            call = {"name": self.item().get("name"), "arguments": self._call.arguments}
            yield ResponseEvent("function_call_arguments.done", self._at | call)

    def item(self) -> ResponseItem:
        return self._tools.item(self._call)


def _added(index: int, item: ResponseItem) -> ResponseEvent:
    return ResponseEvent("output_item.added", {"output_index": index, "item": item})
