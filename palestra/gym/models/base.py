"""The base of every model server: the three APIs, plain and streamed, on top of `respond` and `complete`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from palestra.gym.errors import BadRequest, PeerFailed, UnreachableServer
from palestra.gym.models import messages, streams
from palestra.gym.models.capture import CapturedExchange, Captures, WholeAnswer
from palestra.gym.models.conversions import output_items
from palestra.gym.models.requests import checked, fitted
from palestra.gym.models.settings import read_capture
from palestra.gym.records import ServerInstance, ServerKind
from palestra.gym.servers.base import GymServer, Peers, RouteSchemas
from palestra.gym.wire import GymRequest, GymResponse
from palestra.types.openai import ChatBody, ChatCompletion, ModelResponse, ResponseItem, ResponsesParams
from palestra.util.json_types import JsonObject, JsonPayload

log = logging.getLogger(__name__)


class ModelAnswer(Struct):
    """An answer, with what is captured of it."""

    answer: GymResponse
    response: WholeAnswer | None
    """The whole object in the caller's API, even if it was streamed. None: there is none."""
    items: list[ResponseItem] | None = None
    """Items in the format of Responses, with token ids."""


class ModelServer(GymServer):
    kind = ServerKind.MODEL

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        super().__init__(instance, peers)
        self._ways: dict[str, tuple[str, Callable[[GymRequest, JsonObject], Awaitable[ModelAnswer]]]] = {
            "/v1/responses": ("responses", self._by_responses),
            "/v1/chat/completions": ("chat", self._by_chat),
            "/v1/messages": ("messages", self._by_messages),
        }
        self._captures = Captures.of(read_capture(peers.settings), self.name)

    async def respond(self, call: GymRequest, params: ResponsesParams, beside: JsonPayload) -> ModelResponse:
        """Returns a Responses object. `params` are checked; `beside` are fields of the endpoint that Responses do not
        have."""
        raise NotImplementedError

    async def complete(self, call: GymRequest, body: ChatBody) -> ChatCompletion:
        """Returns a chat completion."""
        raise NotImplementedError

    def routes(self) -> RouteSchemas:
        return {path: {"type": "object"} for path in self._ways}

    async def answer(self, call: GymRequest) -> GymResponse:
        dialect, way = self._ways.get(call.path, (None, None))
        if dialect is None or way is None:
            return GymResponse(status=404, body={"detail": "Not Found"})
        if not isinstance(call.body, dict):
            raise BadRequest((), "Input should be an object", kind="dict_type", given=call.body)
        if call.rollout_id is None or self._captures is None:
            return (await way(call, call.body)).answer
        exchange = CapturedExchange(call.rollout_id, dialect, call.body)
        try:
            answered = await way(call, call.body)
        except Exception as error:  # boundary: captured, and raised again
            await self._captures.keep_failure(exchange, error)
            raise
        await self._captures.keep(exchange, answered.answer.status, answered.response)
        if call.captures_tokens:
            await self._captures.keep_tokens(exchange, answered.response, answered.items)
        return answered.answer

    # The three APIs

    async def _by_responses(self, call: GymRequest, body: JsonObject) -> ModelAnswer:
        if not body.get("stream"):
            response = await self.respond(call, checked(body), {})
            return ModelAnswer(GymResponse(body=response), response, response["output"])
        params, joined = fitted(body)
        params = checked(params)
        try:
            response = await self.respond(call, params, {})
        except (PeerFailed, UnreachableServer) as error:
            log.warning("%s%s, streaming: %s", self.name, call.path, error)
            return ModelAnswer(streams.streamed(streams.failure_events(str(error))), None)
        return ModelAnswer(streams.streamed(streams.response_events(response, joined)), response, response["output"])

    async def _by_chat(self, call: GymRequest, body: JsonObject) -> ModelAnswer:
        if not isinstance(body.get("messages"), list) or not body["messages"]:
            raise BadRequest(("messages",), "Field required: a list of messages", kind="missing")
        is_streamed = body.get("stream", False)
        if not isinstance(is_streamed, bool | None):
            raise BadRequest(("stream",), "Input should be a boolean", kind="bool_type", given=is_streamed)
        plain: Any = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        completion = await self.complete(call, plain)
        items = None
        if call.captures_tokens:
            items = output_items(completion["choices"][0]["message"], has_thoughts=True)
        if not is_streamed:
            return ModelAnswer(GymResponse(body=completion), completion, items)
        options = body.get("stream_options")
        has_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        return ModelAnswer(streams.streamed(streams.chat_events(completion, has_usage=has_usage)), completion, items)

    async def _by_messages(self, call: GymRequest, body: JsonObject) -> ModelAnswer:
        params, beside = messages.as_responses(body)
        response = await self.respond(call, checked(params), beside)
        message = messages.as_message(response, model=str(body.get("model") or response.get("model")))
        if not body.get("stream"):
            return ModelAnswer(GymResponse(body=message), message, response["output"])
        return ModelAnswer(streams.streamed(streams.message_events(message)), message, response["output"])
