"""Responses by OpenAI's SDK over a socket, answered by the bundled model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, Field

from tests.server.model_api.conftest import MODEL, Ephebe, revived
from tests.server.model_api.stockroom import SYSTEM, TOOLS, answered

Ask = Callable[..., Any]
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
QUESTION = "How many cups and hats are there together?"
STOCKROOM: dict[str, Any] = {"instructions": SYSTEM["content"], "tools": FLAT, "temperature": 0}
IDS = {"return_token_ids": True}
LOGPROBS: Any = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def ask(client: openai.OpenAI) -> Ask:
    def create(given: Any = "Hello", **options: Any) -> Any:
        return client.responses.create(**{"model": MODEL, "input": given, "max_output_tokens": 64} | options)

    return create


def trace_of(ephebe: Ephebe, response: Any) -> dict[str, Any]:
    return ephebe.http().get(f"/v1/traces/{response.trace_id}").json()


def results(response: Response) -> list[dict[str, Any]]:
    calls = [item for item in response.output if item.type == "function_call"]
    return [
        {"type": "function_call_output", "call_id": call.call_id, "output": answered(call.name, call.arguments)}
        for call in calls
    ]


def without_ids(output: list[Any]) -> list[dict[str, Any]]:
    return [item.model_dump(exclude={"id", "call_id"}) for item in output]


def test_a_plain_response(ephebe: Ephebe, ask: Ask) -> None:
    response = ask(max_output_tokens=16, user="me", metadata={"k": "v"}, store=False, extra_body=IDS)
    (item,) = response.output
    assert (response.object, response.model, response.status) == ("response", MODEL, "completed")
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert response.output_text == item.content[0].text
    assert response.usage.input_tokens == len(item.prompt_token_ids)
    assert response.usage.output_tokens == len(item.generation_token_ids) == len(item.generation_log_probs)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert (response.metadata, response.max_output_tokens, response.error) == ({"k": "v"}, 16, None)
    (turn,) = trace_of(ephebe, response)["turns"]
    assert (turn["route"], turn["response_id"], turn["user"]) == ("responses", response.id, "me")
    assert turn["samples"][0]["logprobs"] == item.generation_log_probs
    assert ask(extra_body={"somebody_elses_field": 1}).output[0].model_extra.keys().isdisjoint(IDS)


# What a client sends back of a response: itself, without what it only thought, or as little as it needs.
ECHOES: dict[str, Callable[[Response], list[Any]]] = {
    "objects": lambda response: list(response.output),
    "dicts": lambda response: [item.model_dump(exclude_none=True) for item in response.output],
    "texts and calls": lambda response: [
        {"type": item.type, "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        if item.type == "function_call"
        else {"role": "assistant", "content": response.output_text}
        for item in response.output
        if item.type in ("function_call", "message")
    ],
}


@pytest.mark.parametrize(
    ("echo", "more"),
    [
        ("objects", {}),
        pytest.param("dicts", {}, marks=pytest.mark.slow),
        pytest.param("texts and calls", {}, marks=pytest.mark.slow),
        ("dicts", IDS),
    ],
)
def test_an_agent_goes_on_from_the_ids_before(ephebe: Ephebe, ask: Ask, echo: str, more: dict[str, Any]) -> None:
    given: list[Any] = [{"role": "user", "content": QUESTION}]
    turns = 0
    while True:
        response = ask(given, **STOCKROOM, extra_body=more)
        turns += 1
        given += ECHOES[echo](response)
        new = results(response) if turns < 5 else []
        if not new:
            break
        given += new
    assert turns > 1
    given.append({"role": "user", "content": "Thank you."})
    last = ask(given, **STOCKROOM)
    assert last.usage.input_tokens_details.cached_tokens > 0
    trace = trace_of(ephebe, last)
    assert [turn["match"] for turn in trace["turns"]] == ["new", *["continued"] * turns]
    found = ephebe.http().get(f"/v1/traces/{last.trace_id}/trajectories").json()["data"]
    assert len(found) == 1


def test_a_reply_to_nothing_new_goes_on_too(ephebe: Ephebe, ask: Ask) -> None:
    """As agents do whose model only thought."""
    given: list[Any] = [{"role": "user", "content": "Go on and on"}]
    for _ in range(2):
        given += ask(given, max_output_tokens=4, extra_body=IDS).output
    last = ask(given, max_output_tokens=4)
    assert [turn["match"] for turn in trace_of(ephebe, last)["turns"]] == ["new", "continued", "continued"]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1, "extra_body": {"seed": 3}},
        {"temperature": 0, "include": LOGPROBS, "top_logprobs": 2},
        {"temperature": 0, "max_output_tokens": 2, "extra_body": IDS},
        {"input": QUESTION, **STOCKROOM, "extra_body": IDS},
    ],
    ids=["text", "logprobs", "cut", "call"],
)
def test_a_stream_tells_what_the_plain_response_does(ask: Ask, options: dict[str, Any]) -> None:
    plain = ask(**{"given": "Hello"} | _renamed(options))
    events = list(ask(**{"given": "Hello"} | _renamed(options), stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{plain.status}"
    final = events[-1].response
    assert without_ids(final.output) == without_ids(plain.output)
    assert {event.response.id for event in events if hasattr(event, "response")} == {final.id}
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == plain.output_text
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert arguments == "".join(item.arguments for item in plain.output if item.type == "function_call")
    assert final.usage.output_tokens == plain.usage.output_tokens


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    return {"given" if name == "input" else name: value for name, value in options.items()}


def test_the_sdks_own_stream_reads_it(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, **STOCKROOM) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert [item.type for item in final.output] == ["function_call"]
    with client.responses.stream(model=MODEL, input="Hello", temperature=0) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert snapshots[-1] == stream.get_final_response().output_text
    assert len(snapshots) > 1


def test_an_async_client(ephebe: Ephebe) -> None:
    async def talk() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{ephebe.url}/oai/api/v1", api_key="tml-test") as client:
            plain = await client.responses.create(model=MODEL, input="Hello", temperature=0)
            stream = await client.responses.create(model=MODEL, input="Hello", temperature=0, stream=True)
            parts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        return plain.output_text, "".join(parts)

    plain, streamed = asyncio.run(talk())
    assert plain == streamed != ""


def test_a_client_that_leaves_a_stream_takes_its_sample_along(ephebe: Ephebe, ask: Ask) -> None:
    def waiting() -> bool:
        return f'palestra_queue_depth{{base_model="{MODEL}",kind="sample"}} 1' in ephebe.metrics()

    kept = ephebe.http().get("/v1/traces?limit=1").json()["total"]
    stream = ask(max_output_tokens=2000, stream=True, extra_body={"ignore_eos": True})
    assert next(iter(stream)).type == "response.created"
    ephebe.until(waiting)
    stream.close()
    ephebe.until(lambda: not waiting())
    assert ephebe.http().get("/v1/traces?limit=1").json()["total"] == kept  # it did not come to its end


def test_what_is_cut_short_says_so_and_goes_on(ephebe: Ephebe, ask: Ask) -> None:
    first = ask(max_output_tokens=2, temperature=0)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert first.output[0].status == "incomplete"
    hello = {"role": "user", "content": "Hello"}
    second = ask([hello, *first.output, hello])
    assert [turn["match"] for turn in trace_of(ephebe, second)["turns"]] == ["new", "continued"]


def test_logprobs_are_told_if_they_are_to_be_included(ask: Ask) -> None:
    response = ask(temperature=0, include=LOGPROBS, top_logprobs=3, extra_body=IDS)
    logprobs = response.output[0].content[0].logprobs
    assert [one.logprob for one in logprobs] == pytest.approx(response.output[0].generation_log_probs, abs=1e-5)
    assert all(len(one.top_logprobs) == 3 for one in logprobs)
    assert ask(temperature=0).output[0].content[0].logprobs == []


def test_instructions_are_a_system_message(ephebe: Ephebe, ask: Ask) -> None:
    given = [{"role": "developer", "content": "b"}, {"role": "user", "content": [{"type": "input_text", "text": "c"}]}]
    response = ask(given, instructions="a", max_output_tokens=1, extra_body=IDS)
    messages = [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "c"}]
    answer = ephebe.http().post("/tokenize", json={"model": MODEL, "messages": messages}).json()
    assert response.output[0].prompt_token_ids == answer["tokens"]


def test_input_tokens_are_counted(client: openai.OpenAI, ask: Ask) -> None:
    response = client.responses.input_tokens.count(model=MODEL, input="Hello", instructions="Be brief.")
    assert response.input_tokens == ask("Hello", instructions="Be brief.", max_output_tokens=1).usage.input_tokens


# What an answer has to look like


class Stock(BaseModel):
    """With bounds: the bundled model does not know where to stop."""

    item: Literal["cups", "hats"]
    count: int = Field(ge=0, le=99)


THOUGHT = r"<think>\n[a-z]{2,8}\n</think>\n\n[a-z]{2,8}"


def test_an_answer_is_parsed_as_the_model_it_was_asked_for(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "input": "How many cups are there?", "text_format": Stock}
    plain = client.responses.parse(**request, temperature=0)
    assert isinstance(plain.output_parsed, Stock)
    assert plain.text is not None
    with client.responses.stream(**request, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == plain.output_parsed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "subtract"}])
def test_a_call_that_must_be_made_is_made(ask: Ask, choice: Any) -> None:
    response = ask("Hello", **STOCKROOM | {"tool_choice": choice, "parallel_tool_calls": False})
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert call.id == call.call_id
    assert call.name in ([choice["name"]] if isinstance(choice, dict) else [tool["name"] for tool in FLAT])


@pytest.mark.parametrize("keeps", [True, False], ids=["sent back", "left out"])
def test_reasoning_is_an_item_and_may_come_back(ephebe: Ephebe, ask: Ask, keeps: bool) -> None:
    options = {"temperature": 0, "extra_body": {"structured_outputs": {"regex": THOUGHT}}}
    plain = ask("Think", **options)
    events = list(ask("Think", **options, stream=True))
    assert without_ids(events[-1].response.output) == without_ids(plain.output)
    reasoning, message = plain.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_summary_text.delta")
    assert [part.text for part in reasoning.summary] == [thought]
    assert plain.usage.output_tokens_details.reasoning_tokens > 0
    echoed = plain.output if keeps else [message]
    last = ask([{"role": "user", "content": "Think"}, *echoed, {"role": "user", "content": "More"}])
    assert trace_of(ephebe, last)["turns"][-1]["match"] == "continued"


# Refusals


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "text only"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "text parts"),
        ({"input": []}, "input", "empty"),
        ({"input": "word " * 3000}, "input", "maximum context length"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0]", "name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"temperature": -1}, "temperature", "greater"),
        ({"min_p": 2}, "min_p", "less"),
        ({"stream": True, "background": True}, "background", "stream"),
        ({"stream": True, "input": [{"role": "user", "content": 5}]}, "input[0].content", "text parts"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_bad_call_is_refused_in_its_own_words(ephebe: Ephebe, given: dict[str, Any], param: str, words: str) -> None:
    answer = ephebe.http().post("/v1/responses", json={"model": MODEL, "input": "Hi"} | given)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not error["message"].startswith("messages")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_found_by_its_id_until_it_is_deleted(client: openai.OpenAI, ask: Ask, stream: bool) -> None:
    options = {"max_output_tokens": 9, **STOCKROOM}
    made = list(ask("Hello", stream=True, **options))[-1].response if stream else ask("Hello", **options)
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            call(made.id)
    unkept = ask("Hello", max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError, match="store: false"):
        client.responses.retrieve(unkept.id)


def test_a_response_continues_the_one_before_it_also_after_a_restart(mortal: Ephebe) -> None:
    shared: Any = {"model": MODEL, "max_output_tokens": 40, **STOCKROOM}
    with mortal.openai() as client:
        first = client.responses.create(input="How many cups are there?", **shared)
    outputs: Any = results(first)
    assert outputs
    mortal.kill()
    with revived(mortal).openai() as client:
        more = client.responses.create(input=outputs, previous_response_id=first.id, **shared)
        turns = trace_of(mortal, more)["turns"]
        assert [turn["match"] for turn in turns] == ["new", "continued"]
        whole = turns[0]["prompt"] + turns[0]["samples"][0]["tokens"]
        assert turns[1]["prompt"][: len(whole)] == whole
        # Instructions hold for one request.
        bare = client.responses.create(
            input=outputs, previous_response_id=first.id, **shared | {"instructions": None, "max_output_tokens": 1}
        )
        roles = [one["role"] for one in trace_of(mortal, bare)["turns"][0]["messages"]]
        assert roles == ["user", "assistant", *["tool"] * len(outputs)]


def test_what_is_ignored_is_told_in_a_header_and_in_the_trace(ephebe: Ephebe) -> None:
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 1, "tools": [{"type": "mcp"}], "a\nb": 1, "n": 1}
    body |= {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}, "prompt_cache_key": "x"}
    headers = {"user-agent": "codex_exec/0.166.0 (Debian 12; sk-1234567890123456789012345) tml-key"}
    answer = ephebe.http().post("/v1/responses", json=body, headers=headers)
    told = ["text.verbosity", "a\nb", "tools.mcp", "reasoning.effort"]
    assert answer.headers["x-palestra-ignored"] == ", ".join(told).replace("\n", "?")
    (turn,) = ephebe.http().get(f"/v1/traces/{answer.json()['trace_id']}").json()["turns"]
    assert (turn["ignored"], turn["client"]) == (told, "codex_exec/0.166.0 [redacted]")


def test_a_client_that_wants_a_websocket_is_sent_to_http(ephebe: Ephebe) -> None:
    wishes = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "eA==",
    }
    assert ephebe.http().get("/v1/responses", headers=wishes).status_code == 426


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="no-such", input="Hi")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
