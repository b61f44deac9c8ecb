"""Refusals in OpenAI's error format, with the statuses its SDK expects: it retries 408, 409, 429 and 5xx, nothing
else."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

import structlog
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from palestra.server.core.errors import ApiError, Refusal, not_kept
from palestra.server.core.wire_errors import WireError, shown, wire_error_of
from palestra.store.errors import StoreError
from palestra.types.openai import ErrorEnvelope
from palestra.util.json_types import JsonObject

log = structlog.get_logger()

M = TypeVar("M", bound=BaseModel)

BROKE = "the server failed unexpectedly; its log has the details"
CLIENT_LEFT = 499  # nginx's status: no client reads it, but the log shows it


class OpenAIErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorEnvelope(BaseModel):
    error: OpenAIErrorDetail


def invalid(param: str | None, detail: str, *, code: str | None = None) -> ApiError:
    return ApiError(400, detail, param=param, code=code)


def no_model(model: str, known: list[str]) -> ApiError:
    """Returns the 404 of a model, also for one that belongs to another owner."""
    detail = f"the model {shown(model)} does not exist or you do not have access to it; base models: {', '.join(known)}"
    return ApiError(404, detail, param="model", code="model_not_found")


class ContextLengthError(ApiError):
    """A prompt that leaves no room for an answer."""

    def __init__(self, detail: str, param: str, prompt_tokens: int, context: int):
        super().__init__(400, detail, param=param, code="context_length_exceeded")
        self.prompt_tokens, self.context = prompt_tokens, context


def too_long(prompt_tokens: int, context: int, param: str, *, at_least: bool = False) -> ContextLengthError:
    """`at_least`: the prompt was not counted to its end."""
    detail = (
        f"This model's maximum context length is {context} tokens. However, your messages resulted in "
        f"{'at least ' if at_least else ''}{prompt_tokens} tokens, which leaves no room for an answer. "
        "Please reduce the length of the messages."
    )
    return ContextLengthError(detail, param, prompt_tokens, context)


def parse_body(schema: type[M], body: bytes) -> M:
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise _misread(error) from None


def parse_fields(schema: type[M], fields: JsonObject) -> M:
    """Parses a call that was made from a call of another route."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise _misread(error) from None


def _misread(error: ValidationError) -> ApiError:
    place = error.errors(include_url=False, include_context=False)[0]["loc"]
    return invalid(str(place[0]) if place else None, str(wire_error_of(error)))


_KINDS = {401: "invalid_request_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", 413: "request_too_large", 429: "rate_limit_exceeded"}


def envelope(status: int, detail: str, param: str | None = None, code: str | None = None) -> ErrorEnvelope:
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": detail, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def refusal_body(error: Refusal) -> ErrorEnvelope:
    param, code = (error.param, error.code) if isinstance(error, ApiError) else (None, None)
    return envelope(error.status, error.detail, param, code)


def _refused(error: Refusal) -> Response:
    headers = {} if error.retry_after_s is None else {"retry-after": f"{error.retry_after_s:g}"}
    if isinstance(error, ApiError):
        headers |= error.headers
    return JSONResponse(refusal_body(error), error.status, headers)


def as_refusal(error: Exception, **where: str) -> Refusal:
    """Returns what a client is told about an error; unexpected ones are in the log."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, StoreError):
        refusal = not_kept(error)
        return ApiError(503, refusal.detail, retry_after_s=refusal.retry_after_s, is_final=error.is_lasting)
    log.error("a request failed unexpectedly", exc_info=error, **where)
    return ApiError(500, BROKE)


class RefusingRoute(APIRoute):
    """Every exception of a route is answered in the format that `refused` makes."""

    refused: ClassVar[Callable[[Refusal], Response]]

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, refused = super().get_route_handler(), type(self).refused

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except Refusal as error:
                return refused(error)
            except WireError as error:
                return refused(ApiError(error.status, str(error)))
            except RequestValidationError as error:
                first = error.errors()[0]
                return refused(invalid(str(first["loc"][-1]), f"{first['loc'][-1]}: {first['msg']}"))
            except HTTPException as error:
                return refused(ApiError(error.status_code, str(error.detail)))
            except ClientDisconnect:
                return Response(status_code=CLIENT_LEFT)
            except Exception as error:
                return refused(as_refusal(error, path=request.url.path))

        return answer


class OpenAIRoute(RefusingRoute):
    refused = staticmethod(_refused)
