"""Streams a response as events; joined, they are the response.

Reasoning ends where text begins. Text ends with the response, because more of it may follow a call; so calls come last.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing

from palestra.chat import ChatTokenizer
from palestra.chat.output_parser import ContentPiece, ReasoningPiece
from palestra.server.model_api.errors import ContextLengthError
from palestra.server.model_api.openai_chat.events import (
    ChatAnswer,
    ChatEvent,
    ChoiceDelta,
    SampledToken,
    StreamEnded,
    StreamStarted,
)
from palestra.server.model_api.openai_responses.compaction import is_compaction
from palestra.server.model_api.openai_responses.open_items import (
    OpenCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    ResponseEvent,
)
from palestra.server.model_api.openai_responses.response_body import (
    ResponseHeader,
    ending_of,
    entries,
    output,
    with_tokens,
)
from palestra.server.model_api.sse import event as write_event
from palestra.types.openai import LogprobEntry, ModelResponse, ResponseItem

Keep = Callable[[ChatAnswer, ModelResponse], Awaitable[None]]


async def response_events(
    header: ResponseHeader, events: AsyncGenerator[ChatEvent, None], keep: Keep
) -> AsyncGenerator[bytes, None]:
    """`keep` is called with the whole response before its end is sent."""
    writer: _Writer | None = None
    async with aclosing(events):
        try:
            async for one in events:
                if isinstance(one, StreamStarted):
                    writer = _Writer(header, one.tokenizer)
                assert writer is not None
                for event in writer.write(one):
                    if isinstance(one, StreamEnded) and event.kind in ENDS:
                        await keep(one.answer, event.says["response"])
                    yield writer.event(event)
        except ContextLengthError as error:  # as OpenAI reports it: clients then compact the conversation
            yield failed_event(header, error)
        except Exception as error:
            if writer is None:
                raise
            yield writer.event(writer.failed(error))


def failed_event(header: ResponseHeader, error: Exception) -> bytes:
    """Returns the only event of a response that failed before it began."""
    body = {"type": FAILED, "sequence_number": 0, "response": header.failed(error, [])}
    return write_event(body, FAILED)


FAILED = "response.failed"
ENDS = ("completed", "incomplete")


class _Writer:
    """Writes the events of one stream."""

    def __init__(self, header: ResponseHeader, tokenizer: ChatTokenizer):
        self._header, self._tokenizer = header, tokenizer
        self._is_compaction = is_compaction(header.call.input)
        self._told = 0
        self._opened = 0
        self._done: list[ResponseItem] = []
        self._reasoning: OpenReasoning | None = None
        self._message: OpenMessage | None = None
        self._untold: list[SampledToken] = []
        """Tokens sampled since the last text."""

    def event(self, sent: ResponseEvent) -> bytes:
        name = f"response.{sent.kind}"
        line = write_event({"type": name, "sequence_number": self._told, **sent.says}, name)
        self._told += 1
        return line

    def write(self, one: ChatEvent) -> Iterator[ResponseEvent]:
        match one:
            case StreamStarted():
                for kind in ("created", "in_progress"):
                    yield ResponseEvent(kind, {"response": self._header.body("in_progress")})
            case ChoiceDelta():
                if not self._is_compaction:
                    yield from self._delta(one)
            case StreamEnded():
                yield from self._compacted(one.answer) if self._is_compaction else self._ended(one.answer)

    def _delta(self, delta: ChoiceDelta) -> Iterator[ResponseEvent]:
        self._untold += delta.tokens
        for piece in delta.pieces:
            match piece:
                case ReasoningPiece(text=text) if text:
                    yield from self._think(text)
                case ContentPiece(text=text) if text:
                    yield from self._say(text)
                case _:  # a call, or an empty think block
                    pass

    def _think(self, text: str) -> Iterator[ResponseEvent]:
        if self._reasoning is None:
            self._reasoning = OpenReasoning(self._next_index())
            yield from self._reasoning.begin()
        yield from self._reasoning.more(text)

    def _say(self, text: str) -> Iterator[ResponseEvent]:
        if self._message is None:
            if self._reasoning is not None:
                item = self._reasoning.item()
                yield from self._end(self._reasoning, item)
                self._done.append(item)
                self._reasoning = None
            self._message = OpenMessage(self._next_index())
            yield from self._message.begin()
        yield from self._message.more(text, self._entries())

    def _ended(self, answer: ChatAnswer) -> Iterator[ResponseEvent]:
        (choice,) = answer.choices
        if not (self._opened or choice.calls):
            self._message = OpenMessage(self._next_index())
            yield from self._message.begin()
        if self._message is not None:
            self._message.logprobs += self._entries()
            self._message.status = ending_of(choice)
        open_items = [one for one in (self._message, self._reasoning) if one is not None]
        calls = [OpenCall(self._next_index(), call, self._header.tools) for call in choice.calls]
        ending: list[OpenItem] = [*open_items, *calls]
        items = with_tokens(self._header.call, answer, [*self._done, *(one.item() for one in ending)])
        for one, item in zip(ending, items[len(self._done) :], strict=True):
            if isinstance(one, OpenCall):
                yield from one.begin()
            yield from self._end(one, item)
        body = self._header.ended(answer, items)
        yield ResponseEvent(body.get("status", ""), {"response": body})

    def _compacted(self, answer: ChatAnswer) -> Iterator[ResponseEvent]:
        items = output(self._header, answer)
        for kind in ("output_item.added", "output_item.done"):
            yield ResponseEvent(kind, {"output_index": 0, "item": items[0]})
        body = self._header.ended(answer, items)
        yield ResponseEvent(body.get("status", ""), {"response": body})

    def _end(self, one: OpenItem, item: ResponseItem) -> Iterator[ResponseEvent]:
        yield from one.end()
        yield ResponseEvent("output_item.done", {"output_index": one.index, "item": item})

    def failed(self, error: Exception) -> ResponseEvent:
        """Returns the event of an error after the beginning was sent."""
        return ResponseEvent("failed", {"response": self._header.failed(error, self._done)})

    def _next_index(self) -> int:
        self._opened += 1
        return self._opened - 1

    def _entries(self) -> list[LogprobEntry]:
        tokens, self._untold = self._untold, []
        return entries(self._header.call, self._tokenizer, tokens)
