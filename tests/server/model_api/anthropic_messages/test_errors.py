"""Refusals as Anthropic's SDK reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palestra.server.core.errors import ApiError, Refusal
from palestra.server.model_api.anthropic_messages.errors import AnthropicRoute
from palestra.server.model_api.errors import invalid, no_model

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def told(error: Refusal) -> dict[str, Any]:
    return json.loads(bytes(AnthropicRoute.refused(error).body))["error"]


@pytest.mark.parametrize(("status", "kind"), KINDS.items())
def test_each_status_has_its_kind(status: int, kind: str) -> None:
    answer = AnthropicRoute.refused(Refusal(status, "no", retry_after_s=1.5))
    body = json.loads(bytes(answer.body))
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "1.5")
    assert (body["type"], body["error"]) == ("error", {"type": kind, "message": "no"})
    assert answer.headers["request-id"] == body["request_id"]


def test_fields_of_chat_calls_go_by_their_names_here() -> None:
    assert told(invalid("stop", "stop: too many"))["message"] == "stop_sequences: too many"
    assert told(invalid("response_format.json_schema", "response_format.json_schema: no"))["message"] == (
        "output_config.format.json_schema: no"
    )
    assert told(invalid("messages", "messages: it stops"))["message"] == "messages: it stops"
    assert told(ApiError(400, "stop it"))["message"] == "stop it"
    assert told(no_model("x", ["y"]))["details"] == {"error_code": "model_not_found"}
