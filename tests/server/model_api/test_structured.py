"""Answers that look as they were asked to, by OpenAI's SDK and the bundled model."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from openai.lib._tools import pydantic_function_tool

NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
ODD = {"type": "object", "properties": {"id": {"type": "string", "format": "odd"}}, "required": ["id"]}
CALL = "2044"
"""The id of `<tool_call>`."""


class Mood(StrEnum):
    GOOD = "good"
    BAD = "bad"


class Step(pydantic.BaseModel):
    number: int
    mood: Mood


class Answer(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(max_length=2)
    is_final: bool
    score: float | None


def tool(name: str, parameters: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or WEATHER, **options}}


def calls_of(answer: Any, choice: int = 0) -> list[tuple[str, dict[str, Any]]]:
    made = answer.choices[choice].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in made]


def refused(ask: Any, **options: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as error:
        ask("Hello", **options)
    return error.value


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.5])
def test_pydantic_model_comes_back_parsed(client, temperature):
    answer = client.chat.completions.parse(
        model="ephebe",
        messages=[{"role": "user", "content": "Think of something."}],
        response_format=Answer,
        temperature=temperature,
        seed=1,
        max_tokens=400,
        extra_body=NO_THOUGHT,
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)
    assert answer.choices[0].finish_reason == "stop"


def test_json_object_is_an_object(chat):
    answer = chat(
        "List some.",
        response_format={"type": "json_object"},
        n=6,
        max_tokens=150,
        temperature=1.0,
        seed=3,
        extra_body=NO_THOUGHT,
    )
    ended = [c.message.content for c in answer.choices if c.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_thinking_comes_before_the_format(ephebe, chat):
    """The model may think first; what it thinks is its own."""
    tokens = ephebe.http().post("/tokenize", json={"prompt": "<think></think> the"}).json()["tokens"]
    bias = dict(zip(map(str, tokens), (50, 49, 50), strict=True))
    answer = chat("Go.", response_format=FORMAT, n=6, max_tokens=100, logit_bias=bias, seed=5)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.reasoning_content is not None
        jsonschema.validate(json.loads(choice.message.content), WEATHER)
    assert any("the" in choice.message.reasoning_content for choice in answer.choices)


def test_logprobs_and_streams_of_constrained_answers_are_like_any_other(client):
    options = {"model": "ephebe", "messages": [{"role": "user", "content": "Go."}], "seed": 3, "max_tokens": 100}
    options |= {"response_format": FORMAT, "logprobs": True, "extra_body": NO_THOUGHT}
    whole = client.chat.completions.create(**options)
    chunks = [c for c in client.chat.completions.create(**options, stream=True) if c.choices]
    jsonschema.validate(json.loads(whole.choices[0].message.content), WEATHER)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert all(t.logprob <= 0 for t in whole.choices[0].logprobs.content)


def test_required_tools_are_called_by_their_schemas(chat):
    tools = [
        tool("weather"),
        tool("stock", {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}),
    ]
    answer = chat(
        "Hi.", tools=tools, tool_choice="required", n=6, max_tokens=150, temperature=1.2, seed=2, extra_body=NO_THOUGHT
    )
    for number, choice in enumerate(answer.choices):
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        for name, arguments in calls_of(answer, number):
            jsonschema.validate(arguments, WEATHER if name == "weather" else tools[1]["function"]["parameters"])
    assert any(choice.finish_reason == "tool_calls" for choice in answer.choices)


def test_named_tool_is_called_once(chat):
    tools = [tool("weather"), tool("forecast")]
    choice = {"type": "function", "function": {"name": "forecast"}}
    answer = chat("Hi.", tools=tools, tool_choice=choice, n=4, max_tokens=200, extra_body=NO_THOUGHT)
    for number in range(4):
        ((name, arguments),) = calls_of(answer, number)
        assert name == "forecast"
        jsonschema.validate(arguments, WEATHER)


def test_one_call_where_several_are_not_wanted(chat):
    tools = [tool("weather"), tool("forecast")]
    options: dict[str, Any] = {"tools": tools, "n": 6, "max_tokens": 200, "parallel_tool_calls": False}
    answer = chat("Hi.", tool_choice="required", extra_body=NO_THOUGHT, **options)
    assert [len(calls_of(answer, i)) for i in range(6)] == [1] * 6
    bias = {CALL: 100}  # it calls again and again
    answer = chat("Hi.", logit_bias=bias, extra_body=NO_THOUGHT, **options)
    assert {len(calls_of(answer, i)) for i in range(6)} <= {0, 1}
    assert any(calls_of(answer, i) for i in range(6))


def test_allowed_tools_are_the_only_ones(chat):
    tools = [tool("weather"), tool("forecast"), tool("history")]
    some = [{"type": "function", "function": {"name": name}} for name in ("forecast", "history")]
    for mode in ("required", "auto"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": some}}
        answer = chat(
            "Hi.", tools=tools, tool_choice=choice, n=4, max_tokens=120, logit_bias={CALL: 100}, extra_body=NO_THOUGHT
        )
        names = {name for i in range(4) for name, _ in calls_of(answer, i)}
        assert names
        assert names <= {"forecast", "history"}


def test_strict_tools_bind_a_call_that_the_model_makes_on_its_own(chat):
    options: dict[str, Any] = {"n": 6, "max_tokens": 200, "temperature": 1.3, "seed": 4, "extra_body": NO_THOUGHT}
    answer = chat("Hi.", tools=[tool("weather", strict=True)], logit_bias={CALL: 100}, **options)
    made = [call for i in range(6) for call in calls_of(answer, i)]
    assert made
    for name, arguments in made:
        assert name == "weather"
        jsonschema.validate(arguments, WEATHER)
    free = chat("Hi.", tools=[tool("weather", strict=True)], logit_bias={CALL: -100}, **options)
    assert {c.finish_reason for c in free.choices} <= {"stop", "length"}


def test_sdk_parses_strict_calls(client):
    answer = client.chat.completions.parse(
        model="ephebe",
        messages=[{"role": "user", "content": "Go."}],
        tools=[pydantic_function_tool(Step)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        extra_body=NO_THOUGHT,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Step)


def test_format_or_calls_where_both_are_offered(chat):
    for bias in (100, -100):
        answer = chat(
            "Hi.",
            tools=[tool("weather", strict=True)],
            response_format=FORMAT,
            n=3,
            max_tokens=200,
            logit_bias={CALL: bias},
            extra_body=NO_THOUGHT,
        )
        for number, choice in enumerate(answer.choices):
            assert bool(calls_of(answer, number)) == (bias > 0)
            if bias < 0:
                jsonschema.validate(json.loads(choice.message.content), WEATHER)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}, "[a-f]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no", "<|im_end|>"], "regex": None}}, r"yes|no|<\|im_end\|>"),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}, "a[0-9]b"),
        ({"structured_outputs": {"json": {"type": "integer", "minimum": 10, "maximum": 12}}}, "1[012]"),
        ({"structured_outputs": {"json": '{"const": [1]}', "json_object": False}}, r"\[\s*1\s*\]"),
        ({"guided_regex": "(ab){4}"}, "(ab){4}"),
        ({"guided_choice": ["one", "one hundred"]}, "one( hundred)?"),
        ({"guided_grammar": 'start: "x" /[yz]/{3}'}, "x[yz]{3}"),
        ({"guided_json": {"enum": [True, None]}}, "true|null"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}}}, "7"),
    ],
)
def test_vllms_fields_bind_text_and_chat(client, chat, fields, pattern):
    text = client.completions.create(model="ephebe", prompt="Once", max_tokens=50, temperature=1.2, extra_body=fields)
    assert re.fullmatch(pattern, text.choices[0].text)
    assert text.choices[0].finish_reason == "stop"
    answer = chat("Hi.", extra_body=fields | NO_THOUGHT)
    assert re.fullmatch(pattern, answer.choices[0].message.content)


def test_nothing_after_the_format_without_a_stop_token(client):
    fields = {"guided_regex": "[0-9]{5}", "ignore_eos": True, "min_tokens": 20}
    answer = client.completions.create(model="ephebe", prompt="Once", max_tokens=50, extra_body=fields).choices[0]
    assert re.fullmatch("[0-9]{5}", answer.text)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": "requird", "tools": [tool("a")]}, "tool_choice", "send auto, none, required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "b"}}, "tools": [tool("a"), tool("c")]},
            "tool_choice",
            "the tools are: a, c",
        ),
        ({"tool_choice": {"type": "function"}, "tools": [tool("a")]}, "tool_choice", "is not a tool choice"),
        (
            {"tool_choice": "required", "tools": [tool("a")], "response_format": {"type": "json_object"}},
            "tool_choice",
            "cannot be combined with a response_format",
        ),
        ({"tools": [tool("a", strict="yes")]}, "tools[0]", "true or false"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "a schema is missing"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}},
            "guided_regex",
            "send one of them",
        ),
        ({"extra_body": {"structured_outputs": {"json": "{"}}}, "structured_outputs.json", "not JSON"),
        ({"extra_body": {"structured_outputs": {"choice": []}}}, "structured_outputs.choice", "at least one"),
        ({"extra_body": {"structured_outputs": {"structural_tag": "x"}}}, "structured_outputs.structural_tag", "json"),
        ({"extra_body": {"guided_regex": "[a-"}}, "guided_regex", "regular expression cannot be followed"),
        ({"extra_body": {"structured_outputs": {"regex": ""}}}, "structured_outputs.regex", "not empty"),
        ({"extra_body": {"guided_json": {"enum": ["x" * 300_000]}}}, "guided_json", "send a smaller one"),
        ({"extra_body": {"guided_json": "[" * 10_000_000}}, "guided_json", "send a smaller one"),
        ({"extra_body": {"guided_choice": ["x"] * 300_000}}, "guided_choice", "send a smaller one"),
        ({"tools": [tool("a", ODD, strict=True)]}, "tools", "Unknown format: odd"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"format": "odd", "type": "string"}, "strict": True},
                }
            },
            "response_format",
            "Unknown format: odd",
        ),
    ],
)
def test_nonsense_is_refused(chat, options, param, message):
    error = refused(chat, **options)
    assert error.param == param
    assert message in str(error)


def test_what_is_not_strict_is_followed_as_far_as_possible(chat):
    odd = {
        "type": "object",
        "properties": {"id": {"type": "string", "format": "odd", "maxLength": 4}},
        "required": ["id"],
    }
    answer = chat(
        "Hi.",
        tools=[tool("a", odd)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
        temperature=0.0,
        extra_body=NO_THOUGHT,
    )
    assert calls_of(answer)[0][0] == "a"
    expected = {"type": "json_schema", "json_schema": {"name": "n", "schema": odd["properties"]["id"]}}
    answer = chat("Hi.", response_format=expected, max_tokens=100, extra_body=NO_THOUGHT)
    assert isinstance(json.loads(answer.choices[0].message.content), str)


def test_stream_of_what_cannot_be_followed_is_refused_before_it_begins(ephebe, client):
    options: dict[str, Any] = {"model": "ephebe", "stream": True, "extra_body": {"guided_regex": "[a-"}}
    odd = {"type": "json_schema", "name": "n", "schema": ODD, "strict": True}
    hi = [{"role": "user", "content": "Hi."}]
    for param, begin in (
        ("guided_regex", lambda: client.chat.completions.create(messages=hi, **options)),
        ("guided_regex", lambda: client.completions.create(prompt="Hi.", **options)),
        (
            "text.format",
            lambda: client.responses.create(model="ephebe", input="Hi.", stream=True, text={"format": odd}),
        ),
    ):
        with pytest.raises(openai.BadRequestError, match="cannot be followed") as error:
            begin()
        assert error.value.param == param
    call = {"model": "ephebe", "max_tokens": 9, "messages": hi, "stream": True, "guided_regex": "[a-"}
    answer = ephebe.http().post("/v1/messages", json=call)
    assert answer.status_code == 400
    assert "guided_regex: the regular expression cannot be followed" in answer.json()["error"]["message"]


def test_grammar_that_takes_too_much_work_is_given_up(client):
    """On the way: by then a stream has begun."""
    fields = {"guided_grammar": "start: s\ns: s s s | s s | /[a-z ]/", "ignore_eos": True}
    options: dict[str, Any] = {"model": "ephebe", "prompt": "Once", "max_tokens": 512, "extra_body": fields}
    with pytest.raises(openai.BadRequestError, match="make it less ambiguous") as error:
        client.completions.create(**options)
    assert error.value.param == "guided_grammar"
    stream = client.completions.create(**options, stream=True)
    with pytest.raises(openai.APIError, match="make it less ambiguous"):
        list(stream)


def test_one_of_very_many(chat):
    choices = [f"the {i}th of them" for i in range(5000)]
    answer = chat("Hi.", extra_body={"guided_choice": choices} | NO_THOUGHT, max_tokens=60, temperature=1.0)
    assert answer.choices[0].message.content in choices
