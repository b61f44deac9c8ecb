"""Fields of the calls. What becomes of all others is in `request_fields`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid
from palestra.server.model_api.request_fields import (
    CHAT,
    TEXT,
    TOKENIZE,
    FieldRules,
    check_fields,
    ignored_fields,
)
from palestra.types import MAX_TEMPERATURE
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonObject

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_PROMPTS = 1024
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""The last one is OpenAI's padding against traffic analysis, which their SDK may request; it is ignored."""
INT64 = 2**63

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ModelApiBody(BaseModel):
    """Values are not coerced: a client that sends "5" for 5 has a bug somewhere."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    rules: ClassVar[FieldRules] = {}
    """What becomes of fields that are not here."""
    hands_on: ClassVar[bool] = False
    """Whether fields that neither it nor its rules have are passed to a chat call."""

    def ignored(self) -> list[str]:
        """Returns the names of fields that were sent and are ignored."""
        named = ignored_fields(self.rules, {name: getattr(self, name) for name in self.model_fields_set})
        others = {} if self.hands_on else self.model_extra or {}
        return named + [name for name, value in others.items() if value is not None and name not in self.rules]

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_lost(cls, given: Any) -> Any:
        check_fields(cls.rules, given)
        return given


class SamplingFields(ModelApiBody):
    """Fields that chat and text completions share."""

    model: str
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    max_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: JsonObject | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    logprobs_mode: Literal["raw", "temperature"] | None = None
    """An extension of ours. raw, as OpenAI has it: logprobs of the model itself. temperature: of the distribution that
    was sampled from."""
    response_format: JsonObject | None = None
    structured_outputs: JsonObject | None = None
    guided_json: str | JsonObject | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    user: str | None = None
    metadata: JsonObject | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def drawn_at(self) -> float:
        return 1.0 if self.temperature is None else self.temperature

    @model_validator(mode="after")
    def _stops_are_few_and_not_empty(self) -> SamplingFields:
        if len(self.stops) > MAX_STOPS or not all(self.stops):
            raise invalid("stop", f"stop: send 1 to {MAX_STOPS} strings, none of them empty")
        return self

    @model_validator(mode="after")
    def _can_be_kept(self) -> SamplingFields:
        try:
            msgspec.msgpack.encode(self.metadata)
        except (OverflowError, RecursionError, UnicodeEncodeError, msgspec.MsgspecError) as error:
            raise invalid("metadata", f"metadata cannot be stored: {error}") from None
        longest = self.max_tokens or getattr(self, "max_completion_tokens", None)
        if longest is not None and self.min_tokens is not None and self.min_tokens > longest:
            raise invalid("min_tokens", f"min_tokens is {self.min_tokens}, more than the {longest} tokens allowed")
        return self

    @model_validator(mode="after")
    def _can_be_streamed(self) -> SamplingFields:
        if self.stream_options and not self.stream:
            raise invalid("stream_options", "stream_options needs stream: true")
        for name, value in (self.stream_options or {}).items():
            if name not in STREAM_OPTIONS and value:
                raise invalid("stream_options", f"stream_options.{shown(name)} is not supported here yet")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "prompt_logprobs are known at the end only; send stream: false")
        return self


class ChatRequest(SamplingFields):
    rules = CHAT

    messages: list[Message]
    tools: list[JsonObject] | None = None
    deferred_tools: list[JsonObject] | None = None
    """An extension of ours: tools that a message shows, so that they can be called, although the prompt does not list
    them."""
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: str | None = None
    """Used by templates that know it."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    required_prefix_token_ids: list[TokenId] | None = None
    """The exact ids of the conversation up to its last answer."""
    history: Literal["exact", "template"] | None = None
    """An extension of ours: whether the history stays token for token, or is rendered again."""

    @property
    def callable_tools(self) -> list[JsonObject]:
        return [*(self.tools or ()), *(self.deferred_tools or ())]

    @property
    def calls_tools(self) -> bool:
        return bool(self.callable_tools) and self.tool_choice != "none"

    @model_validator(mode="after")
    def _choices_fit(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
        return self


class CompletionRequest(SamplingFields):
    rules = TEXT

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        return given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionRequest:
        if not all(self.prompts):
            raise invalid("prompt", "prompt is empty; send some text, or token ids")
        if len(self.prompts) * self.choices > MAX_PROMPTS:
            raise invalid("prompt", f"prompt: {len(self.prompts)} prompts times n is more than {MAX_PROMPTS}")
        return self

    @model_validator(mode="after")
    def _says_something(self) -> CompletionRequest:
        if self.max_tokens == 0 and (self.stream or not (self.echo or self.prompt_logprobs is not None)):
            raise invalid(
                "max_tokens", "max_tokens: 0 is allowed only with echo or prompt_logprobs, and without stream"
            )
        if self.stream and self.echo and self.logprobs is not None:
            raise invalid("echo", "echo with logprobs is known at the end only; send stream: false")
        return self


class TokenizeRequest(ModelApiBody):
    """A text, or a chat as it would be read."""

    rules = TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    required_prefix_token_ids: list[TokenId] | None = None
    """The exact ids of the conversation up to its last answer."""
    history: Literal["exact", "template"] | None = None
    """An extension of ours: whether the history stays token for token, or is rendered again."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "send either prompt (a text) or messages")
        for name in ("continue_final_message", "required_prefix_token_ids", "history"):
            if self.messages is None and getattr(self, name):
                raise invalid(name, f"{name} is for messages, not for a text")
        return self


class DetokenizeRequest(ModelApiBody):
    model: str | None = None
    tokens: list[TokenId]
