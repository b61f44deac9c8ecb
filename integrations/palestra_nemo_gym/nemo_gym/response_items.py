"""The items of the Responses API: messages, calls, their outputs, reasoning; with token ids where a trainer wants
them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from typing_extensions import TypedDict  # pydantic knows no other before Python 3.12

from nemo_gym.json_types import JsonMapping

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
RoutedExperts: TypeAlias = str | list[list[list[int]]]
TOKEN_FIELDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class Open(BaseModel):
    """What it does not know it keeps."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _of_another(cls, given: object) -> object:
        """The OpenAI package's own objects are as good."""
        return given.model_dump() if isinstance(given, BaseModel) and not isinstance(given, cls) else given


class TokenIDLogProbMixin(BaseModel):
    """All three or none."""

    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    routed_experts: RoutedExperts | None = None


class TokenIDLogProbTypedDictMixin(TypedDict):
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_log_probs: list[float]
    routed_experts: NotRequired[RoutedExperts]


class NeMoGymResponseInputText(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]
    text: str
    type: Literal["input_text"]


class OtherInputPart(TypedDict):
    """Images, files, sounds, videos: for the model to read."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]
    type: Literal["input_image", "input_file", "input_audio", "input_video"]


InputParts: TypeAlias = list[NeMoGymResponseInputText | OtherInputPart]


class NeMoGymSummary(Open):
    text: str
    type: Literal["summary_text"] = "summary_text"


class NeMoGymResponseReasoningItem(Open):
    id: str
    summary: list[NeMoGymSummary]
    type: Literal["reasoning"] = "reasoning"
    encrypted_content: str | None = None
    content: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_status(cls, given: object) -> object:
        """OpenAI's API gives one and takes none back."""
        return {k: v for k, v in given.items() if k != "status"} if isinstance(given, Mapping) else given


class NeMoGymResponseOutputText(BaseModel):
    annotations: list[Any]
    text: str
    type: Literal["output_text"] = "output_text"
    logprobs: list[Any] | None = None


class NeMoGymResponseOutputRefusal(BaseModel):
    refusal: str
    type: Literal["refusal"] = "refusal"


NeMoGymContent: TypeAlias = NeMoGymResponseOutputText | NeMoGymResponseOutputRefusal


class NeMoGymResponseOutputMessage(BaseModel):
    id: str
    content: list[NeMoGymContent]
    role: Literal["assistant"] = "assistant"
    status: Status = "completed"
    type: Literal["message"] = "message"


class NeMoGymEasyInputMessage(BaseModel):
    content: str | InputParts
    role: Literal["user", "assistant", "system", "developer"]
    type: Literal["message"] = "message"


class NeMoGymMessage(BaseModel):
    content: InputParts
    role: Literal["user", "system", "developer"]
    status: Status = "completed"
    type: Literal["message"] = "message"


class NeMoGymFunctionCallOutput(BaseModel):
    call_id: str
    output: str | InputParts
    type: Literal["function_call_output"] = "function_call_output"
    id: str | None = None
    status: Status | None = None


NeMoGymResponseFunctionCallOutput = NeMoGymFunctionCallOutput


class NeMoGymResponseFunctionToolCall(BaseModel):
    arguments: str
    call_id: str
    name: str
    type: Literal["function_call"] = "function_call"
    id: str | None = None
    status: Status | None = None


class NeMoGymResponseMcpCall(Open):
    type: Literal["mcp_call"] = "mcp_call"
    arguments: str
    name: str
    id: str | None = None
    server_label: str | None = None
    output: str | None = None
    error: Any = None
    status: str | None = None


class NeMoGymResponseMcpListTools(Open):
    type: Literal["mcp_list_tools"] = "mcp_list_tools"
    tools: list[Any] = Field(default_factory=list)
    id: str | None = None
    server_label: str | None = None
    error: Any = None


class NeMoGymResponseMcpApprovalRequest(Open):
    type: Literal["mcp_approval_request"] = "mcp_approval_request"
    arguments: str
    name: str
    id: str | None = None
    server_label: str | None = None


class OtherItem(Open):
    """An item of a tool that the model's host runs by itself: passed on as it is."""

    type: str


class NeMoGymEasyInputMessageForTraining(NeMoGymEasyInputMessage, TokenIDLogProbMixin):
    pass


class NeMoGymMessageForTraining(NeMoGymMessage, TokenIDLogProbMixin):
    pass


class NeMoGymResponseOutputMessageForTraining(NeMoGymResponseOutputMessage, TokenIDLogProbMixin):
    pass


class NeMoGymResponseFunctionToolCallForTraining(NeMoGymResponseFunctionToolCall, TokenIDLogProbMixin):
    pass


class NeMoGymResponseReasoningItemForTraining(NeMoGymResponseReasoningItem, TokenIDLogProbMixin):
    pass


RESPONSES_TO_TRAIN = {
    NeMoGymEasyInputMessage: NeMoGymEasyInputMessageForTraining,
    NeMoGymMessage: NeMoGymMessageForTraining,
    NeMoGymResponseOutputMessage: NeMoGymResponseOutputMessageForTraining,
    NeMoGymResponseFunctionToolCall: NeMoGymResponseFunctionToolCallForTraining,
    NeMoGymResponseReasoningItem: NeMoGymResponseReasoningItemForTraining,
}
_BY_TYPE: dict[str, type[BaseModel]] = {
    "function_call": NeMoGymResponseFunctionToolCall,
    "function_call_output": NeMoGymFunctionCallOutput,
    "reasoning": NeMoGymResponseReasoningItem,
    "mcp_call": NeMoGymResponseMcpCall,
    "mcp_list_tools": NeMoGymResponseMcpListTools,
    "mcp_approval_request": NeMoGymResponseMcpApprovalRequest,
}
_CLASSES = [NeMoGymEasyInputMessage, NeMoGymMessage, NeMoGymResponseOutputMessage, *_BY_TYPE.values(), OtherItem]
_TAGS = {one.__name__ for one in (*_CLASSES, *RESPONSES_TO_TRAIN.values())}


def _tag(value: object) -> str:
    """The name of the class that it is, or that it should fit."""
    if isinstance(value, BaseModel):
        named = next((one.__name__ for one in type(value).__mro__ if one.__name__ in _TAGS), None)
        if named is not None:
            return named
        value = value.model_dump()
    if not isinstance(value, Mapping):
        return "OtherItem"
    kind = value.get("type", "message")
    found = _message_class(value) if kind == "message" else _BY_TYPE.get(kind, OtherItem) if kind else OtherItem
    if any(value.get(name) is not None for name in TOKEN_FIELDS):
        found = RESPONSES_TO_TRAIN.get(found, found)
    return found.__name__


def _message_class(value: JsonMapping) -> type[BaseModel]:
    content = value.get("content")
    if isinstance(content, str) or (value.get("role") == "assistant" and not _is_output(content) and "id" not in value):
        return NeMoGymEasyInputMessage
    if value.get("role") == "assistant":
        return NeMoGymResponseOutputMessage
    return NeMoGymMessage if "status" in value else NeMoGymEasyInputMessage


def _is_output(content: Any) -> bool:
    types = (part.get("type") if isinstance(part, Mapping) else getattr(part, "type", None) for part in content or ())
    return any(one in ("output_text", "refusal") for one in types)


NeMoGymResponseInputItem: TypeAlias = Annotated[
    Annotated[NeMoGymEasyInputMessage, Tag("NeMoGymEasyInputMessage")]
    | Annotated[NeMoGymMessage, Tag("NeMoGymMessage")]
    | Annotated[NeMoGymResponseOutputMessage, Tag("NeMoGymResponseOutputMessage")]
    | Annotated[NeMoGymResponseFunctionToolCall, Tag("NeMoGymResponseFunctionToolCall")]
    | Annotated[NeMoGymFunctionCallOutput, Tag("NeMoGymFunctionCallOutput")]
    | Annotated[NeMoGymResponseReasoningItem, Tag("NeMoGymResponseReasoningItem")]
    | Annotated[NeMoGymResponseMcpCall, Tag("NeMoGymResponseMcpCall")]
    | Annotated[NeMoGymResponseMcpListTools, Tag("NeMoGymResponseMcpListTools")]
    | Annotated[NeMoGymResponseMcpApprovalRequest, Tag("NeMoGymResponseMcpApprovalRequest")]
    | Annotated[NeMoGymEasyInputMessageForTraining, Tag("NeMoGymEasyInputMessageForTraining")]
    | Annotated[NeMoGymMessageForTraining, Tag("NeMoGymMessageForTraining")]
    | Annotated[NeMoGymResponseOutputMessageForTraining, Tag("NeMoGymResponseOutputMessageForTraining")]
    | Annotated[NeMoGymResponseFunctionToolCallForTraining, Tag("NeMoGymResponseFunctionToolCallForTraining")]
    | Annotated[NeMoGymResponseReasoningItemForTraining, Tag("NeMoGymResponseReasoningItemForTraining")]
    | Annotated[OtherItem, Tag("OtherItem")],
    Discriminator(_tag),
]
NeMoGymResponseInput: TypeAlias = list[NeMoGymResponseInputItem]
NeMoGymResponseOutputItem: TypeAlias = NeMoGymResponseInputItem
