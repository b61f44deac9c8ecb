"""From sampled tokens to what a client reads.

Owns: texts, reasoning, tool calls, logprobs as OpenAI and vLLM write them. Never touches: the engine, traces.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from palestra import __version__
from palestra.chat import ChatTokenizer, parse_tool_calls
from palestra.chat.tool_calls import THINK, split_open_thinking
from palestra.server.openai.schemas import ChatRequest, CompletionRequest, Sampling
from palestra.types.sampling import SampledSequence, SampleResult, StopReason, TopLogprobs

LOWEST = -9999.0  # what OpenAI writes for an impossible token; JSON has no infinity
OPENING = 8  # tokens at the end of a prompt that may open a think block


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sequence as its client is told of it."""

    sequence: SampledSequence
    logprobs: Sequence[float]
    top: Sequence[TopLogprobs]


@dataclass(frozen=True, slots=True)
class Reader:
    """Turns tokens into text the way one request asked for."""

    tokenizer: ChatTokenizer
    call: Sampling
    stop_ids: tuple[int, ...]

    def text(self, sequence: SampledSequence) -> str:
        """Without the token or string that ended it."""
        tokens, skip = sequence.tokens, self.call.skip_special_tokens is not False
        if tokens and tokens[-1] in self.stop_ids:
            tokens = tokens[:-1]
        text = self.tokenizer.decode(tokens, skip_special=skip)
        ends = [place for stop in self.call.stops if (place := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def stop_reason(self, sequence: SampledSequence) -> str | int | None:
        """vLLM's: what of the request ended it; null for the model's own end."""
        if sequence.stop_reason is not StopReason.STOP:
            return None
        if sequence.tokens[-1] in (self.call.stop_token_ids or ()):
            return sequence.tokens[-1]
        if sequence.tokens[-1] in self.stop_ids:
            return None
        text = self.tokenizer.decode(sequence.tokens, skip_special=False)
        return min((stop for stop in self.call.stops if stop in text), key=text.find, default=None)

    def token_name(self, token: int) -> str:
        if self.call.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.tokenizer.decode([token], skip_special=False)

    def token_bytes(self, token: int) -> list[int] | None:
        """None for a token that is part of a character."""
        text = self.tokenizer.decode([token], skip_special=False)
        return None if "\ufffd" in text else list(text.encode())


# Chat


def read_message(reader: Reader, sequence: SampledSequence, call: ChatRequest, prompt: Sequence[int]) -> dict[str, Any]:
    opened = reader.tokenizer.decode(prompt[-OPENING:], skip_special=False).rstrip().endswith(THINK)
    text = reader.text(sequence)
    spoken = split_open_thinking(THINK + text if opened and not text.lstrip().startswith(THINK) else text)
    content = spoken.said if spoken.reasoning is None else spoken.said.lstrip()
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if spoken.reasoning is not None:
        message["reasoning_content"] = spoken.reasoning
    found = parse_tool_calls(content) if call.calls_tools else None
    if found is not None and found.calls:
        message["content"] = found.text.strip() or None
        message["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": one.name, "arguments": json.dumps(one.arguments, ensure_ascii=False)},
            }
            for one in found.calls
        ]
    return message


def chat_choice(reader: Reader, index: int, drawn: Drawn, message: dict[str, Any], call: ChatRequest) -> dict[str, Any]:
    finish = "tool_calls" if "tool_calls" in message else "stop"
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": _chat_logprobs(reader, drawn) if call.logprobs else None,
        "finish_reason": "length" if drawn.sequence.stop_reason is StopReason.LENGTH else finish,
        "stop_reason": reader.stop_reason(drawn.sequence),
    }
    return choice | ({"token_ids": drawn.sequence.tokens} if call.return_token_ids else {})


def _chat_logprobs(reader: Reader, drawn: Drawn) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        name = reader.token_name(token)
        return {"token": name, "logprob": max(logprob, LOWEST), "bytes": reader.token_bytes(token)}

    content = [
        entry(token, logprob)
        | {"top_logprobs": [entry(*pair) for pair in zip(row.token_ids, row.logprobs, strict=True)] if row else []}
        for token, logprob, row in zip(
            drawn.sequence.tokens, drawn.logprobs, drawn.top or [None] * len(drawn.logprobs), strict=True
        )
    ]
    return {"content": content, "refusal": None}


# Text


def text_choice(
    reader: Reader, index: int, drawn: Drawn, call: CompletionRequest, prompt: Sequence[int]
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": reader.text(drawn.sequence),
        "logprobs": _text_logprobs(reader, drawn) if call.logprobs is not None else None,
        "finish_reason": "length" if drawn.sequence.stop_reason is StopReason.LENGTH else "stop",
        "stop_reason": reader.stop_reason(drawn.sequence),
    }
    ids = {"token_ids": drawn.sequence.tokens, "prompt_token_ids": list(prompt)}
    return choice | (ids if call.return_token_ids else {})


def _text_logprobs(reader: Reader, drawn: Drawn) -> dict[str, Any]:
    texts = [reader.token_name(token) for token in drawn.sequence.tokens]
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    top = [
        {reader.token_name(t): max(p, LOWEST) for t, p in zip(row.token_ids, row.logprobs, strict=True)}
        for row in drawn.top
    ]
    return {
        "tokens": texts,
        "token_logprobs": [max(p, LOWEST) for p in drawn.logprobs],
        "top_logprobs": top or None,
        "text_offset": offsets,
    }


# Both


def response(
    kind: str, response_id: str, model: str, trace_id: str, choices: list[dict[str, Any]], usage: dict[str, Any]
) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"palestra-{__version__}",
        "choices": choices,
        "usage": usage,
        "trace_id": trace_id,
    }


def usage_of(prompts: Sequence[Sequence[int]], results: Sequence[SampleResult]) -> dict[str, Any]:
    read = sum(len(prompt) for prompt in prompts)
    written = sum(len(sequence.tokens) for result in results for sequence in result.sequences)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_prompt_tokens for result in results)},
    }
