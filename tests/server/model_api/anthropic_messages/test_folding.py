"""Events, put together by Anthropic's SDK, are the Message that a plain call gets."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from palestra.chat.output_parser import ContentPiece, ReasoningPiece
from palestra.server.core.errors import ApiError
from palestra.server.model_api.anthropic_messages.response_body import whole
from palestra.server.model_api.anthropic_messages.schemas import MessagesRequest
from palestra.server.model_api.anthropic_messages.stream import lines
from palestra.server.model_api.openai_chat.events import (
    ChatAnswer,
    ChatChoice,
    ChatEvent,
    ChatFinishReason,
    ChoiceDelta,
    SampledToken,
    StreamEnded,
    StreamStarted,
    TokenUsage,
    ToolCall,
)
from palestra.store.queries.traces import TurnKey
from palestra.types.sampling import SampledSequence, SampleResult, StopReason

CALL: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
PROMPT = [1, 2, 3]
NOBODY: Any = None  # no token is named

texts = st.text(max_size=4)
arguments = st.dictionaries(st.text(max_size=3), st.integers() | texts, max_size=2).map(json.dumps)
calls = st.builds(ToolCall, st.uuids().map(lambda one: f"call_{one.hex}"), texts, arguments)
pieces = st.lists(st.builds(ReasoningPiece, texts) | st.builds(ContentPiece, texts) | calls, max_size=8)


def answer_of(
    said: list[Any], finish: ChatFinishReason = ChatFinishReason.STOP, stop: str | int | None = None
) -> ChatAnswer:
    sequence = SampledSequence(tokens=[4, 5], logprobs=[-0.5, -1.0], stop_reason=StopReason.STOP)
    drawn = [SampledToken(4, -0.5), SampledToken(5, float("-inf"))]
    called = [one for one in said if isinstance(one, ToolCall)]
    choice = ChatChoice(0, None, None, called, finish, stop, sequence, drawn, said)
    return ChatAnswer(
        response_id="msg_1",
        turn=TurnKey("trace", 0),
        model="m",
        prompt=PROMPT,
        choices=[choice],
        usage=TokenUsage(3, 2, 1, 1),
        result=SampleResult(sequences=[sequence]),
        tokenizer=NOBODY,
    )


async def events_of(answer: ChatAnswer) -> AsyncGenerator[ChatEvent, None]:
    yield StreamStarted(answer.prompt, NOBODY)
    for piece in answer.choices[0].pieces:
        yield ChoiceDelta(0, [piece], ())
    yield StreamEnded(answer)


def written(events: AsyncGenerator[ChatEvent, None], call: MessagesRequest) -> list[dict[str, Any]]:
    async def all_of_it() -> bytes:
        return b"".join([line async for line in lines(events, call, "msg_1")])

    parts = [part.split("\n") for part in asyncio.run(all_of_it()).decode().removesuffix("\n\n").split("\n\n")]
    response = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {one['type']}" for one in response]
    return response


@functools.cache
def events() -> TypeAdapter[Any]:
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


def folded(told: list[dict[str, Any]]) -> dict[str, Any]:
    from anthropic.lib.streaming._messages import accumulate_event

    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for one in told:
        if one["type"] != "ping":
            event = events().validate_python(one)
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.to_dict()


@given(pieces, st.sampled_from(ChatFinishReason), st.sampled_from(["END", 7, None]), st.booleans())
def test_a_stream_put_together_is_the_plain_answer(
    said: list[Any], finish: ChatFinishReason, stop: str | int | None, shows_thinking: bool
) -> None:
    from anthropic.types import Message

    thinking = {"type": "adaptive", "display": "summarized" if shows_thinking else "omitted"}
    call = MessagesRequest.model_validate(CALL | {"thinking": thinking})
    answer = answer_of(said, finish, stop)
    plain = whole(answer, call)
    response = written(events_of(answer), call)
    assert plain.pop("trace_id") == response[-2]["trace_id"] == "trace"
    assert folded(response) == Message.model_validate(plain).to_dict()
    assert [one["type"] for one in response[:2]] == ["message_start", "ping"]
    assert [one["type"] for one in response[-2:]] == ["message_delta", "message_stop"]


def test_token_ids_are_told_when_they_are_known() -> None:
    call = MessagesRequest.model_validate(CALL | {"return_token_ids": True})
    answer = answer_of([ContentPiece("x")])
    plain, response = whole(answer, call), written(events_of(answer), call)
    assert (plain["prompt_token_ids"], plain["token_ids"], plain["logprobs"]) == (PROMPT, [4, 5], [-0.5, -9999.0])
    assert response[0]["message"]["prompt_token_ids"] == PROMPT
    assert (response[-2]["token_ids"], response[-2]["logprobs"]) == ([4, 5], [-0.5, -9999.0])


def test_what_fails_in_the_middle_is_an_event() -> None:
    async def broken(error: Exception) -> AsyncGenerator[ChatEvent, None]:
        yield StreamStarted(PROMPT, NOBODY)
        raise error

    call = MessagesRequest.model_validate(CALL)
    refused = written(broken(ApiError(503, "come back")), call)[-1]
    assert (refused["type"], refused["error"]) == ("error", {"type": "overloaded_error", "message": "come back"})
    fell = written(broken(RuntimeError("secret")), call)[-1]
    assert fell["error"]["type"] == "api_error"
    assert "secret" not in json.dumps(fell)
