"""A response while it is made, as events; put together they are the response.

Reasoning ends where text begins. Text ends with the response, as there may be more of it after a call; so calls come
last. Owns: the events. Never touches: the engine, HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from palestra.chat import ChatTokenizer
from palestra.chat.speech import Said, Thought
from palestra.server.model_api.chat.events import Begun, ChatAnswer, ChatEvent, Delta, DrawnToken, Ended
from palestra.server.model_api.errors import as_refusal
from palestra.server.model_api.responses.answer import Header, Item, ending_of, entries, with_tokens
from palestra.server.model_api.responses.open_items import OpenCall, OpenItem, OpenMessage, OpenReasoning, Told
from palestra.server.model_api.sse import event as write_event


async def response_events(header: Header, events: AsyncGenerator[ChatEvent, None]) -> AsyncGenerator[bytes, None]:
    writer: _Writer | None = None
    async with aclosing(events):
        try:
            async for one in events:
                if isinstance(one, Begun):
                    writer = _Writer(header, one.tokenizer)
                assert writer is not None
                for told in writer.tell(one):
                    yield writer.event(told)
        except Exception as error:
            if writer is None:
                raise
            yield writer.event(writer.failed(error))


class _Writer:
    """Of one stream."""

    def __init__(self, header: Header, tokenizer: ChatTokenizer):
        self._header, self._tokenizer = header, tokenizer
        self._told = 0
        self._opened = 0
        self._done: list[Item] = []
        self._reasoning: OpenReasoning | None = None
        self._message: OpenMessage | None = None
        self._untold: list[DrawnToken] = []
        """Drawn since the last text."""

    def event(self, told: Told) -> bytes:
        name = f"response.{told.kind}"
        line = write_event({"type": name, "sequence_number": self._told, **told.says}, name)
        self._told += 1
        return line

    def tell(self, one: ChatEvent) -> Iterator[Told]:
        match one:
            case Begun():
                for kind in ("created", "in_progress"):
                    yield Told(kind, {"response": self._header.body("in_progress")})
            case Delta():
                yield from self._delta(one)
            case Ended():
                yield from self._ended(one.answer)

    def _delta(self, delta: Delta) -> Iterator[Told]:
        self._untold += delta.tokens
        for piece in delta.pieces:
            match piece:
                case Thought(text=text) if text:
                    yield from self._think(text)
                case Said(text=text) if text:
                    yield from self._say(text)
                case _:  # a call, or a block without a thought in it
                    pass

    def _think(self, text: str) -> Iterator[Told]:
        if self._reasoning is None:
            self._reasoning = OpenReasoning(self._next_index())
            yield from self._reasoning.begin()
        yield from self._reasoning.more(text)

    def _say(self, text: str) -> Iterator[Told]:
        if self._message is None:
            if self._reasoning is not None:
                item = self._reasoning.item()
                yield from self._end(self._reasoning, item)
                self._done.append(item)
                self._reasoning = None
            self._message = OpenMessage(self._next_index())
            yield from self._message.begin()
        yield from self._message.more(text, self._entries())

    def _ended(self, answer: ChatAnswer) -> Iterator[Told]:
        (choice,) = answer.choices
        if not (self._opened or choice.calls):
            self._message = OpenMessage(self._next_index())
            yield from self._message.begin()
        if self._message is not None:
            self._message.logprobs += self._entries()
            self._message.status = ending_of(choice)
        open_items = [one for one in (self._message, self._reasoning) if one is not None]
        calls = [OpenCall(self._next_index(), call) for call in choice.calls]
        ending: list[OpenItem] = [*open_items, *calls]
        items = with_tokens(self._header.call, answer, [*self._done, *(one.item() for one in ending)])
        for one, item in zip(ending, items[len(self._done) :], strict=True):
            if isinstance(one, OpenCall):
                yield from one.begin()
            yield from self._end(one, item)
        body = self._header.ended(answer, items)
        yield Told(body["status"], {"response": body})

    def _end(self, one: OpenItem, item: Item) -> Iterator[Told]:
        yield from one.end()
        yield Told("output_item.done", {"output_index": one.index, "item": item})

    def failed(self, error: Exception) -> Told:
        """Its beginning is out: all that is left is to say so."""
        refusal = as_refusal(error, response_id=self._header.response_id)
        told = {"code": "rate_limit_exceeded" if refusal.status == 429 else "server_error", "message": refusal.detail}
        return Told("failed", {"response": self._header.body("failed", self._done, error=told)})

    def _next_index(self) -> int:
        self._opened += 1
        return self._opened - 1

    def _entries(self) -> list[dict[str, Any]]:
        tokens, self._untold = self._untold, []
        return entries(self._header.call, self._tokenizer, tokens)
