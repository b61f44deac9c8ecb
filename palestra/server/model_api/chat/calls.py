"""Chat calls, whichever route they come by: from messages to an answer, at once or as it is said.

Owns: the way of a call. Never touches: how prompts are held, how answers are written down.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palestra.chat import ChatTokenizer
from palestra.chat.conversations import Ask, Place, Prompt, Reply
from palestra.chat.tool_calls import END_THINK, THINK
from palestra.chat.tool_formats import ToolFormat
from palestra.server.core.callers import Caller
from palestra.server.core.metrics import Metrics
from palestra.server.model_api.chat.asks import ask_of
from palestra.server.model_api.chat.events import Begun, ChatAnswer, ChatEvent, Choice, Delta, Ended, Finish, Usage
from palestra.server.model_api.chat.formats import chat_grammar
from palestra.server.model_api.chat.plans import Origin, Plan, Wanted, plan
from palestra.server.model_api.chat.schemas import ChatRequest
from palestra.server.model_api.chat.voices import Voice, streamed_tokens
from palestra.server.model_api.errors import invalid
from palestra.server.model_api.held import HeldConversations
from palestra.server.model_api.models import Models, Target
from palestra.server.model_api.receipts import Receipts
from palestra.server.model_api.runner import Outcome, Runner
from palestra.server.model_api.traces import Call, Traces
from palestra.types.sampling import SampledSequence

EFFORT = "reasoning_effort"
OPENING = 8  # tokens at the end of a prompt that may open a think block


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat call that is ready to be sampled."""

    plan: Plan
    prompt: Prompt
    tools: ToolFormat | None
    """None: calls are not looked for."""
    in_thought: bool

    def voice(self) -> Voice:
        return Voice(self.plan, self.tools, in_thought=self.in_thought)


class ChatCalls:
    def __init__(
        self,
        metrics: Metrics,
        models: Models,
        runner: Runner,
        traces: Traces,
        held: HeldConversations,
        receipts: Receipts,
    ):
        self._metrics, self._models, self._runner = metrics, models, runner
        self._traces, self._held, self._receipts = traces, held, receipts

    async def answer(self, caller: Caller, call: ChatRequest, *, route: str, response_id: str) -> ChatAnswer:
        async with self._models.calling(caller, call.model) as target:
            chat = await self._prepare(Origin(caller, call, route, response_id), call, target)
            async with self._runner.run(caller, target, chat.plan.request) as run:
                outcome = await run.outcome()
            choices = await asyncio.to_thread(_hear_all, chat, outcome.result.sequences)
            return await self._keep(chat, outcome, run.weights, choices)

    async def stream(
        self, caller: Caller, call: ChatRequest, *, route: str, response_id: str
    ) -> AsyncGenerator[ChatEvent, None]:
        """Refusals come before the first event."""
        with self._receipts.giving(response_id):
            async with self._models.calling(caller, call.model) as target:
                chat = await self._prepare(Origin(caller, call, route, response_id), call, target)
                voices = [chat.voice() for _ in range(call.choices)]
                async with self._runner.run(caller, target, chat.plan.request, stream=True) as run:
                    await run.begun()
                    yield Begun(chat.prompt.ids, chat.plan.tokenizer)
                    async for part in run.parts():
                        yield Delta(part.sample, voices[part.sample].hear(part.tokens), streamed_tokens(part))
                    outcome = await run.outcome()
                for index, voice in enumerate(voices):
                    if pieces := voice.finish():
                        yield Delta(index, pieces, ())
                sequences = outcome.result.sequences
                choices = [voice.choice(i, s) for i, (voice, s) in enumerate(zip(voices, sequences, strict=True))]
                answer = await self._keep(chat, outcome, run.weights, choices)
            yield Ended(answer)
            self._receipts.handed_over(response_id)

    async def count_tokens(self, caller: Caller, call: ChatRequest) -> int:
        """Of the prompt, as it would be read now."""
        target = await self._models.find(caller, call.model)
        tokenizer = await self._models.tokenizer(target)
        return len((await self._held.prompt(tokenizer, lambda: _ask(caller, target, tokenizer, call))).ids)

    async def _prepare(self, origin: Origin, call: ChatRequest, target: Target) -> Chat:
        tokenizer = await self._models.tokenizer(target)
        prompt = await self._held.prompt(
            tokenizer,
            lambda: _ask(origin.caller, target, tokenizer, call),
            max_tokens=target.card.max_positions,
        )
        self._count(target, prompt)
        tools = tokenizer.tool_format
        in_thought = _is_in_thought(tokenizer, prompt)
        wanted = Wanted(
            max_tokens=call.max_completion_tokens or call.max_tokens,
            top=(call.top_logprobs or 0) if call.logprobs else None,
            prompt_top=call.prompt_logprobs,
            grammar=chat_grammar(call, tokenizer, tools, in_thought=in_thought),
        )
        planned = plan(origin, target, tokenizer, prompt.ids, wanted)
        return Chat(planned, prompt, tools if call.calls_tools else None, in_thought)

    def _count(self, target: Target, prompt: Prompt) -> None:
        for count in prompt.counts:
            self._metrics.conversation(target.worker.name, count)

    async def _keep(self, chat: Chat, outcome: Outcome, weights: str, choices: Sequence[Choice]) -> ChatAnswer:
        """The turn is on disk when it returns, and the conversation can go on."""
        origin, prompt = chat.plan.origin, chat.prompt
        facts = chat.plan.facts(outcome, weights, prompt.match)
        messages = [message_of(choice) for choice in choices]
        turn = Call.of_chat(prompt, outcome.result.sequences, messages, facts)
        (key,) = await self._traces.keep(origin.caller, origin.call.model, [turn])
        replies = [
            Reply(
                message,
                choice.sequence.tokens,
                Place(key.trace_id, key.number, choice.index),
                by_length=choice.finish is Finish.LENGTH,
            )
            for choice, message in zip(choices, messages, strict=True)
        ]
        self._held.keep(prompt, replies)
        return ChatAnswer(
            response_id=origin.response_id,
            trace_id=key.trace_id,
            model=origin.call.model,
            prompt=prompt.ids,
            choices=choices,
            usage=await asyncio.to_thread(_usage, chat, outcome, choices),
            result=outcome.result,
            tokenizer=chat.plan.tokenizer,
        )


def _ask(caller: Caller, target: Target, tokenizer: ChatTokenizer, call: ChatRequest) -> Ask:
    ask = ask_of(caller, target, call)
    if call.reasoning_effort is None:
        return ask
    if not tokenizer.template_knows(EFFORT):
        raise invalid(
            EFFORT, f"{EFFORT}: this model's chat template does not know it; leave it out", code="unsupported"
        )
    return replace(ask, template_kwargs={EFFORT: call.reasoning_effort, **ask.template_kwargs})


def message_of(choice: Choice) -> dict[str, Any]:
    """As it comes back in a history."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.content}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return message


def _hear_all(chat: Chat, sequences: Sequence[SampledSequence]) -> list[Choice]:
    choices: list[Choice] = []
    for index, sequence in enumerate(sequences):
        voice = chat.voice()
        voice.hear(sequence.tokens)
        voice.finish()
        choices.append(voice.choice(index, sequence))
    return choices


def _is_in_thought(tokenizer: ChatTokenizer, prompt: Prompt) -> bool:
    """By the end of the prompt; where an answer goes on, by the beginning it has."""
    start = len(prompt.ids) - prompt.begun
    before = tokenizer.decode(prompt.ids[max(0, start - OPENING) : start], skip_special=False)
    begun = tokenizer.decode(prompt.ids[start:], skip_special=False)
    text = THINK + begun if before.rstrip().endswith(THINK) else begun
    return text.rfind(THINK) > text.rfind(END_THINK)


def _usage(chat: Chat, outcome: Outcome, choices: Sequence[Choice]) -> Usage:
    thoughts = [choice.reasoning for choice in choices if choice.reasoning]
    return Usage(
        prompt_tokens=len(chat.prompt.ids),
        completion_tokens=sum(len(choice.sequence.tokens) for choice in choices),
        cached_tokens=outcome.result.cached_prompt_tokens,
        reasoning_tokens=sum(len(chat.plan.tokenizer.encode_text(thought)) for thought in thoughts),
    )
