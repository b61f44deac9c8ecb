"""An answer in the format of the Responses API: items, and the fields of the request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from palestra.chat import ChatTokenizer
from palestra.chat import responses_output as written
from palestra.chat.responses_output import (
    ECHOED,
    TOOL_FIELDS,
    ending,
    message_item,
    new_id,
    output_items,
    reasoning_item,
    text_part,
    usage_body,
)
from palestra.server.core.errors import ApiError
from palestra.server.model_api.errors import as_refusal
from palestra.server.model_api.openai_chat.events import ChatAnswer, ChatChoice, ChatFinishReason, SampledToken
from palestra.server.model_api.openai_chat.token_logprobs import LOWEST, TokenNames
from palestra.server.model_api.openai_responses.compaction import compaction_item, is_compaction
from palestra.server.model_api.openai_responses.schemas import ResponsesRequest
from palestra.server.model_api.openai_responses.tools import ResponseTools
from palestra.types.openai import LogprobEntry, ModelResponse, ResponseItem


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """What a response has from its beginning to its end."""

    call: ResponsesRequest
    tools: ResponseTools = field(default_factory=ResponseTools)
    response_id: str = field(default_factory=lambda: new_id("resp"))
    created_at: float = field(default_factory=time.time)

    def body(self, status: str, output: Sequence[ResponseItem] = (), **more: object) -> ModelResponse:
        return written.response_body(
            {name: getattr(self.call, name, None) for name in (*ECHOED, *TOOL_FIELDS)},
            response_id=self.response_id,
            created_at=self.created_at,
            model=self.call.model,
            status=status,
            output=output,
            **more,
        )

    def ended(self, answer: ChatAnswer, output: Sequence[ResponseItem]) -> ModelResponse:
        ended = ending("max_output_tokens" if answer.choices[0].finish is ChatFinishReason.LENGTH else None)
        used = answer.usage
        usage = usage_body(
            used.prompt_tokens, used.completion_tokens, cached=used.cached_tokens, reasoned=used.reasoning_tokens
        )
        return self.body(**ended, output=output, usage=usage, trace_id=answer.trace_id)

    def failed(self, error: Exception, output: Sequence[ResponseItem]) -> ModelResponse:
        """Returns the response of a call that failed after it was begun."""
        refusal = as_refusal(error, response_id=self.response_id)
        code = refusal.code if isinstance(refusal, ApiError) and refusal.code else CODES.get(refusal.status)
        return self.body("failed", output, error={"code": code or "server_error", "message": refusal.detail})


CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def response_body(header: ResponseHeader, answer: ChatAnswer) -> ModelResponse:
    return header.ended(answer, output(header, answer))


def output(header: ResponseHeader, answer: ChatAnswer) -> list[ResponseItem]:
    (choice,), call = answer.choices, header.call
    if is_compaction(call.input):
        return with_tokens(call, answer, [compaction_item(choice.content or "")])
    logprobs = entries(call, answer.tokenizer, choice.tokens)
    items = output_items(
        reasoning_item(new_id("rs"), [choice.reasoning.lstrip("\n")]) if choice.reasoning else None,
        message_item(new_id("msg"), [text_part(choice.content or "", logprobs)], ending_of(choice)),
        [header.tools.item(one) for one in choice.calls],
        has_text=bool(choice.content),
    )
    return with_tokens(call, answer, items)


def with_tokens(call: ResponsesRequest, answer: ChatAnswer, items: list[ResponseItem]) -> list[ResponseItem]:
    """Adds NeMo Gym's fields to the last item of the call, if they were requested."""
    if call.return_token_ids:
        sequence = answer.choices[0].sequence
        last = items[-1]
        last["prompt_token_ids"] = list(answer.prompt)
        last["generation_token_ids"] = list(sequence.tokens)
        last["generation_log_probs"] = [max(logprob, LOWEST) for logprob in sequence.logprobs]
    return items


def ending_of(choice: ChatChoice) -> str:
    """Returns how its text ended: calls after it are complete."""
    return "incomplete" if choice.finish is ChatFinishReason.LENGTH and not choice.calls else "completed"


def entries(call: ResponsesRequest, tokenizer: ChatTokenizer, tokens: Sequence[SampledToken]) -> list[LogprobEntry]:
    """Returns logprobs, if they were requested: of all sampled tokens, as in chat completions, including reasoning and
    calls."""
    if not call.wants_logprobs:
        return []
    return TokenNames(tokenizer, bool(call.return_tokens_as_token_ids)).entries(tokens)
