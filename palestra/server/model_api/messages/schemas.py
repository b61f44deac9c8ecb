"""Fields of Messages calls. Unknown fields of newer clients pass; known but unsupported ones are refused by name.

Owns: fields, their bounds, the list of unsupported ones. Never touches: their conversion; see `request`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from palestra.server.model_api.chat.schemas import MAX_STOPS, NOTHING, ModelApiBody
from palestra.server.model_api.errors import invalid
from palestra.server.model_api.messages.errors import wrong
from palestra.util.json_types import JsonObject

NOT_HERE: dict[str, tuple[Any, ...]] = {
    "container": NOTHING,
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}),
    "compaction": NOTHING,
    "diagnostics": NOTHING,
    "fallbacks": ([],),
    "fallback_credit_token": NOTHING,
    "inference_geo": NOTHING,
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}
"""Known fields that are not supported, with the values that request nothing (as null always does)."""
SAID_OTHERWISE = {
    "stop": "send stop_sequences",
    "max_completion_tokens": "send max_tokens",
    "user": "send metadata.user_id",
    "response_format": "send output_config.format",
    "parallel_tool_calls": "send tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "send output_config.effort",
    "continue_final_message": "it follows from whose message is the last",
    "add_generation_prompt": "it follows from whose message is the last",
    "logprobs": "send return_token_ids, which also returns the logprobs",
    "top_logprobs": "send return_token_ids, which also returns the logprobs of sampled tokens",
    "return_tokens_as_token_ids": "send return_token_ids",
    "prompt_logprobs": "a Message has no field for them",
    "stream_options": "usage is always sent",
    "n": "a Message is one answer; send the request several times",
}
"""Fields of chat completions that have no meaning here, and what to send instead. All its other fields mean the
same."""


NO_THREADS = "thread_unsupported_request"  # the SDK's helpers know this code, and continue without threads
TASK_BUDGET: dict[str, tuple[Any, ...]] = {"task_budget": NOTHING}


class OutputFormat(ModelApiBody):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(ModelApiBody):
    not_yet = TASK_BUDGET

    effort: str | None = None
    format: OutputFormat | None = None


class ThinkingConfig(ModelApiBody):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """Only a hint: `max_tokens` is the limit."""
    display: Literal["summarized", "omitted"] | None = None


class AnthropicToolChoice(ModelApiBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _is_named(self) -> AnthropicToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise wrong("tool_choice", 'a name is needed with type "tool", and allowed only with it')
        return self


class MessagesMetadata(ModelApiBody):
    user_id: str | None = None


class CountRequest(ModelApiBody):
    """A conversation, and how it is shown to the model."""

    not_yet = NOT_HERE

    model: str
    messages: list[JsonObject] = Field(min_length=1)
    system: str | list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Its place before it became a part of `output_config`."""
    cache_control: JsonObject | None = None
    """Accepted here and everywhere else, without effect: what was read before is never read again anyway."""
    chat_template_kwargs: JsonObject | None = None
    thread: Any = None

    @model_validator(mode="after")
    def _is_whole(self) -> CountRequest:
        if self.thread is not None:
            detail = "send the whole conversation without it; the part that was sent before is cached"
            raise wrong("thread", detail, code=NO_THREADS)
        return self

    @model_validator(mode="after")
    def _one_format(self) -> CountRequest:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise wrong("output_format", "it is also in output_config; send one of them")
        return self

    @property
    def format(self) -> OutputFormat | None:
        return (self.output_config and self.output_config.format) or self.output_format


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, lt=2**31)
    stream: bool | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(default=None, max_length=MAX_STOPS)
    metadata: MessagesMetadata | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _is_said_our_way(self) -> MessagesRequest:
        for name, better in SAID_OTHERWISE.items():
            if (self.model_extra or {}).get(name) is not None:
                raise invalid(None, f"{name} is a field of chat completions; with Messages, {better}")
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise wrong("thinking.budget_tokens", f"it must be less than max_tokens, which is {self.max_tokens}")
        return self

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"
