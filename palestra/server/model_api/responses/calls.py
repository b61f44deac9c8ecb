"""Handles calls of the Responses API as chat calls.

Owns: the conversion there and back. Never touches: HTTP, sampling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from palestra.server.core.callers import Caller
from palestra.server.model_api.chat.calls import ChatCalls
from palestra.server.model_api.errors import parse_body
from palestra.server.model_api.json_text import dumps
from palestra.server.model_api.responses.request import TranslatedRequest, chat_request, in_these_words
from palestra.server.model_api.responses.response_body import ResponseHeader, response_body
from palestra.server.model_api.responses.schemas import ResponsesRequest
from palestra.server.model_api.responses.stream import response_events

ROUTE = "responses"


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    header: ResponseHeader
    translated: TranslatedRequest

    @classmethod
    def read(cls, body: bytes) -> ResponsesCall:
        call = parse_body(ResponsesRequest, body)
        return cls(ResponseHeader(call), chat_request(call))

    async def answer(self, chats: ChatCalls, caller: Caller) -> bytes:
        header, chat = self.header, self.translated.chat
        with in_these_words(self.translated.places):
            answer = await chats.answer(caller, chat, route=ROUTE, response_id=header.response_id)
        if chat.logprobs:  # in a thread: the text of every token is looked up
            return await asyncio.to_thread(lambda: dumps(response_body(header, answer)))
        return dumps(response_body(header, answer))

    async def stream(self, chats: ChatCalls, caller: Caller) -> AsyncGenerator[bytes, None]:
        header, chat = self.header, self.translated.chat
        events = chats.stream(caller, chat, route=ROUTE, response_id=header.response_id)
        with in_these_words(self.translated.places):
            async with aclosing(response_events(header, events)) as lines:
                async for line in lines:
                    yield line

    async def count(self, chats: ChatCalls, caller: Caller) -> int:
        """Returns the number of tokens of its input."""
        with in_these_words(self.translated.places):
            return await chats.count_tokens(caller, self.translated.chat)
