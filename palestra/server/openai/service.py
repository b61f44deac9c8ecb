"""What the calls of the model endpoint mean.

Owns: the way of a call: its prompt, its sample, its turn in a trace, its answer. Never touches: HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.conversations import Ask, Conversations, Match, Place, Prompt, Reply
from palestra.server.auth import Caller
from palestra.server.hub import Hub
from palestra.server.openai import answers
from palestra.server.openai.answers import Drawn, Reader
from palestra.server.openai.errors import invalid, too_long
from palestra.server.openai.messages import read_messages, read_tools
from palestra.server.openai.models import Models, Target
from palestra.server.openai.params import needs_scores, sampling_params, shown_params
from palestra.server.openai.runner import Outcome, Runner, all_of
from palestra.server.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    TokenizeRequest,
)
from palestra.server.openai.traces import Call, Traces
from palestra.server.tinker.sampling_service import SamplingService
from palestra.store.traces import TurnFacts
from palestra.types import SampleRequest
from palestra.types.sampling import SampledSequence

TEXT_MAX_TOKENS = 16  # OpenAI's default for text completions
AMBIGUOUS = "ambiguous"


@dataclass(frozen=True, slots=True)
class Asked:
    """A call, apart from its prompts."""

    caller: Caller
    target: Target
    call: Sampling
    reader: Reader
    route: str
    response_id: str
    max_tokens: int | None
    top: int | None
    """How many alternatives are told for each token; None: no logprobs."""
    started: float
    """By the monotonic clock."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of one prompt."""

    prompt: tuple[int, ...]
    outcome: Outcome
    drawn: list[Drawn]
    facts: TurnFacts


class OpenAIService:
    def __init__(self, hub: Hub, tinker: SamplingService):
        limits = hub.config.limits
        self._hub = hub
        self.models = Models(hub)
        self.traces = Traces(hub.store)
        self.conversations = Conversations(
            max_conversations=limits.max_conversations,
            max_tokens=limits.max_conversation_tokens,
            max_age_s=hub.config.keep_conversations_s,
        )
        self._runner = Runner(hub, tinker)

    # Models and tokens

    def list_models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._about(name, name) for name in self.models.names]}

    async def model(self, caller: Caller, name: str) -> dict[str, Any]:
        target = await self.models.find(caller, name)
        return self._about(name, target.worker.name)

    def _about(self, name: str, base: str) -> dict[str, Any]:
        worker = self._hub.base(base)
        context = worker.card.max_positions if worker is not None and worker.card is not None else None
        about = {"id": name, "object": "model", "created": 0, "owned_by": "palestra"}
        return about | {"root": worker.name if worker is not None else base, "max_model_len": context}

    async def tokenize(self, caller: Caller, call: TokenizeRequest) -> dict[str, Any]:
        """A chat as it would be read now, with what was said before token for token."""
        target = await self.models.find_or_only(caller, call.model)
        tokenizer = await self.models.tokenizer(target)
        if call.prompt is not None:
            tokens = await asyncio.to_thread(lambda: tokenizer.encode_text(call.prompt or ""))
        else:
            tokens = (await asyncio.to_thread(lambda: self._prompt(tokenizer, _ask(caller, target, call)))).ids
        names = [tokenizer.decode([token], skip_special=False) for token in tokens] if call.return_token_strs else None
        return {
            "count": len(tokens),
            "max_model_len": target.card.max_positions,
            "tokens": tokens,
            "token_strs": names,
        }

    async def detokenize(self, caller: Caller, call: DetokenizeRequest) -> dict[str, Any]:
        target = await self.models.find_or_only(caller, call.model)
        _check_vocabulary(call.tokens, target, "tokens")
        tokenizer = await self.models.tokenizer(target)
        return {"prompt": await asyncio.to_thread(lambda: tokenizer.decode(call.tokens, skip_special=False))}

    # Chat

    async def chat(self, caller: Caller, call: ChatRequest) -> dict[str, Any]:
        started = time.monotonic()
        target = await self.models.find(caller, call.model)
        tokenizer = await self.models.tokenizer(target)
        prompt = await asyncio.to_thread(lambda: self._prompt(tokenizer, _ask(caller, target, call)))
        self._count(target, prompt)
        reader = Reader(tokenizer, call, tokenizer.stop_ids)
        response_id = f"chatcmpl-{secrets.token_hex(12)}"
        max_tokens = call.max_completion_tokens or call.max_tokens
        top = (call.top_logprobs or 0) if call.logprobs else None
        asked = Asked(caller, target, call, reader, "chat", response_id, max_tokens, top, started)
        sampled = await self._sample(asked, prompt.ids, prompt.match, "messages")
        messages = await asyncio.to_thread(
            lambda: [answers.read_message(reader, d.sequence, call, prompt.ids) for d in sampled.drawn]
        )
        sequences = sampled.outcome.result.sequences
        kept = Call(prompt.ids, prompt.read, prompt.parent, sequences, sampled.facts)
        (key,) = await self.traces.keep(caller, call.model, [kept])
        replies = [
            Reply(message, sequence.tokens, Place(key.trace_id, key.number, i))
            for i, (message, sequence) in enumerate(zip(messages, sequences, strict=True))
        ]
        self.conversations.keep(prompt, replies)
        choices = await asyncio.to_thread(
            lambda: [
                answers.chat_choice(reader, i, drawn, message, call)
                for i, (drawn, message) in enumerate(zip(sampled.drawn, messages, strict=True))
            ]
        )
        usage = answers.usage_of([prompt.ids], [sampled.outcome.result])
        told = answers.response("chat.completion", response_id, call.model, key.trace_id, choices, usage)
        return told | ({"prompt_token_ids": prompt.ids} if call.return_token_ids else {})

    def _prompt(self, tokenizer: ChatTokenizer, ask: Ask) -> Prompt:
        try:
            return self.conversations.prompt(tokenizer, ask)
        except ChatError as error:
            raise invalid("messages", f"messages: {error}") from None

    def _count(self, target: Target, prompt: Prompt) -> None:
        self._hub.metrics.conversation(target.worker.name, prompt.match)
        if prompt.candidates > 1:
            self._hub.metrics.conversation(target.worker.name, AMBIGUOUS)

    # Text

    async def complete(self, caller: Caller, call: CompletionRequest) -> dict[str, Any]:
        started = time.monotonic()
        target = await self.models.find(caller, call.model)
        tokenizer = await self.models.tokenizer(target)
        reader = Reader(tokenizer, call, tokenizer.stop_ids)
        prompts = await asyncio.to_thread(lambda: [_encoded(tokenizer, prompt) for prompt in call.prompts])
        response_id = f"cmpl-{secrets.token_hex(12)}"
        max_tokens = call.max_tokens or TEXT_MAX_TOKENS
        asked = Asked(caller, target, call, reader, "completions", response_id, max_tokens, call.logprobs, started)
        sampled = await all_of(self._sample(asked, prompt, Match.NEW, "prompt") for prompt in prompts)
        kept = [Call(s.prompt, s.prompt, None, s.outcome.result.sequences, s.facts) for s in sampled]
        keys = await self.traces.keep(caller, call.model, kept)
        choices = await asyncio.to_thread(
            lambda: [
                answers.text_choice(reader, number * call.choices + i, drawn, call, one.prompt)
                for number, one in enumerate(sampled)
                for i, drawn in enumerate(one.drawn)
            ]
        )
        usage = answers.usage_of(prompts, [s.outcome.result for s in sampled])
        return answers.response("text_completion", response_id, call.model, keys[0].trace_id, choices, usage)

    # Both

    async def _sample(self, asked: Asked, prompt: Sequence[int], match: Match, where: str) -> Sampled:
        """`where`: the field its prompt came from."""
        target, call, wants_logprobs = asked.target, asked.call, asked.top is not None
        _check_vocabulary(prompt, target, where)
        if len(prompt) >= target.card.max_positions:
            raise too_long(len(prompt), target.card.max_positions, where)
        scored = needs_scores(call, wants_logprobs)
        stop_ids = asked.reader.stop_ids
        params = sampling_params(call, target, stop_ids, len(prompt), asked.max_tokens, scored=scored)
        request = SampleRequest(
            prompt=tuple(prompt),
            params=params,
            num_samples=call.choices,
            topk_logprobs=0 if scored else asked.top or 0,
        )
        prepared = time.monotonic()
        outcome = await self._runner.sample(asked.caller, target, request)
        done = time.monotonic()
        facts = TurnFacts(
            response_id=asked.response_id,
            route=asked.route,
            base_model=target.worker.name,
            weights=outcome.weights,
            temperature=params.temperature,
            match=match.value,
            started_at=time.time() - (done - asked.started),
            prepare_s=prepared - asked.started,
            sample_s=done - prepared,
            compute_s=outcome.compute_s,
            cached_tokens=outcome.result.cached_prompt_tokens,
            params=shown_params(params),
            user=call.user,
            metadata=call.metadata,
        )
        drawn = await self._drawn(asked, request.prompt, outcome.result.sequences, scored=scored)
        return Sampled(request.prompt, outcome, drawn, facts)

    async def _drawn(
        self, asked: Asked, prompt: tuple[int, ...], sequences: Sequence[SampledSequence], *, scored: bool
    ) -> list[Drawn]:
        if not scored:
            return [Drawn(s, s.logprobs, s.topk_logprobs) for s in sequences]
        scores = await all_of(
            self._runner.score(asked.caller, asked.target, prompt, s, asked.top or 0) for s in sequences
        )
        return [Drawn(s, score.logprobs, score.top) for s, score in zip(sequences, scores, strict=True)]


def _ask(caller: Caller, target: Target, call: ChatRequest | TokenizeRequest) -> Ask:
    key = "" if caller.key is None else str(caller.key.key_id)
    return Ask(
        scope=(caller.owner, key, target.name),
        messages=read_messages(call.messages or []),
        tools=read_tools(call.tools),
        template_kwargs=call.chat_template_kwargs or {},
        add_generation_prompt=call.add_generation_prompt is not False,
    )


def _encoded(tokenizer: ChatTokenizer, prompt: str | list[int]) -> list[int]:
    return tokenizer.encode_text(prompt) if isinstance(prompt, str) else prompt


def _check_vocabulary(tokens: Sequence[int], target: Target, where: str) -> None:
    vocabulary = target.card.vocab_size
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise invalid(where, f"{where}: a token id is outside the vocabulary of {vocabulary}")
