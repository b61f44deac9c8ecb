"""Text completions: prompts and their continuations, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from palestra.chat import ChatTokenizer
from palestra.chat.conversation_cache import HistoryMatch
from palestra.chat.errors import TooLongError
from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import Caller
from palestra.server.model_api.delivery_acks import DeliveryAcks
from palestra.server.model_api.engine_sampler import EngineSampler, all_of
from palestra.server.model_api.errors import as_refusal, too_long
from palestra.server.model_api.json_text import dumps
from palestra.server.model_api.model_resolver import ModelResolver, SamplingTarget
from palestra.server.model_api.openai_chat.response_bodies import CompletionHeader, failed_chunk
from palestra.server.model_api.openai_chat.sampling_plan import CallOrigin, OutputOptions, SamplingPlan, plan
from palestra.server.model_api.openai_chat.schemas import CompletionRequest
from palestra.server.model_api.openai_chat.structured_output import text_grammar
from palestra.server.model_api.openai_chat.token_logprobs import TokenNames
from palestra.server.model_api.openai_completions.response_bodies import (
    CompletionText,
    PreparedPrompt,
    TextChunks,
    text_body,
)
from palestra.server.model_api.sse import DONE
from palestra.server.model_api.traces import CallTraces, TracedCall
from palestra.types.engine import StreamedTokens

TextOrigin = CallOrigin[CompletionRequest]
DEFAULT_TOKENS = 16  # OpenAI's default


class TextCalls:
    def __init__(self, models: ModelResolver, runner: EngineSampler, traces: CallTraces, delivery_acks: DeliveryAcks):
        self._models, self._runner, self._traces, self._delivery_acks = models, runner, traces, delivery_acks

    async def answer(self, origin: TextOrigin) -> bytes:
        caller, call = origin.caller, origin.call
        async with self._models.calling(caller, call.model) as target:
            prepared = await self._prepare(origin, target)
            texts = await all_of(self._sample(caller, one) for one in prepared.plans)
            trace_id = await self._keep(caller, call, texts)
        return await asyncio.to_thread(lambda: dumps(text_body(prepared, texts, trace_id)))

    async def stream(self, origin: TextOrigin) -> AsyncGenerator[bytes, None]:
        caller, call, has_begun = origin.caller, origin.call, False
        try:
            async with self._models.calling(caller, call.model) as target:
                prepared = await self._prepare(origin, target)
                async with aclosing(self._chunks(caller, call, prepared)) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        yield chunk
        except Exception as error:
            if not has_begun:
                raise
            yield failed_chunk(error)
            return
        yield DONE

    async def _chunks(
        self, caller: Caller, call: CompletionRequest, prepared: PreparedPrompt
    ) -> AsyncGenerator[bytes, None]:
        chunks = TextChunks(prepared)
        news: asyncio.Queue[tuple[int, StreamedTokens | CompletionText | Refusal]] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._listen(caller, i, one, news), name=f"completion {i}")
            for i, one in enumerate(prepared.plans)
        ]
        texts: dict[int, CompletionText] = {}
        has_begun = False
        try:
            while len(texts) < len(tasks):
                number, one = await news.get()
                if not has_begun and not isinstance(one, Refusal):
                    has_begun = True
                    for chunk in chunks.begun():
                        yield chunk
                match one:
                    case StreamedTokens():
                        yield chunks.delta(number, one)
                    case CompletionText():
                        texts[number] = one
                    case Refusal():
                        raise one
            trace_id = await self._keep(caller, call, [texts[i] for i in range(len(tasks))])
            for chunk in chunks.ended([texts[i] for i in range(len(tasks))], trace_id):
                yield chunk
            self._delivery_acks.acknowledge(prepared.header.response_id)
        finally:
            self._delivery_acks.forget(prepared.header.response_id)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prepare(self, origin: TextOrigin, target: SamplingTarget) -> PreparedPrompt:
        call, tokenizer = origin.call, await self._models.tokenizer(target)
        context = target.card.max_positions
        prompts = await asyncio.to_thread(lambda: [_encoded(tokenizer, prompt, context) for prompt in call.prompts])
        # for 0 one token is sampled and not returned
        tokens = DEFAULT_TOKENS if call.max_tokens is None else call.max_tokens or 1
        echoed = call.logprobs if call.echo else None
        prompt_top = max((top for top in (call.prompt_logprobs, echoed) if top is not None), default=None)
        options = OutputOptions(tokens, call.logprobs, prompt_top, text_grammar(call), "prompt")
        plans = [plan(origin, target, tokenizer, prompt, options) for prompt in prompts]
        names = TokenNames(tokenizer, bool(call.return_tokens_as_token_ids))
        return PreparedPrompt(call, names, CompletionHeader("text_completion", origin.response_id, call.model), plans)

    async def _sample(self, caller: Caller, one: SamplingPlan) -> CompletionText:
        async with self._runner.run(caller, one.target, one.request) as run:
            outcome = await run.outcome()
        return CompletionText(one, outcome, one.facts(outcome, run.weights, HistoryMatch.NEW))

    async def _listen(
        self,
        caller: Caller,
        number: int,
        one: SamplingPlan,
        news: asyncio.Queue[tuple[int, StreamedTokens | CompletionText | Refusal]],
    ) -> None:
        try:
            async with self._runner.run(caller, one.target, one.request, stream=True) as run:
                async for part in run.parts():
                    news.put_nowait((number, part))
                outcome = await run.outcome()
            news.put_nowait((number, CompletionText(one, outcome, one.facts(outcome, run.weights, HistoryMatch.NEW))))
        except Exception as error:
            news.put_nowait((number, as_refusal(error, response_id=one.origin.response_id)))

    async def _keep(self, caller: Caller, call: CompletionRequest, texts: Sequence[CompletionText]) -> str:
        kept = [TracedCall(t.plan.request.prompt, t.plan.request.prompt, None, t.sequences, t.facts) for t in texts]
        return (await self._traces.keep(caller, call.model, kept))[0].trace_id


def _encoded(tokenizer: ChatTokenizer, prompt: str | list[int], context: int) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    try:
        return tokenizer.encode_text(prompt, context)
    except TooLongError as error:
        raise too_long(error.least_tokens, context, "prompt", at_least=True) from None
