"""Chat calls of all routes: messages in, an answer out, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from palestra.chat import ChatTokenizer
from palestra.chat.answer_formats import answer_start, output_parser
from palestra.chat.conversation_cache import Prompt, PromptRequest, SampledReply, SampleLocation
from palestra.chat.tool_parsers import AnswerStart
from palestra.server.core.owners.callers import Caller
from palestra.server.core.pictures.reader import PictureReader
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.model_api.conversation_store import ConversationStore
from palestra.server.model_api.delivery_acks import DeliveryAcks
from palestra.server.model_api.engine_sampler import EngineSampler, SampleOutcome
from palestra.server.model_api.model_resolver import ModelResolver, SamplingTarget
from palestra.server.model_api.openai_chat.choice_stream import ChoiceStream, streamed_tokens
from palestra.server.model_api.openai_chat.events import (
    ChatAnswer,
    ChatChoice,
    ChatEvent,
    ChatFinishReason,
    ChoiceDelta,
    StreamEnded,
    StreamStarted,
    TokenUsage,
)
from palestra.server.model_api.openai_chat.pictures import SeenPictures, see
from palestra.server.model_api.openai_chat.prompt_request import prompt_request
from palestra.server.model_api.openai_chat.sampling_plan import CallOrigin, OutputOptions, SamplingPlan, plan
from palestra.server.model_api.openai_chat.schemas import ChatRequest
from palestra.server.model_api.openai_chat.structured_output import chat_grammar, refuse_unknown_format
from palestra.server.model_api.traces import CallTraces, TracedCall
from palestra.types.rollouts import Message
from palestra.types.sampling import SampledSequence
from palestra.util.json_types import JsonMapping

EFFORT = "reasoning_effort"
ChatOrigin = CallOrigin[ChatRequest]


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat call that is ready to be sampled."""

    plan: SamplingPlan
    prompt: Prompt
    tools: Sequence[JsonMapping] | None
    """None: calls are not searched for."""
    start: AnswerStart

    def choice_stream(self) -> ChoiceStream:
        return ChoiceStream(self.plan, output_parser(self.plan.tokenizer.tool_format, self.tools, self.start))


class ChatCalls:
    def __init__(
        self,
        metrics: Metrics,
        models: ModelResolver,
        runner: EngineSampler,
        traces: CallTraces,
        conversations: ConversationStore,
        delivery_acks: DeliveryAcks,
        pictures: PictureReader,
    ):
        self._metrics, self._models, self._runner = metrics, models, runner
        self._traces, self._conversations, self._delivery_acks = traces, conversations, delivery_acks
        self._pictures = pictures

    async def answer(self, origin: ChatOrigin) -> ChatAnswer:
        async with self._models.calling(origin.caller, origin.call.model) as target:
            chat = await self._prepare(origin, target)
            async with self._runner.run(origin.caller, target, chat.plan.request) as run:
                outcome = await run.outcome()
            choices = await asyncio.to_thread(_parse_all, chat, outcome.result.sequences)
            return await self._keep(chat, outcome, run.weights, choices)

    async def stream(self, origin: ChatOrigin) -> AsyncGenerator[ChatEvent, None]:
        """Yields events; refusals are raised before the first event."""
        with self._delivery_acks.delivering(origin.response_id):
            async with self._models.calling(origin.caller, origin.call.model) as target:
                chat = await self._prepare(origin, target)
                streams = [chat.choice_stream() for _ in range(origin.call.choices)]
                async with self._runner.run(origin.caller, target, chat.plan.request, stream=True) as run:
                    await run.begun()
                    yield StreamStarted(chat.prompt.ids, chat.plan.tokenizer)
                    async for part in run.parts():
                        yield ChoiceDelta(part.sample, streams[part.sample].feed(part.tokens), streamed_tokens(part))
                    outcome = await run.outcome()
                for index, choice in enumerate(streams):
                    if pieces := choice.finish():
                        yield ChoiceDelta(index, pieces, ())
                sequences = outcome.result.sequences
                choices = [choice.choice(i, s) for i, (choice, s) in enumerate(zip(streams, sequences, strict=True))]
                answer = await self._keep(chat, outcome, run.weights, choices)
            yield StreamEnded(answer)
            self._delivery_acks.acknowledge(origin.response_id)

    async def count_tokens(self, caller: Caller, call: ChatRequest) -> int:
        """Returns the number of tokens of the prompt, as it would be read now."""
        target = await self._models.find(caller, call.model)
        tokenizer = await self._models.tokenizer(target)
        seen = await see(self._pictures, caller.owner, target, tokenizer, call.messages)
        prompt = await self._conversations.prompt(
            tokenizer, lambda: _prompt_request(caller, target, tokenizer, call, seen)
        )
        return len(prompt.ids)

    async def _prepare(self, origin: ChatOrigin, target: SamplingTarget) -> PreparedChat:
        call, tokenizer = origin.call, await self._models.tokenizer(target)
        refuse_unknown_format(call, tokenizer)
        seen = await see(self._pictures, origin.caller.owner, target, tokenizer, call.messages)
        prompt = await self._conversations.prompt(
            tokenizer,
            lambda: _prompt_request(origin.caller, target, tokenizer, call, seen),
            max_tokens=target.card.max_positions,
        )
        if seen.found:
            await asyncio.to_thread(self._pictures.cache.keep, origin.caller.owner, seen.distinct)
        self._count(target, prompt)
        start = answer_start(tokenizer, prompt.ids, prompt.begun)
        options = OutputOptions(
            max_tokens=call.max_completion_tokens or call.max_tokens,
            top=(call.top_logprobs or 0) if call.logprobs else None,
            prompt_top=call.prompt_logprobs,
            grammar=chat_grammar(call, tokenizer, start),
            images=seen.placed(tokenizer, prompt.ids),
            pictures=seen.distinct,
        )
        planned = plan(origin, target, tokenizer, prompt.ids, options)
        if call.reasoning_effort is not None and not tokenizer.template_knows(EFFORT):
            origin.ignore(EFFORT)
        return PreparedChat(planned, prompt, call.callable_tools if call.calls_tools else None, start)

    def _count(self, target: SamplingTarget, prompt: Prompt) -> None:
        for count in prompt.counts:
            self._metrics.conversation(target.worker.name, count)

    async def _keep(
        self, chat: PreparedChat, outcome: SampleOutcome, weights: str, choices: Sequence[ChatChoice]
    ) -> ChatAnswer:
        """Stores the turn; it is on disk when this returns, and the conversation can be continued."""
        origin, prompt = chat.plan.origin, chat.prompt
        facts = chat.plan.facts(outcome, weights, prompt.match)
        messages = [message_of(choice) for choice in choices]
        turn = TracedCall.of_chat(prompt, outcome.result.sequences, messages, facts)
        (key,) = await self._traces.keep(origin.caller, origin.call.model, [turn])
        replies = [
            SampledReply(
                message,
                choice.sequence.tokens,
                SampleLocation(key.trace_id, key.number, choice.index),
                by_length=choice.finish is ChatFinishReason.LENGTH,
            )
            for choice, message in zip(choices, messages, strict=True)
        ]
        self._conversations.keep(prompt, replies)
        return ChatAnswer(
            response_id=origin.response_id,
            turn=key,
            model=origin.call.model,
            prompt=prompt.ids,
            choices=choices,
            usage=await asyncio.to_thread(_usage, chat, outcome, choices),
            result=outcome.result,
            tokenizer=chat.plan.tokenizer,
        )


def _prompt_request(
    caller: Caller, target: SamplingTarget, tokenizer: ChatTokenizer, call: ChatRequest, seen: SeenPictures
) -> PromptRequest:
    request = prompt_request(caller, target, tokenizer, call, seen)
    if call.reasoning_effort is None or not tokenizer.template_knows(EFFORT):
        return request
    return replace(request, template_kwargs={EFFORT: call.reasoning_effort, **request.template_kwargs})


def message_of(choice: ChatChoice) -> Message:
    """Returns the choice as it will come back in a history."""
    message: Message = {"role": "assistant", "content": choice.content}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


def _parse_all(chat: PreparedChat, sequences: Sequence[SampledSequence]) -> list[ChatChoice]:
    choices: list[ChatChoice] = []
    for index, sequence in enumerate(sequences):
        stream = chat.choice_stream()
        stream.feed(sequence.tokens)
        stream.finish()
        choices.append(stream.choice(index, sequence))
    return choices


def _usage(chat: PreparedChat, outcome: SampleOutcome, choices: Sequence[ChatChoice]) -> TokenUsage:
    thoughts = [choice.reasoning for choice in choices if choice.reasoning]
    return TokenUsage(
        prompt_tokens=len(chat.prompt.ids),
        completion_tokens=sum(len(choice.sequence.tokens) for choice in choices),
        cached_tokens=outcome.result.cached_prompt_tokens,
        reasoning_tokens=sum(len(chat.plan.tokenizer.encode_text(thought)) for thought in thoughts),
    )
