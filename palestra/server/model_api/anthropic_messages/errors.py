"""Refusals in Anthropic's error format, with the statuses its SDK expects: it retries 408, 409, 429 and 5xx, nothing
else.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from palestra.server.core.errors import ApiError, Refusal
from palestra.server.http import logs
from palestra.server.model_api.errors import ContextLengthError, RefusingRoute, invalid
from palestra.util.json_types import JsonObject


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: JsonObject | None = None


class AnthropicErrorEnvelope(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


NAMES = {
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}
"""Fields of chat calls, and their names in this API."""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def request_id() -> str:
    """Returns the id of the request, which the log shows too."""
    return f"req_{logs.request_id()}"


def headers(retry_after_s: float | None = None) -> dict[str, str]:
    """Returns the headers of every answer."""
    later = {} if retry_after_s is None else {"retry-after": f"{retry_after_s:g}"}
    return {"request-id": request_id()} | later


class AnthropicErrorText(TypedDict):
    type: str
    message: str
    details: NotRequired[dict[str, str]]


class AnthropicErrorBody(TypedDict):
    """The answer to a call that was refused."""

    type: str
    error: AnthropicErrorText
    request_id: str


def envelope(status: int, detail: str, code: str | None = None) -> AnthropicErrorBody:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: AnthropicErrorText = {"type": kind, "message": detail}
    if code is not None:
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error, "request_id": request_id()}


def refusal(error: Refusal) -> AnthropicErrorBody:
    if not isinstance(error, ApiError):
        return envelope(error.status, error.detail)
    if isinstance(error, ContextLengthError):  # in Anthropic's words, by which clients know that they have to compact
        detail = f"prompt is too long: {error.prompt_tokens} tokens > {error.context} maximum"
        return envelope(error.status, detail, error.code)
    name, _, _ = (error.param or "").partition(".")
    detail = error.detail
    if name in NAMES and detail.startswith(name):
        detail = NAMES[name] + detail.removeprefix(name)
    return envelope(error.status, detail, error.code)


def wrong(where: str, detail: str, *, code: str | None = None) -> ApiError:
    return invalid(where, f"{where}: {detail}", code=code)


def _refused(error: Refusal) -> Response:
    response_headers = headers(error.retry_after_s) | (error.headers if isinstance(error, ApiError) else {})
    return JSONResponse(refusal(error), error.status, response_headers)


class AnthropicRoute(RefusingRoute):
    refused = staticmethod(_refused)
