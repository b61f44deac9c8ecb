"""The model endpoint: its parts, put together, and its short calls.

Owns: models and tokens, as they are listed. Never touches: HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from palestra.chat import ChatTokenizer
from palestra.server.broker.service import Episodes
from palestra.server.core.callers import Caller
from palestra.server.core.core import Core
from palestra.server.core.samplers import Samplers
from palestra.server.model_api.chat.answers import chat_body, chat_chunks
from palestra.server.model_api.chat.asks import ask_of
from palestra.server.model_api.chat.calls import ChatCalls
from palestra.server.model_api.chat.plans import check_vocabulary
from palestra.server.model_api.chat.schemas import ChatRequest, DetokenizeRequest, TokenizeRequest
from palestra.server.model_api.completions.calls import TextCalls
from palestra.server.model_api.held import HeldConversations
from palestra.server.model_api.json_text import dumps
from palestra.server.model_api.models import Models, about
from palestra.server.model_api.receipts import Receipts
from palestra.server.model_api.retries import Retries
from palestra.server.model_api.runner import Runner
from palestra.server.model_api.traces import Traces


class ModelApi:
    def __init__(self, core: Core, samplers: Samplers, episodes: Episodes):
        self.models = Models(core, episodes.calls)
        receipts = Receipts(core.store, episodes.calls)
        self.traces = Traces(core.store, episodes.calls, receipts, episodes.masking)
        self.retries = Retries(receipts)
        self._held = HeldConversations(core.config, core.store)
        runner = Runner(core, samplers, episodes.calls)
        self.chats = ChatCalls(core.metrics, self.models, runner, self.traces, self._held, receipts)
        self.texts = TextCalls(self.models, runner, self.traces, receipts)

    async def chat(self, caller: Caller, call: ChatRequest, response_id: str) -> bytes:
        answer = await self.chats.answer(caller, call, route="chat", response_id=response_id)
        if call.logprobs or call.prompt_logprobs is not None:  # every token gets a name: beside the loop
            return await asyncio.to_thread(lambda: dumps(chat_body(answer, call)))
        return dumps(chat_body(answer, call))

    def stream_chat(self, caller: Caller, call: ChatRequest, response_id: str) -> AsyncGenerator[bytes, None]:
        return chat_chunks(call, response_id, self.chats.stream(caller, call, route="chat", response_id=response_id))

    async def list_models(self, caller: Caller) -> dict[str, Any]:
        return {"object": "list", "data": [about(target) for target in await self.models.listed(caller)]}

    async def model(self, caller: Caller, name: str) -> dict[str, Any]:
        return about(await self.models.find(caller, name))

    async def tokenize(self, caller: Caller, call: TokenizeRequest) -> dict[str, Any]:
        """A chat as it would be read now, with what was said before token for token."""
        target = await self.models.find_or_only(caller, call.model)
        tokenizer = await self.models.tokenizer(target)
        if call.prompt is not None:
            tokens = await asyncio.to_thread(tokenizer.encode_text, call.prompt)
        else:
            tokens = (await self._held.prompt(tokenizer, lambda: ask_of(caller, target, call))).ids
        names = await asyncio.to_thread(_spelled, tokenizer, tokens) if call.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": target.card.max_positions,
            "tokens": tokens,
            "token_strs": names,
        }

    async def detokenize(self, caller: Caller, call: DetokenizeRequest) -> dict[str, Any]:
        target = await self.models.find_or_only(caller, call.model)
        check_vocabulary(call.tokens, target, "tokens")
        tokenizer = await self.models.tokenizer(target)
        return {"prompt": await asyncio.to_thread(tokenizer.decode, call.tokens, False)}


def _spelled(tokenizer: ChatTokenizer, tokens: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token], skip_special=False) for token in tokens]
