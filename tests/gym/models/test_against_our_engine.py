"""The model server in front of `palestra serve`, asked by the official clients: token for token, one call each."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest

from palestra.gym.models.capture import CaptureFolder
from palestra.gym.models.capture_records import model_call_capture, trajectory
from palestra.gym.models.prefix_merge import folded, rebuild
from tests.gym.models.conftest import Policy
from tests.gym.models.scripted import OPENAI, listening, model
from tests.server.model_api.conftest import Ephebe

SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOLS: list[Any] = [{"type": "function", "name": "stock", "description": "How many there are.", "parameters": SCHEMA}]


def ask(url: str, body: dict[str, Any], cookies: Any = None, path: str = "/v1/responses") -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, cookies=cookies, timeout=60)


def ids_of(items: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    """Prompt and generation of each call."""
    carriers = [item for item in items if item.get("generation_token_ids")]
    for item in carriers:
        assert len(item["generation_log_probs"]) == len(item["generation_token_ids"])
    return [(item["prompt_token_ids"], item["generation_token_ids"]) for item in carriers]


def assert_contiguous(calls: list[tuple[list[int], list[int]]]) -> None:
    for (prompt, generation), (after, _) in pairwise(calls):
        assert after[: len(prompt) + len(generation)] == prompt + generation


def play(url: str, turns: int, **options: Any) -> list[dict[str, Any]]:
    """An agent's loop, with a tool that is called in every turn, unless a call is cut short."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "How many cups are there?"}]
    cookies = None
    for turn in range(turns):
        body = {"input": items, "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 60, **options}
        answer = ask(url, body, cookies)
        assert answer.status_code == 200, answer.text
        cookies = answer.cookies
        output = answer.json()["output"]
        calls = [one["call_id"] for one in output if one["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": one, "output": f"{turn} of them"} for one in calls]
        items = [*items, *output, *(results or [{"role": "user", "content": "Go on."}])]
    return items


def test_a_conversation_with_tools_goes_on_token_for_token_with_one_upstream_call_a_turn(policy: Policy) -> None:
    before = policy.upstream_calls()
    items = play(policy.url, 3, temperature=0)
    calls = ids_of(items)
    assert len(calls) == 3
    assert any(item.get("type") == "function_call_output" for item in items)
    assert_contiguous(calls)
    assert policy.upstream_calls() - before == 3


def test_ids_on_items_are_what_the_engine_goes_on_from_whatever_the_text_says(policy: Policy) -> None:
    question = {"role": "user", "content": "Say a word."}
    first = ask(policy.url, {"input": [question], "max_output_tokens": 8}).json()["output"]
    first[-1]["content"][0]["text"] = "something else"
    again = {"role": "user", "content": "And another."}
    second = ask(policy.url, {"input": [question, *first, again], "max_output_tokens": 8}).json()["output"]
    calls = ids_of([*first, *second])
    assert len(calls) == 2
    assert_contiguous(calls)


def test_a_native_responses_endpoint_gives_the_same_ids(ephebe: Ephebe) -> None:
    server = model(base_url=f"{ephebe.url}/v1", return_token_id_information=True, is_responses_native=True)
    with listening(server) as url:
        calls = ids_of(play(url, 2))
    assert len(calls) == 2
    assert_contiguous(calls)


def test_openai_model_passes_responses_and_chats_through(ephebe: Ephebe) -> None:
    with listening(model(of=OPENAI, openai_base_url=f"{ephebe.url}/v1", extra_body={"seed": 3})) as url:
        response = ask(url, {"input": "Hello", "max_output_tokens": 4, "model": "another"}).json()
        assert (response["object"], response["model"], response["usage"]["output_tokens"]) == ("response", "ephebe", 4)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        assert ask(url, body, path="/v1/chat/completions").json()["usage"]["completion_tokens"] == 4


def test_a_prompt_beyond_the_context_ends_the_rollout_without_an_error(policy: Policy) -> None:
    response = ask(policy.url, {"input": "far too long " * 20_000, "max_output_tokens": 4}).json()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["content"][0]["text"] == ""
    assert "prompt_token_ids" not in response["output"][0]


def test_the_openai_client_reads_streams_of_both_apis(policy: Policy) -> None:
    with policy.openai() as client:
        with client.responses.stream(
            model="m", input="How many cups?", tools=TOOLS, tool_choice="required", max_output_tokens=60, temperature=0
        ) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        call = final.output[-1]
        assert call.type == "function_call"
        assert json.loads(call.arguments).keys() == {"item"}
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert "response.function_call_arguments.delta" in kinds

        request: Any = {
            "model": "m",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 6,
            "temperature": 0,
        }
        plain = client.chat.completions.create(**request)
        chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == plain.choices[0].message.content
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_the_anthropic_client_calls_tools_and_streams(policy: Policy) -> None:
    tools: Any = [{"name": "stock", "description": "How many.", "input_schema": SCHEMA}]
    request: Any = {"model": "claude", "max_tokens": 60, "tools": tools, "tool_choice": {"type": "any"}}
    request["extra_body"] = {"temperature": 0}
    history: Any = [{"role": "user", "content": "How many cups are there?"}]
    with policy.anthropic() as client:
        plain = client.messages.create(**request, messages=history)
        with client.messages.stream(**request, messages=history) as stream:
            streamed = stream.get_final_message()
        assert plain.stop_reason == streamed.stop_reason == "tool_use"
        call = plain.content[-1]
        assert call.type == "tool_use"
        assert [one.model_dump(exclude={"id"}) for one in plain.content] == [
            one.model_dump(exclude={"id"}) for one in streamed.content
        ]
        history += [{"role": "assistant", "content": [one.model_dump() for one in plain.content]}]
        history += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "three"}]}]
        after = client.messages.create(**request, messages=history)
        assert after.usage.input_tokens > plain.usage.input_tokens


def test_what_a_harness_without_ids_said_is_rebuilt_from_the_calls_that_were_kept(policy: Policy) -> None:
    client = policy.openai("/ng-rollout/7-0/training-token-capture")
    messages: list[Any] = [{"role": "user", "content": "How many cups are there?"}]
    with client:
        for turn in range(3):
            stream = client.chat.completions.create(
                model="m", messages=messages, max_tokens=20, stream=True, temperature=0
            )
            said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Really? ({turn})"}]

    kept = CaptureFolder(policy.folder, "tokens").read("7-0")
    row = folded({"reward": 1.0, "response": {"output": []}}, rebuild(kept.lines))
    calls = ids_of(row["response"]["output"])
    assert (len(calls), row["_ng_token_capture"]["fault"]) == (3, None)
    assert_contiguous(calls)

    exchanges = CaptureFolder(policy.folder, "capture").read("7-0")
    assert [line["request"]["stream"] for line in exchanges.lines] == [True] * 3
    response = model_call_capture("7-0", exchanges)
    assert response["metrics"]["tokens_out"] == sum(len(generation) for _, generation in calls)
    assert "gaps" not in response
    assert len(trajectory("7", "7-0", exchanges)["turns"]) == 3


@pytest.mark.slow
def test_sixteen_conversations_at_once_each_go_on_token_for_token(policy: Policy) -> None:
    with ThreadPoolExecutor(16) as pool:
        for items in pool.map(lambda _: play(policy.url, 5, temperature=1.0), range(16)):
            calls = ids_of(items)
            assert len(calls) == 5
            assert_contiguous(calls)
