"""Chats by OpenAI's SDK over a socket, answered by the bundled model."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import created
from tests.server.model_api.conftest import MODEL, Ephebe
from tests.server.model_api.stockroom import TOOLS, question, result

Chat = Callable[..., Any]
IDS = {"return_token_ids": True}
QUEUE = 'palestra_queue_depth{base_model="ephebe",kind="sample"} '


def trace_of(ephebe: Ephebe, answer: Any) -> dict[str, Any]:
    return ephebe.http().get(f"/v1/traces/{answer.trace_id}").json()


def test_a_plain_chat_is_answered_and_its_tokens_are_counted(chat: Chat) -> None:
    answer = chat("Hello", max_tokens=8, user="me", metadata={"task": "1"}, extra_body=IDS | {"unknown_field": 1})
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.message.role) == ("chat.completion", MODEL, "assistant")
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)
    assert answer.usage.completion_tokens == len(choice.token_ids) <= 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_an_agent_uses_its_tools_and_every_prompt_goes_on_from_the_ids_before(ephebe: Ephebe, chat: Chat) -> None:
    messages: list[Any] = question()
    before: list[int] = []
    calls = 0
    for turn in range(4):
        answer = chat(messages, tools=TOOLS, temperature=0, max_tokens=64, extra_body=IDS)
        (choice,) = answer.choices
        assert answer.prompt_token_ids[: len(before)] == before
        if turn:
            assert answer.usage.prompt_tokens_details.cached_tokens > 0
        before = answer.prompt_token_ids + choice.token_ids
        if choice.finish_reason != "tool_calls":
            break
        calls += len(choice.message.tool_calls)
        echoed = choice.message.model_dump(exclude_none=True)
        for call in echoed["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, indent=2, sort_keys=True)
        messages = [*messages, echoed, *(result(call) for call in choice.message.tool_calls)]
    assert calls >= 1
    trace = trace_of(ephebe, answer)
    assert [t["match"] for t in trace["turns"]] == ["new", *["continued"] * turn]
    assert trace["turns"][-1]["prompt"] == answer.prompt_token_ids
    found = ephebe.http().get(f"/v1/traces/{answer.trace_id}/trajectories").json()["data"]
    assert [one["tokens"] for one in found] == [before]
    assert sum(found[0]["loss_mask"]) == sum(len(t["samples"][0]["tokens"]) for t in trace["turns"])


def test_tool_choice_none_leaves_calls_as_text(chat: Chat) -> None:
    answer = chat(question(), tools=TOOLS, tool_choice="none", temperature=0, max_tokens=64)
    assert answer.choices[0].message.tool_calls is None
    assert "<tool_call>" in answer.choices[0].message.content


def test_a_turn_cut_short_is_ended_by_us_before_the_next(ephebe: Ephebe, chat: Chat) -> None:
    first = chat(question(), temperature=0, max_tokens=3, extra_body=IDS | {"ignore_eos": True})
    assert first.choices[0].finish_reason == "length"
    more = [*question(), first.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    second = chat(more, max_tokens=4, extra_body=IDS)
    before = first.prompt_token_ids + first.choices[0].token_ids
    end = ephebe.http().post("/detokenize", json={"tokens": [second.prompt_token_ids[len(before)]]}).json()["prompt"]
    assert second.prompt_token_ids[: len(before)] == before
    assert end == "<|im_end|>"


def test_an_edited_answer_becomes_a_branch_of_the_same_trace(ephebe: Ephebe, chat: Chat) -> None:
    user = {"role": "user", "content": "And now?"}
    first = chat("Branch me", max_tokens=4, seed=1)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    start = [{"role": "user", "content": "Branch me"}, said, user]
    second = chat(start, max_tokens=4, seed=1)
    edited = [*start, {"role": "assistant", "content": "Something else."}, user]
    third = chat(edited, max_tokens=4, seed=1)
    assert first.trace_id == second.trace_id == third.trace_id
    turns = trace_of(ephebe, third)["turns"]
    assert [(t["match"], t["parent"]) for t in turns] == [("new", None), ("continued", 0), ("branched", 0)]
    assert "palestra_conversation_calls_total" in ephebe.metrics()


def test_tokenize_tells_what_would_be_read(ephebe: Ephebe, chat: Chat) -> None:
    first = chat("Count me", max_tokens=5, extra_body=IDS)
    messages = [
        {"role": "user", "content": "Count me"},
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "More"},
    ]
    response = ephebe.http().post("/tokenize", json={"model": MODEL, "messages": messages}).json()
    assert response["tokens"] == chat(messages, max_tokens=1, extra_body=IDS).prompt_token_ids
    assert (response["count"], response["max_model_len"]) == (len(response["tokens"]), 2048)
    plain = ephebe.http().post("/oai/api/v1/tokenize", json={"prompt": "a <|im_end|> b"}).json()
    back = ephebe.http().post("/v1/detokenize", json={"model": MODEL, "tokens": plain["tokens"]}).json()
    assert back == {"prompt": "a <|im_end|> b"}
    assert len(plain["tokens"]) > 4  # text, not the special token


def test_logprobs_are_the_models_own_and_the_trace_has_those_of_the_draw(ephebe: Ephebe, chat: Chat) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "seed": 3, "logprobs": True, "top_logprobs": 3}
    warm = chat("Hello", temperature=0.5, **options)
    entries = warm.choices[0].logprobs.content
    own = [one.logprob for one in entries]
    at_draw = trace_of(ephebe, warm)["turns"][0]["samples"][0]["logprobs"]
    response = chat("Hello", temperature=0.5, **options, extra_body={"logprobs_mode": "temperature"})
    assert [one.logprob for one in response.choices[0].logprobs.content] == pytest.approx(at_draw, abs=1e-5)
    assert own != pytest.approx(at_draw, abs=1e-3)
    assert all(len(one.top_logprobs) == 3 for one in entries)
    assert all(one.logprob <= one.top_logprobs[0].logprob + 1e-5 for one in entries)
    for one in entries:  # the same token among the likeliest has the same logprob
        same = [top.logprob for top in one.top_logprobs if top.token == one.token and top.bytes == one.bytes]
        assert all(math.isclose(logprob, one.logprob, abs_tol=1e-5) for logprob in same)
    named = chat("Hello", temperature=0.5, **options, extra_body=IDS | {"return_tokens_as_token_ids": True})
    names = [one.token for one in named.choices[0].logprobs.content]
    assert names == [f"token_id:{token}" for token in named.choices[0].token_ids]


def test_at_temperature_one_both_are_the_same(ephebe: Ephebe, chat: Chat) -> None:
    answer = chat("Hello", max_tokens=5, seed=3, logprobs=True)
    response = [one.logprob for one in answer.choices[0].logprobs.content]
    assert response == pytest.approx(trace_of(ephebe, answer)["turns"][0]["samples"][0]["logprobs"], abs=1e-6)


def test_choices_differ_and_seeds_repeat(ephebe: Ephebe, chat: Chat) -> None:
    one, same, other = (chat("Hello", n=4, seed=seed, max_tokens=8, extra_body=IDS) for seed in (5, 5, 6))
    ids = [[choice.token_ids for choice in answer.choices] for answer in (one, same, other)]
    assert ids[0] == ids[1] != ids[2]
    assert len({tuple(tokens) for tokens in ids[0]}) > 1
    assert [choice.index for choice in one.choices] == [0, 1, 2, 3]
    assert one.usage.completion_tokens == sum(len(tokens) for tokens in ids[0])
    assert [s["tokens"] for s in trace_of(ephebe, one)["turns"][0]["samples"]] == ids[0]


def test_equal_calls_at_once_are_sampled_each_for_itself(chat: Chat) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: chat("Hello", temperature=2, max_tokens=16), range(8)))
    assert len({answer.trace_id for answer in answers}) == 8
    assert len({answer.choices[0].message.content for answer in answers}) > 1


def test_stops_and_biases_do_what_they_say(chat: Chat) -> None:
    plain = chat("Hello", temperature=0, max_tokens=12, extra_body=IDS | {"ignore_eos": True})
    text = plain.choices[0].message.content
    stop = text[2:4]
    cut = chat("Hello", temperature=0, max_tokens=12, stop=[stop], extra_body={"ignore_eos": True})
    assert (cut.choices[0].message.content, cut.choices[0].stop_reason) == (text[: text.find(stop)], stop)
    assert cut.choices[0].finish_reason == "stop"
    ids = plain.choices[0].token_ids
    by_id = chat("Hello", temperature=0, max_tokens=12, extra_body=IDS | {"stop_token_ids": [ids[2]]})
    assert by_id.choices[0].stop_reason == ids[2]
    biased = chat("Hello", max_tokens=3, logit_bias={"100": 100}, extra_body=IDS)
    assert biased.choices[0].token_ids == [100] * 3


def test_text_completions_take_text_and_ids(ephebe: Ephebe, client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, temperature=0, logprobs=2)
    ids = ephebe.http().post("/tokenize", json={"prompt": "Hello"}).json()["tokens"]
    both = client.completions.create(
        model=MODEL, prompt=[ids, ids], max_tokens=4, temperature=0, n=2, extra_body=IDS | {"ignore_eos": False}
    )
    assert [choice.text for choice in both.choices] == [text.choices[0].text] * 4
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens).startswith(text.choices[0].text)
    assert len(logprobs.top_logprobs or []) == len(logprobs.tokens)
    assert len(trace_of(ephebe, both)["turns"]) == 2


def test_a_model_is_a_base_a_checkpoint_or_a_session(ephebe: Ephebe, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    service = ephebe.client()
    trained = service.create_lora_training_client(base_model=MODEL, rank=4)
    path = trained.save_weights_for_sampler("first").result().path
    sampler = created(trained.save_weights_and_get_sampling_client())
    session_id = sampler._sampling_session_id
    assert session_id is not None
    for name in (path, session_id):
        assert client.models.retrieve(name).id == name
        for _ in range(2):
            answer = client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "Hi"}], max_tokens=2
            )
            assert answer.model == name
    weights = {one["weights"] for one in trace_of(ephebe, answer)["turns"]}
    assert all("@" in one for one in weights)
    from tinker import types

    again = sampler.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=2)).result()
    assert again.sequences  # the SDK's own numbers are still free
    service.close("success").result()


def test_a_client_that_leaves_takes_its_sample_along(ephebe: Ephebe) -> None:
    def waiting() -> float:
        (line,) = [line for line in ephebe.metrics().splitlines() if line.startswith(QUEUE)]
        return float(line.removeprefix(QUEUE))

    endless = {"model": MODEL, "prompt": "Hello", "n": 64, "max_tokens": 2000, "ignore_eos": True}

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=ephebe.url, timeout=None) as client:
            leaving = asyncio.create_task(client.post("/v1/completions", json=endless))
            await asyncio.to_thread(ephebe.until, lambda: waiting() == 1)
            leaving.cancel()

    asyncio.run(leave())
    ephebe.until(lambda: waiting() == 0, timeout_s=10)
