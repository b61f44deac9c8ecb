"""Chat completions: requests and answers."""

from __future__ import annotations

from typing import Any, Literal, Required, TypeAlias

from pydantic import BaseModel
from typing_extensions import TypedDict

from nemo_gym.json_types import JsonObject
from nemo_gym.response_items import Open, TokenIDLogProbMixin, TokenIDLogProbTypedDictMixin


class NeMoGymFunction(Open):
    arguments: str
    name: str


class NeMoGymChatCompletionMessageToolCall(Open):
    id: str
    function: NeMoGymFunction
    type: Literal["function"] = "function"


class NeMoGymChatCompletionMessage(Open):
    content: str | None = None
    refusal: str | None = None
    role: Literal["assistant"] = "assistant"
    tool_calls: list[NeMoGymChatCompletionMessageToolCall] | None = None


class NeMoGymChatCompletionMessageForTraining(NeMoGymChatCompletionMessage, TokenIDLogProbMixin):
    pass


class NeMoGymChoice(Open):
    finish_reason: str
    index: int
    logprobs: Any = None
    message: NeMoGymChatCompletionMessageForTraining | NeMoGymChatCompletionMessage


class CompletionUsage(Open):
    completion_tokens: int
    prompt_tokens: int
    total_tokens: int


class NeMoGymChatCompletion(Open):
    id: str
    choices: list[NeMoGymChoice]
    created: int
    model: str
    object: Literal["chat.completion"]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: CompletionUsage | None = None


class NeMoGymFunctionDefinition(TypedDict, total=False):
    name: Required[str]
    description: str
    parameters: JsonObject
    strict: bool | None


class NeMoGymChatCompletionToolParam(TypedDict, total=False):
    function: Required[NeMoGymFunctionDefinition]
    type: Required[Literal["function"]]


class NeMoGymFunctionToolParam(TypedDict, total=False):
    """A function tool as the Responses API lists it."""

    name: Required[str]
    parameters: Required[JsonObject | None]
    strict: Required[bool | None]
    type: Required[Literal["function"]]
    description: str | None


class NeMoGymChatCompletionContentPartTextParam(TypedDict):
    text: str
    type: Literal["text"]


class NeMoGymChatCompletionContentPartImageParam(TypedDict):
    image_url: JsonObject
    type: Literal["image_url"]


NeMoGymChatCompletionContentPartParam: TypeAlias = (
    NeMoGymChatCompletionContentPartTextParam | NeMoGymChatCompletionContentPartImageParam
)
_Text: TypeAlias = str | list[NeMoGymChatCompletionContentPartTextParam]


class NeMoGymChatCompletionUserMessageParam(TypedDict, total=False):
    content: Required[str | list[NeMoGymChatCompletionContentPartParam]]
    role: Required[Literal["user"]]
    name: str


class NeMoGymChatCompletionSystemMessageParam(TypedDict, total=False):
    content: Required[_Text]
    role: Required[Literal["system"]]
    name: str


class NeMoGymChatCompletionDeveloperMessageParam(TypedDict, total=False):
    content: Required[_Text]
    role: Required[Literal["developer"]]
    name: str


class NeMoGymChatCompletionMessageToolCallFunctionParam(TypedDict):
    arguments: str
    name: str


class NeMoGymChatCompletionMessageToolCallParam(TypedDict):
    id: str
    function: NeMoGymChatCompletionMessageToolCallFunctionParam
    type: Literal["function"]


class NeMoGymChatCompletionAssistantMessageParam(TypedDict, total=False):
    role: Required[Literal["assistant"]]
    content: str | list[Any] | None
    name: str
    refusal: str | None
    tool_calls: list[NeMoGymChatCompletionMessageToolCallParam] | None


class NeMoGymChatCompletionAssistantMessageForTrainingParam(
    NeMoGymChatCompletionAssistantMessageParam, TokenIDLogProbTypedDictMixin
):
    pass


class NeMoGymChatCompletionToolMessageParam(TypedDict):
    content: _Text
    role: Literal["tool"]
    tool_call_id: str


NeMoGymChatCompletionMessageParam: TypeAlias = (
    NeMoGymChatCompletionDeveloperMessageParam
    | NeMoGymChatCompletionSystemMessageParam
    | NeMoGymChatCompletionUserMessageParam
    | NeMoGymChatCompletionAssistantMessageParam
    | NeMoGymChatCompletionToolMessageParam
    | NeMoGymChatCompletionAssistantMessageForTrainingParam
)


class NeMoGymChatCompletionCreateParamsNonStreaming(BaseModel):
    """Messages and tools are passed on as they came."""

    messages: list[JsonObject]
    model: str | None = None
    audio: JsonObject | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, int] | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    metadata: dict[str, str] | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    n: int | None = None
    parallel_tool_calls: bool = True
    prediction: JsonObject | None = None
    presence_penalty: float | None = None
    reasoning_effort: str | None = None
    response_format: JsonObject | None = None
    seed: int | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    stop: str | list[str] | None = None
    store: bool | None = None
    stream_options: JsonObject | None = None
    temperature: float | None = None
    tool_choice: str | JsonObject | None = None
    tools: list[JsonObject] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    user: str | None = None
    web_search_options: JsonObject | None = None
    stream: Literal[False] | None = None
