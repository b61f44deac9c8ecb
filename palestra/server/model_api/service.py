"""The model endpoint: its parts, and its short calls."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Sequence

from palestra.chat import ChatTokenizer
from palestra.config.serve import ServeConfig
from palestra.server.broker.service import EpisodeService
from palestra.server.core.errors import ApiError
from palestra.server.core.owners.callers import Caller
from palestra.server.core.pictures.reader import PictureReader
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.model_api.conversation_store import ConversationStore
from palestra.server.model_api.delivery_acks import DeliveryAcks
from palestra.server.model_api.engine_sampler import EngineSampler
from palestra.server.model_api.hosted_tools import ToolSettings
from palestra.server.model_api.idempotency import IdempotentCalls
from palestra.server.model_api.json_text import dumps
from palestra.server.model_api.model_resolver import ModelResolver, about
from palestra.server.model_api.openai_chat.calls import ChatCalls, ChatOrigin
from palestra.server.model_api.openai_chat.pictures import see
from palestra.server.model_api.openai_chat.prompt_request import prompt_request
from palestra.server.model_api.openai_chat.response_bodies import chat_body, chat_chunks
from palestra.server.model_api.openai_chat.sampling_plan import check_vocabulary
from palestra.server.model_api.openai_chat.schemas import DetokenizeRequest, TokenizeRequest
from palestra.server.model_api.openai_completions.calls import TextCalls
from palestra.server.model_api.traces import CallTraces
from palestra.store import Store
from palestra.util.json_types import JsonObject


class ModelApi:
    def __init__(
        self,
        config: ServeConfig,
        store: Store,
        models: ModelResolver,
        sampler: EngineSampler,
        episodes: EpisodeService,
        metrics: Metrics,
        pictures: PictureReader,
    ):
        self.store, self.models, self._pictures = store, models, pictures
        delivery_acks = DeliveryAcks(store, episodes.calls)
        self.traces = CallTraces(store, episodes.calls, delivery_acks, episodes.masking)
        self.retries = IdempotentCalls(delivery_acks)
        self.tools = ToolSettings(config.hosted_tools, config.tool_namespaces)
        self._conversations = ConversationStore(config, store)
        self.chats = ChatCalls(metrics, models, sampler, self.traces, self._conversations, delivery_acks, pictures)
        self.texts = TextCalls(models, sampler, self.traces, delivery_acks)

    async def chat(self, origin: ChatOrigin) -> bytes:
        answer, call = await self.chats.answer(origin), origin.call
        if call.logprobs or call.prompt_logprobs is not None:  # in a thread: the text of every token is looked up
            return await asyncio.to_thread(lambda: dumps(chat_body(answer, call)))
        return dumps(chat_body(answer, call))

    def stream_chat(self, origin: ChatOrigin) -> AsyncGenerator[bytes, None]:
        return chat_chunks(origin.call, origin.response_id, self.chats.stream(origin))

    async def list_models(self, caller: Caller) -> JsonObject:
        return {"object": "list", "data": [about(target) for target in await self.models.listed(caller)]}

    async def model(self, caller: Caller, name: str) -> JsonObject:
        return about(await self.models.find(caller, name))

    async def picture(self, caller: Caller, digest: str) -> bytes:
        """The file of a picture that one of the caller's conversations shows."""
        picture = await asyncio.to_thread(self._pictures.cache.find, caller.owner, digest)
        if picture is None:
            raise ApiError(404, f"picture {digest[:12]} is not kept here any more (limits.max_kept_picture_bytes)")
        return await asyncio.to_thread(picture.png)

    async def tokenize(self, caller: Caller, call: TokenizeRequest) -> JsonObject:
        """Tokenizes a chat as it would be read now, with the history token for token."""
        target = await self.models.find_or_only(caller, call.model)
        tokenizer = await self.models.tokenizer(target)
        if call.prompt is not None:
            tokens = await asyncio.to_thread(tokenizer.encode_text, call.prompt)
        else:
            seen = await see(self._pictures, caller.owner, target, tokenizer, call.messages)
            request = functools.partial(prompt_request, caller, target, tokenizer, call, seen)
            tokens = (await self._conversations.prompt(tokenizer, request)).ids
        names = await asyncio.to_thread(_spelled, tokenizer, tokens) if call.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": target.card.max_positions,
            "tokens": tokens,
            "token_strs": names,
        }

    async def detokenize(self, caller: Caller, call: DetokenizeRequest) -> JsonObject:
        target = await self.models.find_or_only(caller, call.model)
        check_vocabulary(call.tokens, target, "tokens")
        tokenizer = await self.models.tokenizer(target)
        return {"prompt": await asyncio.to_thread(tokenizer.decode, call.tokens, False)}


def _spelled(tokenizer: ChatTokenizer, tokens: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token], skip_special=False) for token in tokens]
