"""OpenAI's two APIs, as servers of NeMo Gym know them: requests and answers, and a client."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nemo_gym.calls import MAX_NUM_TRIES
from nemo_gym.chat_types import (
    NeMoGymChatCompletion,
    NeMoGymChatCompletionAssistantMessageForTrainingParam,
    NeMoGymChatCompletionAssistantMessageParam,
    NeMoGymChatCompletionContentPartImageParam,
    NeMoGymChatCompletionContentPartParam,
    NeMoGymChatCompletionContentPartTextParam,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChatCompletionDeveloperMessageParam,
    NeMoGymChatCompletionMessage,
    NeMoGymChatCompletionMessageForTraining,
    NeMoGymChatCompletionMessageParam,
    NeMoGymChatCompletionMessageToolCall,
    NeMoGymChatCompletionMessageToolCallFunctionParam,
    NeMoGymChatCompletionMessageToolCallParam,
    NeMoGymChatCompletionSystemMessageParam,
    NeMoGymChatCompletionToolMessageParam,
    NeMoGymChatCompletionToolParam,
    NeMoGymChatCompletionUserMessageParam,
    NeMoGymChoice,
    NeMoGymFunction,
    NeMoGymFunctionDefinition,
    NeMoGymFunctionToolParam,
)
from nemo_gym.json_types import JsonObject
from nemo_gym.openai_client import RATE_LIMIT_ERROR_CODES, RETRY_ERROR_CODES, NeMoGymAsyncOpenAI
from nemo_gym.response_items import (
    RESPONSES_TO_TRAIN,
    TOKEN_FIELDS,
    NeMoGymContent,
    NeMoGymEasyInputMessage,
    NeMoGymEasyInputMessageForTraining,
    NeMoGymFunctionCallOutput,
    NeMoGymMessage,
    NeMoGymMessageForTraining,
    NeMoGymResponseFunctionCallOutput,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseInput,
    NeMoGymResponseInputItem,
    NeMoGymResponseInputText,
    NeMoGymResponseMcpApprovalRequest,
    NeMoGymResponseMcpCall,
    NeMoGymResponseMcpListTools,
    NeMoGymResponseOutputItem,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseOutputRefusal,
    NeMoGymResponseOutputText,
    NeMoGymResponseReasoningItem,
    NeMoGymResponseReasoningItemForTraining,
    NeMoGymSummary,
    Open,
    RoutedExperts,
    TokenIDLogProbMixin,
    TokenIDLogProbTypedDictMixin,
)

__all__ = [
    "MAX_NUM_TRIES",
    "RATE_LIMIT_ERROR_CODES",
    "REQUIRED_TOKEN_METADATA_FIELDS",
    "RESPONSES_TO_TRAIN",
    "RETRY_ERROR_CODES",
    "TOKEN_METADATA_FIELDS",
    "NeMoGymAsyncOpenAI",
    "NeMoGymChatCompletion",
    "NeMoGymChatCompletionAssistantMessageForTrainingParam",
    "NeMoGymChatCompletionAssistantMessageParam",
    "NeMoGymChatCompletionContentPartImageParam",
    "NeMoGymChatCompletionContentPartParam",
    "NeMoGymChatCompletionContentPartTextParam",
    "NeMoGymChatCompletionCreateParamsNonStreaming",
    "NeMoGymChatCompletionDeveloperMessageParam",
    "NeMoGymChatCompletionMessage",
    "NeMoGymChatCompletionMessageForTraining",
    "NeMoGymChatCompletionMessageParam",
    "NeMoGymChatCompletionMessageToolCall",
    "NeMoGymChatCompletionMessageToolCallFunctionParam",
    "NeMoGymChatCompletionMessageToolCallParam",
    "NeMoGymChatCompletionSystemMessageParam",
    "NeMoGymChatCompletionToolMessageParam",
    "NeMoGymChatCompletionToolParam",
    "NeMoGymChatCompletionUserMessageParam",
    "NeMoGymChoice",
    "NeMoGymContent",
    "NeMoGymEasyInputMessage",
    "NeMoGymEasyInputMessageForTraining",
    "NeMoGymFunction",
    "NeMoGymFunctionCallOutput",
    "NeMoGymFunctionDefinition",
    "NeMoGymFunctionToolParam",
    "NeMoGymMessage",
    "NeMoGymMessageForTraining",
    "NeMoGymResponse",
    "NeMoGymResponseCreateParamsNonStreaming",
    "NeMoGymResponseFunctionCallOutput",
    "NeMoGymResponseFunctionToolCall",
    "NeMoGymResponseFunctionToolCallForTraining",
    "NeMoGymResponseInput",
    "NeMoGymResponseInputItem",
    "NeMoGymResponseInputText",
    "NeMoGymResponseInputTokensDetails",
    "NeMoGymResponseMcpApprovalRequest",
    "NeMoGymResponseMcpCall",
    "NeMoGymResponseMcpListTools",
    "NeMoGymResponseOutputItem",
    "NeMoGymResponseOutputMessage",
    "NeMoGymResponseOutputMessageForTraining",
    "NeMoGymResponseOutputRefusal",
    "NeMoGymResponseOutputText",
    "NeMoGymResponseOutputTokensDetails",
    "NeMoGymResponseReasoningItem",
    "NeMoGymResponseReasoningItemForTraining",
    "NeMoGymResponseUsage",
    "NeMoGymSummary",
    "RoutedExperts",
    "TokenIDLogProbMixin",
    "TokenIDLogProbTypedDictMixin",
    "accumulate_response_usage",
]

REQUIRED_TOKEN_METADATA_FIELDS = frozenset(TOKEN_FIELDS)
TOKEN_METADATA_FIELDS = REQUIRED_TOKEN_METADATA_FIELDS | {"routed_experts"}
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]
Truncation = Literal["auto", "disabled"]


class NeMoGymResponseCreateParamsNonStreaming(BaseModel):
    """A field that it does not know is an error."""

    model_config = ConfigDict(extra="forbid")

    background: bool | None = None
    include: list[str] | None = None
    input: str | NeMoGymResponseInput
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt: JsonObject | None = None
    reasoning: JsonObject | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    context_management: list[JsonObject] | None = None
    conversation: str | JsonObject | None = None
    moderation: JsonObject | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = None
    stream_options: JsonObject | None = None
    temperature: float | None = None
    text: JsonObject | None = None
    tool_choice: str | JsonObject = "auto"
    tools: list[JsonObject] = Field(default_factory=list)
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: Truncation | None = None
    user: str | None = None
    stream: Literal[False] | None = None


class NeMoGymResponseInputTokensDetails(Open):
    cached_tokens: int | None = None


class NeMoGymResponseOutputTokensDetails(Open):
    reasoning_tokens: int | None = None


class NeMoGymResponseUsage(Open):
    """A number that was not counted is None."""

    input_tokens: int | None
    input_tokens_details: NeMoGymResponseInputTokensDetails
    output_tokens: int | None
    output_tokens_details: NeMoGymResponseOutputTokensDetails
    total_tokens: int | None

    @classmethod
    def sum_from_list(cls, usages: Iterable[NeMoGymResponseUsage]) -> NeMoGymResponseUsage:
        nothing = cls(
            input_tokens=0,
            input_tokens_details=NeMoGymResponseInputTokensDetails(cached_tokens=0),
            output_tokens=0,
            output_tokens_details=NeMoGymResponseOutputTokensDetails(reasoning_tokens=0),
            total_tokens=0,
        )
        return reduce(_added, usages, nothing)


class ResponseError(Open):
    code: str
    message: str


class IncompleteDetails(Open):
    reason: str | None = None


class ResponseTool(Open):
    type: str


class NeMoGymResponse(Open):
    id: str
    created_at: float
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | list[Any] | None = None
    metadata: dict[str, str] | None = None
    model: str
    object: Literal["response"]
    output: list[NeMoGymResponseOutputItem]
    parallel_tool_calls: bool
    temperature: float | None = None
    tool_choice: str | JsonObject
    tools: list[ResponseTool]
    top_p: float | None = None
    background: bool | None = None
    conversation: Any = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    prompt: Any = None
    prompt_cache_key: str | None = None
    reasoning: Any = None
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    status: str | None = None
    text: Any = None
    top_logprobs: int | None = None
    truncation: Truncation | None = None
    usage: NeMoGymResponseUsage | None = None
    user: str | None = None

    @property
    def output_text(self) -> str:
        """All that was said, without the rest."""
        messages = (one for one in self.output if isinstance(one, NeMoGymResponseOutputMessage))
        parts = (part for one in messages for part in one.content)
        return "".join(part.text for part in parts if isinstance(part, NeMoGymResponseOutputText))


def accumulate_response_usage(
    total: NeMoGymResponseUsage | None, additional: NeMoGymResponseUsage | None
) -> NeMoGymResponseUsage | None:
    """Their sum. A number that one of them did not count is None."""
    if total is None or additional is None:
        found = total or additional
        return None if found is None else found.model_copy(deep=True)
    return _added(total, additional)


def _added(total: NeMoGymResponseUsage, additional: NeMoGymResponseUsage) -> NeMoGymResponseUsage:
    cached = _sum(total.input_tokens_details.cached_tokens, additional.input_tokens_details.cached_tokens)
    reasoned = _sum(total.output_tokens_details.reasoning_tokens, additional.output_tokens_details.reasoning_tokens)
    return NeMoGymResponseUsage(
        input_tokens=_sum(total.input_tokens, additional.input_tokens),
        input_tokens_details=NeMoGymResponseInputTokensDetails(cached_tokens=cached),
        output_tokens=_sum(total.output_tokens, additional.output_tokens),
        output_tokens_details=NeMoGymResponseOutputTokensDetails(reasoning_tokens=reasoned),
        total_tokens=_sum(total.total_tokens, additional.total_tokens),
    )


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
