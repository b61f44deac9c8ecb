"""Traces: durable before the answer, their owner's alone, readable as JSON and as lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server.conftest import created
from tests.server.model_api.conftest import MODEL, Ephebe

MakeEphebe = Callable[..., Ephebe]
BIG = 10**30
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def ask(client: openai.OpenAI, model: str = MODEL, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": model, "messages": HI, "max_tokens": 4} | options)


def test_a_turn_tells_what_was_sampled_and_how(ephebe: Ephebe, client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0.7, user="me", metadata={"k": "v"}, extra_body={"return_token_ids": True})
    trace = ephebe.http().get(f"/v1/traces/{answer.trace_id}").json()
    (turn,) = trace["turns"]
    assert (trace["id"], trace["model"], trace["turn_count"]) == (answer.trace_id, MODEL, 1)
    assert turn["prompt"] == answer.prompt_token_ids
    (sample,) = turn["samples"]
    assert sample["tokens"] == answer.choices[0].token_ids
    assert len(sample["logprobs"]) == len(sample["tokens"])
    assert (turn["temperature"], turn["weights"], turn["response_id"]) == (0.7, MODEL, answer.id)
    assert (turn["user"], turn["metadata"], turn["route"]) == ("me", {"k": "v"}, "chat")
    assert turn["sample_s"] > 0
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    assert (turn["messages"], turn["answers"]) == (HI, [said])
    lines = ephebe.http().get(f"/v1/traces/{answer.trace_id}?format=jsonl").text.splitlines()
    assert [json.loads(line)["samples"] for line in lines] == [turn["samples"]]


def test_messages_are_told_turn_by_turn_without_keys_and_whatever_they_hold(
    ephebe: Ephebe, client: openai.OpenAI
) -> None:
    half, big = '{"half": "\\ud800"}', f'{{"big": {BIG}}}'
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": given}}
        for name, given in (("h", half), ("c", big))
    ]
    result = {"role": "tool", "tool_call_id": "c", "content": "the key is tml-0123456789abcdef"}
    first = ask(client, messages=[*HI, {"role": "assistant", "content": "", "tool_calls": calls}, result])
    said = first.choices[0].message.model_dump(exclude_none=True)
    history = [*HI, {"role": "assistant", "content": "", "tool_calls": calls}, result, said, *HI]
    second = ask(client, messages=history)
    assert second.trace_id == first.trace_id
    one, two = ephebe.http().get(f"/v1/traces/{first.trace_id}").json()["turns"]
    assert [message["role"] for message in one["messages"]] == ["user", "assistant", "tool"]
    assert [one["function"]["arguments"] for one in one["messages"][1]["tool_calls"]] == [half, {"big": BIG}]
    assert one["messages"][2]["content"] == "the key is [redacted]"
    assert two["messages"] == HI
    lines = ephebe.http().get("/v1/traces?limit=1&format=jsonl").text.splitlines()
    assert json.loads(lines[0])["turns"] == [one, two]


def test_traces_are_listed_and_exported_in_lines(ephebe: Ephebe, client: openai.OpenAI) -> None:
    made = [ask(client).trace_id for _ in range(3)]
    listed = ephebe.http().get("/v1/traces?limit=3").json()
    assert [one["id"] for one in listed["data"]] == made[::-1]
    lines = ephebe.http().get("/v1/traces?limit=3&format=jsonl").text.splitlines()
    assert [json.loads(line)["id"] for line in lines] == made[::-1]
    assert all(json.loads(line)["turns"][0]["samples"] for line in lines)
    assert listed["total"] >= 3


def test_two_keys_see_nothing_of_each_other(mortal_keyed: Ephebe) -> None:
    server = mortal_keyed
    alice, bob = (server.make_key(name) for name in ("alice", "bob"))
    answer = ask(server.openai(alice), extra_body={"return_token_ids": True})
    said = answer.choices[0].message.model_dump()
    hers, his = server.http(key=alice), server.http(key=bob)
    assert his.get("/v1/traces").json()["total"] == 0
    assert hers.get("/v1/traces").json()["total"] == 1
    for path in ("", "/trajectories", "?format=jsonl"):
        assert his.get(f"/v1/traces/{answer.trace_id}{path}").status_code == 404
        assert hers.get(f"/v1/traces/{answer.trace_id}{path}").status_code == 200
    # The same words from another are another conversation.
    more = ask(server.openai(bob), messages=[*HI, said, *HI])
    (turn,) = his.get(f"/v1/traces/{more.trace_id}").json()["turns"]
    assert turn["match"] == "unmatched"
    # Nor does he learn from a cache what she asked.
    long = [{"role": "user", "content": "cups and hats " * 40}]
    assert [
        ask(server.openai(key), messages=long).usage.prompt_tokens_details.cached_tokens for key in (alice, bob)
    ] == [0, 0]
    assert ask(server.openai(alice), messages=long).usage.prompt_tokens_details.cached_tokens > 0
    # Nor do sessions of hers exist for him.
    service = server.client(key=alice)
    sampler = created(service.create_sampling_client(base_model=MODEL))
    session_id = sampler._sampling_session_id
    assert session_id is not None
    assert ask(server.openai(alice), session_id).model == session_id
    with pytest.raises(openai.NotFoundError) as missing:
        ask(server.openai(bob), session_id)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as wrong:
        ask(server.openai("tml-wrong"))
    assert wrong.value.code == "invalid_api_key"
    service.close("success").result()


def test_traces_survive_a_server_that_is_killed(mortal: Ephebe) -> None:
    server = mortal
    first = ask(server.openai())
    more = [*HI, first.choices[0].message.model_dump(), *HI]
    second = ask(server.openai(), messages=more)
    before = server.http().get(f"/v1/traces/{second.trace_id}").json()
    assert len(before["turns"]) == 2
    server.restart()
    assert server.http().get(f"/v1/traces/{second.trace_id}").json() == before
    assert ask(server.openai(), messages=more).usage is not None


def test_surplus_traces_are_swept(narrow: Ephebe) -> None:
    for _ in range(4):
        last = ask(narrow.openai())
    narrow.until(lambda: narrow.http().get("/v1/traces").json()["total"] == 2)
    assert narrow.http().get("/v1/traces").json()["data"][0]["id"] == last.trace_id
