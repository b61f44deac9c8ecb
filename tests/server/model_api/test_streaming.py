"""Streams of chat and text completions, by OpenAI's SDK."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server.model_api.conftest import MODEL, Ephebe
from tests.server.model_api.stockroom import TOOLS, question

Chat = Callable[..., Any]
IDS = {"return_token_ids": True}
USAGE = {"include_usage": True}


def folded(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """What the deltas of each choice say, put together."""
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        whole = choices.setdefault(choice.index, {"content": "", "calls": [], "token_ids": [], "logprobs": []})
        whole["content"] += choice.delta.content or ""
        whole["calls"] += [(c.function.name, c.function.arguments) for c in choice.delta.tool_calls or ()]
        whole["token_ids"] += getattr(choice, "token_ids", None) or []
        whole["logprobs"] += [e.logprob for e in choice.logprobs.content] if choice.logprobs else []
        whole["finish"] = choice.finish_reason or whole.get("finish")
    return choices


def test_a_stream_says_what_the_plain_answer_says(chat: Chat) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 4, "max_tokens": 24, "logprobs": True, "top_logprobs": 2}
    plain = chat("Hello", **options, extra_body=IDS)
    chunks = list(chat("Hello", **options, stream=True, stream_options=USAGE, extra_body=IDS))
    said = folded(chunks)
    for choice in plain.choices:
        one = said[choice.index]
        assert (one["content"], one["finish"]) == (choice.message.content, choice.finish_reason)
        assert one["token_ids"] == choice.token_ids
        assert one["logprobs"] == pytest.approx([e.logprob for e in choice.logprobs.content], abs=1e-5)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].prompt_token_ids == plain.prompt_token_ids
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_tool_calls_are_streamed_and_the_conversation_goes_on(ephebe: Ephebe, chat: Chat) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "temperature": 0, "max_tokens": 64}
    plain = chat(question(), **options)
    chunks = list(chat(question(), **options, stream=True))
    (one,) = folded(chunks).values()
    calls = plain.choices[0].message.tool_calls
    assert one["calls"] == [(call.function.name, call.function.arguments) for call in calls]
    assert one["finish"] == "tool_calls"
    message = chat_accumulated(ephebe)
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in message.tool_calls]
    more = chat([*question(), message.model_dump(exclude_none=True), *answers], **options, extra_body=IDS)
    turns = ephebe.http().get(f"/v1/traces/{more.trace_id}").json()["turns"]
    assert turns[-1]["match"] == "continued"
    before = turns[-2]["prompt"] + turns[-2]["samples"][0]["tokens"]
    assert more.prompt_token_ids[: len(before)] == before


def chat_accumulated(ephebe: Ephebe) -> Any:
    """The SDK's own way to put a stream together."""
    with (
        ephebe.openai() as client,
        client.chat.completions.stream(
            model=MODEL, messages=question(), tools=TOOLS, temperature=0, max_tokens=64
        ) as stream,
    ):
        return stream.get_final_completion().choices[0].message


def test_stop_strings_are_never_shown_not_even_a_part(chat: Chat) -> None:
    whole = chat("Hello", temperature=0, max_tokens=24).choices[0].message.content
    stop = whole[3:6]
    chunks = list(chat("Hello", temperature=0, max_tokens=24, stop=stop, stream=True))
    (one,) = folded(chunks).values()
    assert one["content"] == whole[: whole.index(stop)]
    assert one["finish"] == "stop"
    shown = chat("Hello", temperature=0, max_tokens=24, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert shown.choices[0].message.content == whole[: whole.index(stop)] + stop


def test_usage_is_counted_on_the_way_whatever_is_shown(chat: Chat) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 64, "stream": True}
    counted = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(question(), **options, stream_options=counted))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2] == counts[-1] > 8  # the last but one is the finish: all tokens are in


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_does_not_count_before_min_tokens(chat: Chat, stream: bool) -> None:
    whole = chat("Hello", seed=9, max_tokens=24, extra_body=IDS | {"ignore_eos": True})
    content, first = whole.choices[0].message.content, whole.choices[0].message.content[1]
    options: dict[str, Any] = {"seed": 9, "max_tokens": 24, "stop": [first], "stream": stream}
    answer = chat("Hello", **options, extra_body=IDS | {"ignore_eos": True, "min_tokens": 10})
    said = folded(list(answer))[0]["content"] if stream else answer.choices[0].message.content
    assert content.startswith(said)
    assert first in said


def test_texts_are_streamed_too(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": ["Hello", "One two"], "n": 2, "seed": 1, "max_tokens": 12}
    plain = client.completions.create(**options, logprobs=1)
    texts = {choice.index: "" for choice in plain.choices}
    tokens: dict[int, list[str]] = {choice.index: [] for choice in plain.choices}
    finish: dict[int, str] = {}
    for chunk in client.completions.create(**options, logprobs=1, stream=True, stream_options=USAGE):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
            finish[choice.index] = choice.finish_reason or ""
    assert texts == {choice.index: choice.text for choice in plain.choices}
    assert tokens == {choice.index: choice.logprobs.tokens for choice in plain.choices}
    assert finish == {choice.index: choice.finish_reason for choice in plain.choices}
    assert chunk.usage.completion_tokens == plain.usage.completion_tokens


def test_what_is_wrong_is_refused_before_the_stream_begins(client: openai.OpenAI, chat: Chat) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}], stream=True)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat("word " * 5000, stream=True)
    with pytest.raises(openai.BadRequestError, match="stream: true"):
        chat("Hello", stream_options=USAGE)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=MODEL, prompt=[5] * 5000, stream=True)


def test_a_client_that_leaves_its_stream_stops_the_sampling(ephebe: Ephebe, chat: Chat) -> None:
    stream = chat("Hello", max_tokens=1900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    ephebe.until(lambda: 'palestra_queue_depth{base_model="ephebe",kind="sample"} 0.0' in ephebe.metrics())


def test_many_streams_at_once_by_the_asynchronous_client(ephebe: Ephebe) -> None:
    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], seed=seed, max_tokens=12, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{ephebe.url}/v1", api_key="tml-test") as client:
            return await asyncio.gather(*(one(client, seed % 4) for seed in range(16)))

    said = asyncio.run(all_of_them())
    assert said[:4] * 4 == said


def test_an_engine_that_dies_ends_the_stream_with_an_error(mortal: Ephebe) -> None:
    with mortal.openai() as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=1900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        chunks = iter(stream)
        for _ in range(3):
            next(chunks)
        mortal.kill_worker()
        with pytest.raises(openai.APIError, match="engine died"):
            list(chunks)
