"""What vLLM is asked, and what it is not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palestra.server.core.errors import Refusal
from palestra.server.vllm.params import ServedModelFacts, check_request, completion_body, is_scored, scoring_body
from palestra.types import Grammar, GrammarKind, SampleRequest, SamplingParams, TensorData

FACTS = ServedModelFacts(context=100, vocabulary=50, eos=(7, 60))
PROMPT = (1, 2, 3)


def ask(prompt: tuple[int, ...] = PROMPT, about: dict[str, Any] | None = None, **params: Any) -> SampleRequest:
    return SampleRequest(prompt=prompt, params=SamplingParams(**params), **(about or {}))


def body_of(request: SampleRequest) -> dict[str, Any]:
    check_request(request, FACTS)
    return completion_body(request, "m", FACTS, stream=False)


def test_nothing_is_left_to_vllms_defaults():
    body = body_of(ask())
    assert (body["model"], body["prompt"], body["max_tokens"], body["n"]) == ("m", PROMPT, 97, 1)
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert (body["ignore_eos"], body["stop_token_ids"], body["stop"]) == (True, [7], ())
    assert body["logprobs"] == 0
    assert not {"seed", "logit_bias", "prompt_logprobs", "structured_outputs", "stream"} & body.keys()


def test_what_is_asked_for_is_passed_on():
    params = {"seed": 5, "top_k": 4, "logit_bias": {3: -1.5}, "stop_token_ids": (9,), "stop_strings": ("x",)}
    about = {"num_samples": 3, "prompt_logprobs": True, "topk_prompt_logprobs": 2}
    body = body_of(ask(about=about, min_tokens=2, presence_penalty=0.5, max_tokens=8, **params))
    assert (body["seed"], body["top_k"], body["logit_bias"]) == (5, 4, {"3": -1.5})
    assert (body["stop_token_ids"], body["stop"], body["min_tokens"]) == ([9], ("x",), 2)
    assert (body["n"], body["prompt_logprobs"], body["presence_penalty"], body["max_tokens"]) == (3, 2, 0.5, 8)


def test_no_token_stops_where_none_is_named():
    assert body_of(ask(stop_token_ids=()))["stop_token_ids"] == []


def test_max_tokens_is_cut_to_the_room_there_is():
    assert body_of(ask(max_tokens=1000))["max_tokens"] == 97
    assert body_of(ask(max_tokens=1000, top_p=0.5))["max_tokens"] == 96  # one more is needed to score it


@pytest.mark.parametrize(
    ("params", "scored"),
    [
        ({}, False),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.0}, False),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3}, False),  # greedy: they change nothing
        ({"temperature": 0.0, "logit_bias": {1: 2.0}}, True),
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({"min_tokens": 2}, True),
        ({"repetition_penalty": 1.2}, True),
    ],
)
def test_an_answer_is_scored_where_vllm_tells_other_logprobs_than_ours(params: dict[str, Any], scored: bool):
    request = ask(about={"topk_logprobs": 3}, **params)
    assert is_scored(request) is scored
    assert body_of(request)["logprobs"] == (0 if scored else 3)


def test_raw_logprobs_are_scored_where_the_temperature_changes_them():
    assert is_scored(ask(about={"raw_logprobs": True}, temperature=0.7))
    assert not is_scored(ask(about={"raw_logprobs": True}))


def structured(**grammar: Any) -> dict[str, Any]:
    request = ask(about={"grammar": Grammar(**grammar)})
    assert is_scored(request)
    return body_of(request)["structured_outputs"]


def test_a_grammar_is_passed_on():
    assert structured(kind=GrammarKind.LARK, text="start: /a/") == {"grammar": "start: /a/"}
    assert structured(kind=GrammarKind.REGEX, text="a/b") == {"regex": "a/b"}
    request = {"type": "object", "x-guidance": {"lenient": True, "whitespace_pattern": " ?"}}
    schema = structured(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(request))["json"]
    assert (schema["type"], schema["x-guidance"]["lenient"]) == ("object", True)
    assert "whitespace_pattern" not in schema["x-guidance"]  # it would be repeated without end


def test_what_is_around_an_answer_becomes_one_grammar_with_it():
    whole = structured(kind=GrammarKind.REGEX, text="a/b", around='start: "<t>" @answer')["grammar"]
    assert whole.split("\n")[:2] == ['start: "<t>" answer_itself', r"answer_itself: /a\/b/"]
    with pytest.raises(Refusal, match="a custom grammar"):
        structured(kind=GrammarKind.LARK, text="start: /a/", around="start: @answer")


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (ask(prompt=()), "no tokens"),
        (ask(prompt=(50,)), "vocabulary of 50"),
        (ask(prompt=(1,) * 100), "context of 100"),
        (ask(temperature=0.001), "temperature is 0.001"),
        (ask(logit_bias={1: float("-inf")}), "logit_bias"),
        (ask(logit_bias={1: float("nan")}), "logit_bias"),
        (ask(seed=1 << 64), "seed"),
        (ask(temperature=0.7, top_p=0.9, top_k=5), "temperature 0.7 with top_k and top_p"),
        (ask(temperature=2.0, min_tokens=1), "temperature 2 with min_tokens"),
        (ask(about={"prompt_alt_tokens_k": 2}), "prompt_alt_tokens_k"),
        (
            ask(about={"target_prompt_logprobs": TensorData(data=b"", dtype="int64", shape=(2, 0))}),
            "target_prompt_logprobs",
        ),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(request_: SampleRequest, named: str):
    with pytest.raises(Refusal, match=named) as refused:
        check_request(request_, FACTS)
    assert refused.value.status == 400


def test_an_owners_salt_is_in_every_request():
    """Scores too: they are of the same text."""
    request = ask(about={"cache_salt": "alice"}, top_p=0.5)
    assert is_scored(request)
    bodies = (body_of(request), scoring_body(request, (*request.prompt, 3), "m"))
    assert [body["cache_salt"] for body in bodies] == ["alice", "alice"]
    assert "cache_salt" not in body_of(ask())
