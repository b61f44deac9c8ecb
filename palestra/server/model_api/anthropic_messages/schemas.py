"""Fields of Messages calls. What becomes of all others is in `request_fields`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from palestra.server.model_api.anthropic_messages.errors import wrong
from palestra.server.model_api.openai_chat.schemas import MAX_STOPS, ModelApiBody
from palestra.server.model_api.request_fields import MESSAGES
from palestra.util.json_types import JsonObject

NO_THREADS = "thread_unsupported_request"  # the SDK's helpers know this code, and continue without threads


class OutputFormat(ModelApiBody):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(ModelApiBody):
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

    rules = MESSAGES
    hands_on = True

    model: str
    messages: list[JsonObject] = Field(min_length=1)
    system: str | list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Its place before it became a part of `output_config`."""
    context_management: JsonObject | None = None
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
    def _has_room_to_answer(self) -> MessagesRequest:
        budget = self.thinking.budget_tokens if self.thinking is not None else None
        if budget is not None and budget >= self.max_tokens:
            raise wrong("thinking.budget_tokens", f"it must be less than max_tokens, which is {self.max_tokens}")
        return self

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is None or self.thinking.display != "omitted"
