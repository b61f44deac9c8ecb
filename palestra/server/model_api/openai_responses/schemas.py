"""Fields of a call of `/v1/responses`. What becomes of all others is in `request_fields`."""

from __future__ import annotations

from pydantic import Field

from palestra.server.model_api.openai_chat.schemas import MAX_TOP_LOGPROBS, SamplingFields
from palestra.server.model_api.request_fields import OUTPUT_LOGPROBS, RESPONSES
from palestra.util.json_types import JsonObject


class ResponsesRequest(SamplingFields):
    """Fields of chat completions with the same name are passed on to them: vLLM's fields, and ours."""

    rules = RESPONSES
    hands_on = True

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
    """Only echoed."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    previous_response_id: str | None = None
    store: bool | None = None
    """Whether the response can be found by its id. Its call is stored in its trace in any case."""

    @property
    def wants_logprobs(self) -> bool:
        return OUTPUT_LOGPROBS in (self.include or ())


NOT_HANDED_ON = {*ResponsesRequest.__annotations__, *(name.partition(".")[0] for name in RESPONSES), "stream"}
"""Fields that are not passed to the chat call: they are converted, or request nothing."""
