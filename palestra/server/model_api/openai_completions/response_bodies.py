"""Writes text completions in the formats of OpenAI and vLLM: bodies and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from palestra.chat.detokenizer import IncrementalDecoder
from palestra.server.model_api.engine_sampler import SampleOutcome
from palestra.server.model_api.openai_chat.choice_stream import drawn_tokens, streamed_tokens
from palestra.server.model_api.openai_chat.events import SampledToken, TokenUsage
from palestra.server.model_api.openai_chat.response_bodies import CompletionHeader, stream_usage, usage_body
from palestra.server.model_api.openai_chat.sampling_plan import SamplingPlan
from palestra.server.model_api.openai_chat.schemas import CompletionRequest
from palestra.server.model_api.openai_chat.stop_detokenizer import Detokenizer
from palestra.server.model_api.openai_chat.token_logprobs import TokenNames
from palestra.server.model_api.sse import event
from palestra.store.queries.traces import TurnFacts
from palestra.types.engine import StreamedTokens
from palestra.types.openai import TextChoice, TextLogprobs
from palestra.types.sampling import SampledSequence, StopReason
from palestra.util.json_types import JsonPayload

FINISH = {StopReason.LENGTH: "length", StopReason.STOP: "stop"}


@dataclass(frozen=True, slots=True)
class CompletionText:
    """The result of one prompt."""

    plan: SamplingPlan
    outcome: SampleOutcome
    facts: TurnFacts

    @property
    def sequences(self) -> list[SampledSequence]:
        return self.outcome.result.sequences


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    call: CompletionRequest
    names: TokenNames
    header: CompletionHeader
    plans: list[SamplingPlan]

    def index(self, prompt: int, sample: int) -> int:
        return prompt * self.call.choices + sample


class TextChunks:
    def __init__(self, prepared: PreparedPrompt):
        self._prepared, self._call = prepared, prepared.call
        self._detokenizers = [[_detokenizer(one) for _ in range(self._call.choices)] for one in prepared.plans]
        self._counts = [0] * (len(prepared.plans) * self._call.choices)
        self._offsets = [0] * len(self._counts)
        self._prompt_tokens = sum(len(one.request.prompt) for one in prepared.plans)

    def begun(self) -> list[bytes]:
        """Returns the first chunks: with the prompts, if they are to be echoed, otherwise empty ones. They make sure
        that a refusal comes before the stream."""
        chunks: list[bytes] = []
        for number, one in enumerate(self._prepared.plans):
            text = _text_of(one) if self._call.echo else ""
            for sample in range(self._call.choices):
                index = self._prepared.index(number, sample)
                self._offsets[index] = len(text)
                choice = _choice(index, text)
                if self._call.return_token_ids:
                    choice["prompt_token_ids"] = list(one.request.prompt)
                chunks.append(self._chunk(choice))
        return chunks

    def delta(self, number: int, part: StreamedTokens) -> bytes:
        index = self._prepared.index(number, part.sample)
        text = self._detokenizers[number][part.sample].feed(part.tokens)
        choice = _choice(index, text)
        if self._call.logprobs is not None:
            choice["logprobs"] = self._prepared.names.columns(streamed_tokens(part), self._offsets[index])
            self._offsets[index] += sum(len(self._prepared.names.text(token)) for token in part.tokens)
        if self._call.return_token_ids:
            choice["token_ids"] = part.tokens
        self._counts[index] += len(part.tokens)
        return self._chunk(choice)

    def ended(self, texts: Sequence[CompletionText], trace_id: str) -> list[bytes]:
        chunks: list[bytes] = []
        for number, one in enumerate(texts):
            for sample, sequence in enumerate(one.sequences):
                detokenizer = self._detokenizers[number][sample]
                rest = detokenizer.finish()
                end = _ending(self._call, detokenizer, sequence)
                choice: TextChoice = {**_choice(self._prepared.index(number, sample), rest), **end}
                chunks.append(self._chunk(choice, {"trace_id": trace_id}))
        if (self._call.stream_options or {}).get("include_usage"):
            usage = {"usage": usage_body(_usage(self._call, texts)), "trace_id": trace_id}
            chunks.append(event(self._prepared.header.around([]) | usage))
        return chunks

    def _chunk(self, choice: TextChoice, more: JsonPayload | None = None) -> bytes:
        usage = stream_usage(self._call.stream_options or {}, self._prompt_tokens, self._counts)
        return event({**self._prepared.header.around([choice]), **usage, **(more or {})})


def text_body(prepared: PreparedPrompt, texts: Sequence[CompletionText], trace_id: str) -> JsonPayload:
    choices = [
        _whole(prepared, text, prepared.index(number, sample), sequence)
        for number, text in enumerate(texts)
        for sample, sequence in enumerate(text.sequences)
    ]
    usage = usage_body(_usage(prepared.call, texts))
    return prepared.header.around(choices) | {"usage": usage, "trace_id": trace_id}


def _whole(prepared: PreparedPrompt, text: CompletionText, index: int, sequence: SampledSequence) -> TextChoice:
    call, names, prompt = prepared.call, prepared.names, text.plan.request.prompt
    is_told = call.max_tokens != 0
    detokenizer = _detokenizer(text.plan)
    answer = detokenizer.feed(sequence.tokens) + detokenizer.finish() if is_told else ""
    before = _text_of(text.plan) if call.echo else ""
    choice: TextChoice = {**_choice(index, before + answer), **_ending(call, detokenizer, sequence)}
    if call.logprobs is not None:
        columns = names.columns(drawn_tokens(sequence) if is_told else [], len(before))
        choice["logprobs"] = _joined(_echoed(names, text), columns) if call.echo else columns
    if call.prompt_logprobs is not None:
        choice["prompt_logprobs"] = names.prompt_logprobs(prompt, text.outcome.result)
    if call.return_token_ids:
        choice["token_ids"], choice["prompt_token_ids"] = sequence.tokens if is_told else [], list(prompt)
    return choice


def _echoed(names: TokenNames, text: CompletionText) -> TextLogprobs:
    """Returns the logprobs of prompt and answer; the first token has none."""
    result, prompt = text.outcome.result, text.plan.request.prompt
    logprobs = result.prompt_logprobs or [None] * len(prompt)
    top = result.topk_prompt_logprobs or [None] * len(prompt)
    drawn = [
        SampledToken(token, logprob or 0.0, row) for token, logprob, row in zip(prompt, logprobs, top, strict=True)
    ]
    columns = names.columns(drawn)
    columns["token_logprobs"][0] = None
    return columns


def _joined(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    top = first["top_logprobs"]
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": None if top is None else top + (second["top_logprobs"] or []),
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def _choice(index: int, text: str) -> TextChoice:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None}


class TextEnding(TypedDict):
    finish_reason: str
    stop_reason: str | int | None


def _ending(call: CompletionRequest, detokenizer: Detokenizer, sequence: SampledSequence) -> TextEnding:
    stop = (
        detokenizer.stop
        if isinstance(detokenizer.stop, str) or detokenizer.stop in (call.stop_token_ids or ())
        else None
    )
    finish = "length" if call.max_tokens == 0 else FINISH[sequence.stop_reason]
    return {"finish_reason": finish, "stop_reason": stop}


def _detokenizer(one: SamplingPlan) -> Detokenizer:
    call = one.origin.call
    return Detokenizer(
        IncrementalDecoder(one.tokenizer, keep_special=call.skip_special_tokens is False, keep=()),
        one.request.params,
        shows_stop=bool(call.include_stop_str_in_output),
    )


def _text_of(one: SamplingPlan) -> str:
    return one.tokenizer.decode(one.request.prompt, skip_special=False)


def _usage(call: CompletionRequest, texts: Sequence[CompletionText]) -> TokenUsage:
    drawn = sum(len(sequence.tokens) for text in texts for sequence in text.sequences)
    return TokenUsage(
        prompt_tokens=sum(len(text.plan.request.prompt) for text in texts),
        completion_tokens=0 if call.max_tokens == 0 else drawn,
        cached_tokens=sum(text.outcome.result.cached_prompt_tokens for text in texts),
        reasoning_tokens=0,
    )
