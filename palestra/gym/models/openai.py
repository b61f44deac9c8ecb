"""`openai_model`: an endpoint that has the Responses API itself; requests and answers pass through."""

from __future__ import annotations

from typing import Any

from palestra.gym.errors import BadAnswer
from palestra.gym.models.base import ModelServer
from palestra.gym.models.settings import OpenAISettings, read_settings
from palestra.gym.models.upstream import Upstream
from palestra.gym.records import ServerInstance
from palestra.gym.servers.base import Peers
from palestra.gym.wire import GymRequest, GymResponse, encoded
from palestra.types.openai import ChatBody, ChatCompletion, ModelResponse, ResponsesParams
from palestra.util.json_types import JsonObject, JsonPayload


class OpenAIModel(ModelServer):
    """The model server `openai_model`, for an endpoint that has the Responses API itself."""

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        super().__init__(instance, peers)
        self.settings = read_settings(OpenAISettings, instance)
        headers = {**self.settings.openai_default_headers, "authorization": f"Bearer {self.settings.openai_api_key}"}
        self.upstream = Upstream([self.settings.openai_base_url], headers, self.settings)

    async def close(self) -> None:
        await self.upstream.close()

    async def look(self, path: str) -> GymResponse | None:
        return GymResponse(body=dict(self.upstream.counts)) if path == "/stats" else None

    async def respond(self, call: GymRequest, params: ResponsesParams, beside: JsonPayload) -> ModelResponse:
        body: JsonObject = {**self.settings.extra_body, **beside, **params, "model": self.settings.openai_model}
        if self.settings.drop_input_reasoning_items and isinstance(body["input"], list):
            body["input"] = [item for item in body["input"] if item.get("type") != "reasoning"]
        return whole_response(await self.upstream.post(call.session_id, "/responses", body), self.upstream)

    async def complete(self, call: GymRequest, body: ChatBody) -> ChatCompletion:
        given = {**self.settings.extra_body, **body, "model": self.settings.openai_model}
        return whole_completion(await self.upstream.post(call.session_id, "/chat/completions", given), self.upstream)


def whole_response(answer: Any, upstream: Upstream) -> ModelResponse:
    """Checks the answer. Raises BadAnswer, so that readers may rely on its structure."""
    output = answer.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) and "type" in item for item in output):
        raise BadAnswer(upstream.replicas[0].url, "/responses", "no Responses object", encoded(answer))
    return answer


def whole_completion(answer: Any, upstream: Upstream, *, key: str = "message") -> ChatCompletion:
    """The same for chat completions; `key` is what a choice must have."""
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    found = first.get(key) if isinstance(first, dict) else None
    if not isinstance(found, dict if key == "message" else str) or not _are_calls(found):
        raise BadAnswer(upstream.replicas[0].url, "/chat/completions", "no chat completion", encoded(answer))
    return answer


def _are_calls(message: object) -> bool:
    if not isinstance(message, dict):
        return True
    try:
        return all(
            isinstance(call["id"], str)
            and isinstance(call["function"]["name"], str)
            and isinstance(call["function"]["arguments"], str)
            for call in message.get("tool_calls") or ()
        ) and isinstance(message.get("content"), str | None)
    except (KeyError, TypeError):
        return False
