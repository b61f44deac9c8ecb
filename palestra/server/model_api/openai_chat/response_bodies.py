"""Writes chat and text completions in the formats of OpenAI and vLLM: bodies and chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypedDict

from palestra import __version__
from palestra.chat.output_parser import ContentPiece, ReasoningPiece
from palestra.server.model_api.errors import as_refusal, refusal_body
from palestra.server.model_api.openai_chat.calls import message_of
from palestra.server.model_api.openai_chat.events import (
    ChatAnswer,
    ChatChoice,
    ChatEvent,
    ChoiceDelta,
    SampledToken,
    StreamEnded,
    StreamStarted,
    TokenUsage,
    ToolCall,
)
from palestra.server.model_api.openai_chat.schemas import ChatRequest
from palestra.server.model_api.openai_chat.token_logprobs import TokenNames
from palestra.server.model_api.sse import DONE, event
from palestra.types.openai import CalledFunction, ChatUsage, ChunkChoice
from palestra.util.json_types import JsonMapping, JsonPayload


@dataclass(frozen=True, slots=True)
class CompletionHeader:
    """What bodies and all chunks of one response have in common."""

    kind: str
    response_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, choices: Sequence[JsonPayload]) -> dict[str, object]:
        return {
            "id": self.response_id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"palestra-{__version__}",
            "choices": choices,
        }


def usage_body(usage: TokenUsage) -> ChatUsage:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def chat_body(answer: ChatAnswer, call: ChatRequest) -> JsonPayload:
    names = TokenNames(answer.tokenizer, bool(call.return_tokens_as_token_ids))
    choices = [_choice(choice, call, names) for choice in answer.choices]
    body = CompletionHeader("chat.completion", answer.response_id, answer.model).around(choices)
    body |= {"usage": usage_body(answer.usage), "trace_id": answer.trace_id}
    if call.prompt_logprobs is not None:
        body["prompt_logprobs"] = names.prompt_logprobs(answer.prompt, answer.result)
    return body | ({"prompt_token_ids": answer.prompt} if call.return_token_ids else {})


def _choice(choice: ChatChoice, call: ChatRequest, names: TokenNames) -> JsonPayload:
    body = {
        "index": choice.index,
        "message": message_of(choice) | {"refusal": None},
        "logprobs": _logprobs(choice.tokens, names) if call.logprobs else None,
        "finish_reason": choice.finish,
        "stop_reason": choice.stop,
    }
    return body | ({"token_ids": choice.sequence.tokens} if call.return_token_ids else {})


def _logprobs(tokens: Sequence[SampledToken], names: TokenNames) -> JsonPayload:
    return {"content": names.entries(tokens), "refusal": None}


# Chunks


async def chat_chunks(
    call: ChatRequest, response_id: str, events: AsyncGenerator[ChatEvent, None]
) -> AsyncGenerator[bytes, None]:
    chunks: _ChatChunks | None = None
    async with aclosing(events):
        try:
            async for one in events:
                if isinstance(one, StreamStarted):
                    chunks = _ChatChunks(call, response_id, one)
                assert chunks is not None
                for line in chunks.write(one):
                    yield line
        except Exception as error:
            if chunks is None:
                raise
            yield failed_chunk(error)  # a part of the answer is already sent, so the error is sent as a chunk
            return
    yield DONE


def failed_chunk(error: Exception) -> bytes:
    """Returns the end of a stream that failed."""
    return event(refusal_body(as_refusal(error))) + DONE


class CallDelta(TypedDict):
    """A tool call in a chunk, which has the whole call."""

    index: int
    id: str
    type: str
    function: CalledFunction


class Delta(TypedDict, total=False):
    """What a chunk adds to a message."""

    reasoning_content: str
    content: str
    tool_calls: list[CallDelta]


class _ChatChunks:
    """The chunks of one stream."""

    def __init__(self, call: ChatRequest, response_id: str, begun: StreamStarted):
        self._call, self._prompt_tokens = call, len(begun.prompt)
        self._header = CompletionHeader("chat.completion.chunk", response_id, call.model)
        self._names = TokenNames(begun.tokenizer, bool(call.return_tokens_as_token_ids))
        self._counts: list[int] = [0] * call.choices
        self._calls: list[int] = [0] * call.choices

    def write(self, one: ChatEvent) -> list[bytes]:
        match one:
            case StreamStarted():
                return self._begun(one)
            case ChoiceDelta():
                self._counts[one.choice] += len(one.tokens)
                shows = one.pieces or self._call.logprobs or self._call.return_token_ids
                return [self._delta(one)] if shows else []
            case StreamEnded():
                return self._ended(one.answer)

    def _begun(self, begun: StreamStarted) -> list[bytes]:
        ids = {"prompt_token_ids": begun.prompt} if self._call.return_token_ids else {}
        role = {"role": "assistant", "content": ""}
        return [self._chunk([_chunk_choice(i, role)], ids if i == 0 else {}) for i in range(self._call.choices)]

    def _delta(self, delta: ChoiceDelta) -> bytes:
        fields: Delta = {}
        for piece in delta.pieces:
            match piece:
                case ReasoningPiece(text=text):
                    fields["reasoning_content"] = fields.get("reasoning_content", "") + text
                case ContentPiece(text=text):
                    fields["content"] = fields.get("content", "") + text
                case ToolCall():
                    fields.setdefault("tool_calls", []).append(self._call_delta(delta.choice, piece))
        choice = _chunk_choice(delta.choice, fields)
        if self._call.logprobs:
            choice["logprobs"] = _logprobs(delta.tokens, self._names)
        if self._call.return_token_ids:
            choice["token_ids"] = [one.token for one in delta.tokens]
        return self._chunk([choice])

    def _call_delta(self, choice: int, call: ToolCall) -> CallDelta:
        number = self._calls[choice]
        self._calls[choice] += 1
        function: CalledFunction = {"name": call.name, "arguments": call.arguments}
        return {"index": number, "id": call.id, "type": "function", "function": function}

    def _ended(self, answer: ChatAnswer) -> list[bytes]:
        ends: list[ChunkChoice] = [
            {**_chunk_choice(one.index, {}), "finish_reason": one.finish, "stop_reason": one.stop}
            for one in answer.choices
        ]
        chunks = [self._chunk([end], {"trace_id": answer.trace_id}) for end in ends]
        if self._options.get("include_usage"):
            chunks.append(self._chunk([], {"usage": usage_body(answer.usage), "trace_id": answer.trace_id}))
        return chunks

    @property
    def _options(self) -> JsonMapping:
        return self._call.stream_options or {}

    def _chunk(self, choices: Sequence[ChunkChoice], more: JsonPayload | None = None) -> bytes:
        usage = stream_usage(self._options, self._prompt_tokens, self._counts)
        return event({**self._header.around(choices), **usage, **(more or {})})


def _chunk_choice(index: int, delta: JsonPayload) -> ChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def stream_usage(options: JsonMapping, prompt_tokens: int, counts: Sequence[int]) -> JsonPayload:
    """Returns the usage of a chunk. OpenAI writes null until the end; vLLM, if asked, counts along."""
    if options.get("continuous_usage_stats"):
        return {"usage": usage_body(TokenUsage(prompt_tokens, sum(counts), 0, 0))}
    return {"usage": None} if options.get("include_usage") else {}
