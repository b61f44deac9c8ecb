"""Ids of a call from wherever an endpoint puts them, the second request only where it tells none."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from tests.gym.models.scripted import Endpoint, Reply, always, asked, completion

Json = dict[str, Any]
RESPONSES = "/v1/responses"
IDS = {"prompt_token_ids": [1, 2, 3], "generation_token_ids": [7, 8], "generation_log_probs": [-0.5, -0.25]}
USER = {"role": "user", "content": "Hi"}


def logprobs(*tokens: Any) -> Json:
    return {"content": [{"token": token, "logprob": -0.5 / (at + 1)} for at, token in enumerate(tokens)]}


def vllm(ids: Any = (7, 8), prompt: Any = (1, 2, 3), names: Any = ("token_id:7", "token_id:8")) -> Json:
    """An answer as vLLM tells it with `return_token_ids`."""
    answer = completion()
    answer["choices"][0] |= {"logprobs": logprobs(*names), "token_ids": None if ids is None else list(ids)}
    return {**answer, "prompt_token_ids": None if prompt is None else list(prompt)}


def tokenizing(answer: Json) -> Reply:
    async def reply(path: str, body: Json) -> web.StreamResponse:
        del body
        return web.json_response({"tokens": [1, 2, 3]} if path == "/tokenize" else answer)

    return reply


def ids_told(reply: Reply, **settings: Any) -> tuple[Json, Endpoint]:
    body = {"input": [USER], "tools": [{"type": "function", "name": "look", "parameters": {}}]}
    found, endpoint = asked(reply, RESPONSES, body, return_token_id_information=True, **settings)
    assert found.status == 200, found.body
    return {key: found.body["output"][-1][key] for key in IDS}, endpoint


@pytest.mark.parametrize(
    "answer",
    [completion("Yes.", **IDS), vllm(), vllm(names=("a", "b"))],
    ids=["on the message", "beside it", "beside it, with tokens as text"],
)
def test_ids_in_the_answer_cost_one_call(answer: Json) -> None:
    found, endpoint = ids_told(always(answer))
    assert found == IDS
    assert len(endpoint.asked) == 1


def test_an_endpoint_that_tells_no_prompt_is_asked_to_tokenize_the_same_messages() -> None:
    for answer in (vllm(ids=None, prompt=None), vllm(prompt=None)):
        found, endpoint = ids_told(tokenizing(answer), chat_template_kwargs={"a": 1})
        assert found == IDS
        (_, first), (path, second) = endpoint.asked
        assert path == "/tokenize"
        assert second == {key: first[key] for key in ("model", "messages", "tools", "chat_template_kwargs")}


def test_the_request_asks_for_ids_and_one_answer_and_can_be_kept_from_asking_inline() -> None:
    _, endpoint = ids_told(always(vllm()))
    asked_for = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "n": 1}
    inline = {"return_token_ids": True, "logprobs_mode": "temperature"}
    assert {key: endpoint.bodies[0].get(key) for key in asked_for | inline} == asked_for | inline
    _, endpoint = ids_told(tokenizing(vllm(prompt=None)), request_prompt_and_generation_token_ids=False)
    assert "return_token_ids" not in endpoint.bodies[0]


def test_what_carried_the_ids_is_taken_out_of_a_chat_answer() -> None:
    found, _ = asked(always(vllm()), "/v1/chat/completions", {"messages": [USER]}, return_token_id_information=True)
    choice = found.body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello.", **IDS}
    assert not {"logprobs", "token_ids"} & choice.keys()
    assert "prompt_token_ids" not in found.body


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (completion(), "no logprobs"),
        (vllm(ids=None, names=("a", "b")), "its tokens are text"),
        (vllm(ids=[7]), "1 token ids and 2 logprobs"),
        (vllm(ids=[7, 9]), "not those of its logprobs"),
        (completion(prompt_token_ids=[1]), "not all of"),
        (completion("x", **(IDS | {"generation_log_probs": [-1.0]})), "different numbers of"),
    ],
)
def test_ids_that_are_missing_or_contradict_each_other_fail_the_call(answer: Json, words: str) -> None:
    found, _ = asked(tokenizing(answer), RESPONSES, {"input": "Hi"}, return_token_id_information=True)
    assert found.status == 500
    assert words in found.body["failure_reason"]


def test_a_tokenizer_that_answers_nonsense_fails_the_call() -> None:
    found, _ = asked(always(vllm(prompt=None)), RESPONSES, {"input": "Hi"}, return_token_id_information=True)
    assert found.status == 500
    assert "no `tokens`" in found.body["failure_reason"]


def test_ids_nobody_asked_for_are_not_passed_on() -> None:
    found, endpoint = asked(always(completion()), RESPONSES, {"input": [{"role": "assistant", "content": "a", **IDS}]})
    assert "prompt_token_ids" not in str(endpoint.bodies)
    assert "prompt_token_ids" not in str(found.body)


@pytest.mark.parametrize("text", ["maximum context length is 8 tokens", "max_tokens is too large"])
def test_an_overflow_ends_the_conversation_without_ids(text: str) -> None:
    reply = always({"error": {"message": text}}, 400)
    found, _ = asked(reply, RESPONSES, {"input": "Hi"}, return_token_id_information=True)
    assert found.body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert not IDS.keys() & found.body["output"][-1].keys()
