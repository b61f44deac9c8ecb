"""Fields of the calls. Unknown fields of newer clients pass; known but unsupported ones are refused by name.

Owns: fields, their bounds, the list of unsupported ones. Never touches: messages and tools; see `messages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid
from palestra.types import MAX_TEMPERATURE
from palestra.util.json_types import JsonObject

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_PROMPTS = 1024
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
"""The last one is OpenAI's padding against traffic analysis, which their SDK may request; it is ignored."""
INT64 = 2**63

TokenId = Annotated[int, Field(ge=0, lt=2**31)]

NOTHING: tuple[Any, ...] = ()
NOT_YET: dict[str, tuple[Any, ...]] = {
    "guided_whitespace_pattern": NOTHING,
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "allowed_token_ids": NOTHING,
    "bad_words": ([],),
    "logits_processors": ([],),
    "truncate_prompt_tokens": NOTHING,
    "spaces_between_special_tokens": (True,),
    "kv_transfer_params": NOTHING,
    "priority": (0,),
    "add_special_tokens": (False,),
    "prompt_embeds": NOTHING,
    "structural_tag": NOTHING,
    "thinking_token_budget": NOTHING,
    "repetition_detection": NOTHING,
    "vllm_xargs": ({},),
}
"""Known fields that are not supported, with the values that request nothing (as null always does)."""
CHAT_NOT_YET = NOT_YET | {
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": NOTHING,
    "prediction": NOTHING,
    "web_search_options": NOTHING,
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "documents": ([],),
    "chat_template": NOTHING,
    "mm_processor_kwargs": ({},),
    "include_reasoning": (True,),
    "moderation": NOTHING,
}
TEXT_NOT_YET = NOT_YET | {
    "suffix": ("",),
    "messages": NOTHING,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "max_completion_tokens": NOTHING,
    "top_logprobs": (0,),
    "reasoning_effort": NOTHING,
    "chat_template_kwargs": ({},),
    "history": NOTHING,
    "continue_final_message": (False,),
    "required_prefix_token_ids": NOTHING,
}
"""In addition, fields that only chats have."""


class ModelApiBody(BaseModel):
    """Values are not coerced: a client that sends "5" for 5 has a bug somewhere."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_ignored(cls, given: Any) -> Any:
        for name, harmless in cls.not_yet.items() if isinstance(given, dict) else ():
            value = given.get(name)
            if value is not None and value not in harmless:
                raise invalid(name, f"{name}: {shown(value)} is not supported here yet", code="unsupported")
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
    not_yet = CHAT_NOT_YET

    messages: list[JsonObject]
    tools: list[JsonObject] | None = None
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
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @model_validator(mode="after")
    def _choices_fit(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise invalid("max_tokens", "max_tokens and max_completion_tokens differ; send one of them")
        return self


class CompletionRequest(SamplingFields):
    not_yet = TEXT_NOT_YET

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

    not_yet = {name: CHAT_NOT_YET[name] for name in ("add_special_tokens", "chat_template")}

    model: str | None = None
    prompt: str | None = None
    messages: list[JsonObject] | None = None
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
