"""Fields of a call of `/v1/responses`, and what to send instead of unsupported ones.

Owns: fields, their bounds, advice. Never touches: what is in `input` and `tools`; see `items` and `request`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field, model_validator

from palestra.server.model_api.chat.schemas import MAX_TOP_LOGPROBS, NOTHING, SamplingFields
from palestra.server.model_api.errors import invalid
from palestra.util.json_types import JsonObject

LOGPROBS = "message.output_text.logprobs"
"""A value of `include`."""


@dataclass(frozen=True, slots=True)
class FieldReplacement:
    advice: str
    harmless: tuple[Any, ...] = NOTHING
    """Values that request nothing; null never does."""


_WHOLE = (
    "responses are not stored by id; send the whole conversation as input: the part that was sent before is "
    "cached token for token and costs nothing"
)
INSTEAD = {
    "previous_response_id": FieldReplacement(_WHOLE),
    "conversation": FieldReplacement(_WHOLE),
    "prompt": FieldReplacement("there are no stored prompts; send instructions and input"),
    "background": FieldReplacement(
        "background responses are not supported; leave it out, and wait or stream", (False,)
    ),
    "truncation": FieldReplacement(
        'conversations are not truncated; shorten the input, or send "disabled"', ("disabled",)
    ),
    "messages": FieldReplacement("a field of chat completions; send input"),
    "max_tokens": FieldReplacement("of chat completions; send max_output_tokens"),
    "max_completion_tokens": FieldReplacement("of chat completions; send max_output_tokens"),
    "response_format": FieldReplacement("a field of chat completions; send text.format"),
    "reasoning_effort": FieldReplacement("a field of chat completions; send reasoning.effort"),
    "verbosity": FieldReplacement("a field of chat completions; send text.verbosity"),
    "logprobs": FieldReplacement(f'of chat completions; send include: ["{LOGPROBS}"]', (False,)),
    "prompt_logprobs": FieldReplacement("only chat completions return them; a response has no field for them"),
    "n": FieldReplacement("a response is one sample; send the request n times", (1,)),
}


class ResponsesRequest(SamplingFields):
    """Fields of chat completions with the same name are passed on to them: vLLM's fields, and ours."""

    not_yet: ClassVar = {
        "context_management": ([],),
        "moderation": NOTHING,
        "access_programs": NOTHING,
        "image": ({},),
        # there is no obfuscation anyway
        "stream_options": ({}, *({"include_obfuscation": value} for value in (False, True))),
    }

    input: str | list[JsonObject]
    instructions: str | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: JsonObject | None = None
    reasoning: JsonObject | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_tool_calls: int | None = Field(default=None, ge=1, lt=2**31)
    """Limits calls of tools that OpenAI hosts; there are none here, so it is only echoed."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    store: bool | None = None
    """Whatever its value, the call is stored in its trace, and nothing is stored under the response's id."""

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @model_validator(mode="before")
    @classmethod
    def _say_what_to_send(cls, given: Any) -> Any:
        for name, instead in INSTEAD.items() if isinstance(given, dict) else ():
            value = given.get(name)
            if value is not None and value not in instead.harmless:
                raise invalid(name, f"{name}: {instead.advice}", code="unsupported")
        return given


NOT_HANDED_ON = {*ResponsesRequest.__annotations__, *ResponsesRequest.not_yet, *INSTEAD, "stream"}
"""Fields that are not passed to the chat call: they are converted, or request nothing."""
