"""Shapes of JSON in OpenAI's APIs, as our own code writes them or has checked them.

They are dictionaries: unknown fields stay where they are.
"""

from __future__ import annotations

from typing import Any, NotRequired, Required

from typing_extensions import TypedDict  # `extra_items` comes with Python 3.15

from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonPayload


class ContentPart(TypedDict, extra_items=Any):
    """A part of a message's content, or of a summary."""

    type: str
    text: NotRequired[str]


class LogprobEntry(TypedDict):
    """A sampled token, or one that was likely in its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    """None for a part of a character."""
    top_logprobs: NotRequired[list[LogprobEntry]]


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(TypedDict):
    """The answer to a call that was refused."""

    error: ErrorDetail


# Chat completions


class ChatFunction(TypedDict, extra_items=Any):
    """A function that a model may call."""

    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[JsonMapping]
    """JSON Schema of the arguments."""
    strict: NotRequired[bool | None]


class ChatTool(TypedDict, extra_items=Any):
    """A tool in a chat request."""

    type: str
    function: ChatFunction


class CalledFunction(TypedDict, extra_items=Any):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ChatToolCall(TypedDict, extra_items=Any):
    """A tool call in a message of an assistant."""

    id: str
    type: NotRequired[str]
    function: CalledFunction


class ChatUsage(TypedDict, total=False, extra_items=Any):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int | None] | None
    completion_tokens_details: dict[str, int | None] | None


class ChatBody(TypedDict, extra_items=Any):
    """A chat request."""

    messages: list[Message]
    model: NotRequired[str]
    tools: NotRequired[list[ChatTool]]
    tool_choice: NotRequired[Any]


class CompletionChoice(TypedDict, total=False, extra_items=Any):
    """A choice of a whole answer."""

    index: int
    message: Required[Message]
    finish_reason: str | None
    logprobs: JsonMapping | None
    token_ids: list[int]


class TextLogprobs(TypedDict):
    """Logprobs of a text completion: a list for each kind of fact, with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(TypedDict, total=False, extra_items=Any):
    """A choice of a text completion, whole or a chunk of it."""

    index: int
    text: Required[str]
    finish_reason: str | None
    logprobs: TextLogprobs | None


class ChunkChoice(TypedDict, extra_items=Any):
    """A choice in a chunk of a streamed answer."""

    index: int
    delta: JsonPayload
    finish_reason: str | None
    logprobs: NotRequired[JsonPayload | None]


class ChatCompletion(TypedDict, total=False, extra_items=Any):
    """A whole answer to a chat request."""

    id: str
    object: str
    created: int
    model: str
    choices: Required[list[CompletionChoice]]
    usage: ChatUsage | None
    prompt_token_ids: list[int]


# Responses


class ResponseItem(TypedDict, total=False, extra_items=Any):
    """An item of a request's input or an answer's output: a message, reasoning, a call, the output of one."""

    type: Required[str]
    id: str
    status: str
    role: str
    content: Any
    summary: list[ContentPart]
    call_id: str | None
    name: str
    arguments: str
    output: Any


class FunctionTool(TypedDict, extra_items=Any):
    """A function in a request, which has its fields beside its type."""

    type: str
    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[JsonMapping]
    strict: NotRequired[bool | None]


class ResponseUsage(TypedDict, total=False, extra_items=Any):
    input_tokens: int
    input_tokens_details: dict[str, int | None]
    output_tokens: int
    output_tokens_details: dict[str, int | None]
    total_tokens: int


class ResponsesParams(TypedDict, total=False, extra_items=Any):
    """A request for a response."""

    input: Required[Any]
    """Text, or items."""
    instructions: str | None
    model: str
    tools: list[FunctionTool]
    tool_choice: Any
    parallel_tool_calls: bool


class ModelResponse(TypedDict, total=False, extra_items=Any):
    """A Responses object. A gym has it from servers of others, which may leave fields out."""

    id: str
    object: str
    created_at: float
    model: str
    status: str
    output: Required[list[ResponseItem]]
    usage: ResponseUsage | None
    incomplete_details: dict[str, str] | None
    error: JsonPayload | None


class StreamEvent(TypedDict, extra_items=Any):
    """An event of a streamed answer."""

    type: str
