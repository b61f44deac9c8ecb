"""Handles calls of the Responses API as chat calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from palestra.server.core.owners.callers import Caller
from palestra.server.model_api.client_headers import ClientHeaders
from palestra.server.model_api.json_text import dumps
from palestra.server.model_api.openai_chat.calls import ChatCalls, ChatOrigin
from palestra.server.model_api.openai_chat.events import ChatAnswer
from palestra.server.model_api.openai_chat.sampling_plan import CallOrigin
from palestra.server.model_api.openai_responses.request import NAMES, TranslatedRequest, chat_request, translate_errors
from palestra.server.model_api.openai_responses.response_body import ResponseHeader, response_body
from palestra.server.model_api.openai_responses.schemas import ResponsesRequest
from palestra.server.model_api.openai_responses.stored import StoredResponses
from palestra.server.model_api.openai_responses.stream import response_events
from palestra.server.model_api.service import ModelApi
from palestra.types.openai import ModelResponse

ROUTE = "responses"


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    header: ResponseHeader
    translated: TranslatedRequest
    origin: ChatOrigin
    chats: ChatCalls
    stored: StoredResponses

    @classmethod
    async def of(
        cls, service: ModelApi, caller: Caller, call: ResponsesRequest, headers: ClientHeaders
    ) -> ResponsesCall:
        stored = StoredResponses(service.store)
        history = await stored.history(caller, call.previous_response_id) if call.previous_response_id else []
        translated = await asyncio.to_thread(chat_request, call, service.tools, history)
        header = ResponseHeader(call, translated.tools)
        origin = CallOrigin(
            caller, translated.chat, ROUTE, header.response_id, headers, list(translated.ignored), NAMES
        )
        return cls(header, translated, origin, service.chats, stored)

    async def answer(self) -> bytes:
        with translate_errors(self.translated.places):
            answer = await self.chats.answer(self.origin)
        if self.translated.chat.logprobs:  # in a thread: the text of every token is looked up
            body = await asyncio.to_thread(response_body, self.header, answer)
        else:
            body = response_body(self.header, answer)
        await self._keep(answer, body)
        return dumps(body)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        events = self.chats.stream(self.origin)
        with translate_errors(self.translated.places):
            async with aclosing(response_events(self.header, events, self._keep)) as lines:
                async for line in lines:
                    yield line

    async def count(self) -> int:
        """Returns the number of tokens of its input."""
        with translate_errors(self.translated.places):
            return await self.chats.count_tokens(self.origin.caller, self.translated.chat)

    async def _keep(self, answer: ChatAnswer, body: ModelResponse) -> None:
        if self.header.call.store is not False:
            await self.stored.keep(answer.turn, body)
