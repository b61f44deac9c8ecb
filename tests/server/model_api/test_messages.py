"""Messages by Anthropic's SDK over a socket, answered by the bundled model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from tests.server.model_api.conftest import MODEL, Ephebe
from tests.server.model_api.stockroom import STOCK, SYSTEM, TOOLS, answered

if TYPE_CHECKING:
    import anthropic

ASKED: Any = {"role": "user", "content": "How many cups and hats are there together?"}
STOCKROOM: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 64,
    "system": SYSTEM["content"],
    "tools": [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS],
}
GREEDY = {"temperature": 0, "return_token_ids": True}
CLOSED: Any = {"thinking": {"type": "disabled"}}
"""Then it thinks only where it is made to."""
THOUGHTFUL = {"structured_outputs": {"regex": r"<think>\n[a-z]{4}\n</think>\n\n[a-z]{5}"}, "return_token_ids": True}


@pytest.fixture(scope="session")
def claude(ephebe: Ephebe) -> Iterator[anthropic.Anthropic]:
    with client_of(ephebe) as client:
        yield client


def client_of(ephebe: Ephebe, path: str = "", **options: Any) -> anthropic.Anthropic:
    import anthropic

    given = {"api_key": "tml-test", "max_retries": 0, "timeout": 60} | options
    return anthropic.Anthropic(base_url=ephebe.url + path, **given)


def say(claude: anthropic.Anthropic, said: str | list[Any], **options: Any) -> Any:
    """An answer, or what the SDK makes of its stream."""
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    given = {"model": MODEL, "max_tokens": 8, "messages": messages} | options
    if not given.pop("stream", False):
        return claude.messages.create(**given)
    with claude.messages.stream(**given) as stream:
        return stream.get_final_message()


def matches(ephebe: Ephebe, trace_id: str) -> list[str]:
    turns = ephebe.http().get(f"/v1/traces/{trace_id}").json()["turns"]
    assert {turn["route"] for turn in turns} == {"messages"}
    return [turn["match"] for turn in turns]


def results(message: Any) -> dict[str, Any]:
    """What the tools say, as the next message."""
    calls = [block for block in message.content if block.type == "tool_use"]
    said = [(call.id, answered(call.name, json.dumps(call.input))) for call in calls]
    blocks = [{"type": "tool_result", "tool_use_id": name, "content": text} for name, text in said]
    return {"role": "user", "content": blocks}


def told(message: Any) -> dict[str, Any]:
    """Without what differs from call to call."""
    said = message.to_dict()
    for block in said["content"]:
        block.pop("id", None)
    usage = said["usage"]
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    ours = ("id", "trace_id", "token_ids", "logprobs")
    return {name: value for name, value in said.items() if name not in ours}


def test_a_plain_call_is_answered_and_its_tokens_are_counted(claude: anthropic.Anthropic, ephebe: Ephebe) -> None:
    extra = {"return_token_ids": True, "seed": 3, "newer_field": 1}
    answer = say(claude, "Hello", metadata={"user_id": "me"}, extra_body=extra)
    usage = answer.usage
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", MODEL)
    assert answer.id.startswith("msg_")
    assert answer._request_id.startswith("req_")
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert usage.input_tokens + usage.cache_read_input_tokens == len(answer.prompt_token_ids)
    assert usage.output_tokens == len(answer.token_ids) == len(answer.logprobs) <= 8
    (turn,) = ephebe.http().get(f"/v1/traces/{answer.trace_id}").json()["turns"]
    assert (turn["response_id"], turn["route"], turn["user"]) == (answer.id, "messages", "me")


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_echoes_what_it_got_and_goes_on_from_the_same_ids(
    claude: anthropic.Anthropic, ephebe: Ephebe, stream: bool
) -> None:
    messages: list[Any] = [ASKED]
    answer = say(claude, messages, **STOCKROOM, stream=stream, extra_body=GREEDY)
    while answer.stop_reason == "tool_use" and len(messages) < 9:
        messages += [{"role": "assistant", "content": answer.content}, results(answer)]
        answer = say(claude, messages, **STOCKROOM, stream=stream, extra_body=GREEDY)
    assert answer.stop_reason == "end_turn"
    assert str(sum(STOCK.values())) in answer.content[-1].text
    assert answer.usage.cache_read_input_tokens > 0
    trace = ephebe.http().get("/v1/traces?limit=1").json()["data"][0]["id"]
    found = matches(ephebe, trace)
    assert found == ["new", *["continued"] * (len(found) - 1)]
    assert len(found) > 1
    (trajectory,) = ephebe.http().get(f"/v1/traces/{trace}/trajectories").json()["data"]
    assert trajectory["tokens"][: len(answer.prompt_token_ids)] == answer.prompt_token_ids


@pytest.mark.parametrize("keeps", [True, False])
def test_thinking_may_come_back_or_not(claude: anthropic.Anthropic, ephebe: Ephebe, keeps: bool) -> None:
    first = say(claude, "Hello", max_tokens=30, **CLOSED, extra_body=THOUGHTFUL)
    thought, said = first.content
    assert (thought.type, len(thought.thinking), said.type, len(said.text)) == ("thinking", 4, "text", 5)
    assert thought.signature
    assert 0 < first.usage.output_tokens_details.thinking_tokens < first.usage.output_tokens
    content = first.content if keeps else [said]
    history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": content}]
    more = [*history, {"role": "user", "content": "Hi again"}]
    second = say(claude, more, **CLOSED, extra_body={"return_token_ids": True})
    before = first.prompt_token_ids + first.token_ids
    assert second.prompt_token_ids[: len(before)] == before
    assert matches(ephebe, second.trace_id)[-1] == "continued"


def test_thinking_can_be_left_out_of_the_answer(claude: anthropic.Anthropic) -> None:
    omitted = {"type": "adaptive", "display": "omitted"}
    for stream in (False, True):
        answer = say(claude, "Hello", max_tokens=30, thinking=omitted, stream=stream, extra_body=THOUGHTFUL)
        assert (answer.content[0].thinking, bool(answer.content[0].signature)) == ("", True)


def test_thinking_is_the_templates_switch(claude: anthropic.Anthropic) -> None:
    def counted(**thinking: Any) -> int:
        said: Any = {"thinking": thinking} if thinking else {}
        request: Any = [{"role": "user", "content": "Hello"}]
        return claude.messages.count_tokens(model=MODEL, messages=request, **said).input_tokens

    assert counted(type="disabled") > counted() == counted(type="adaptive")
    assert counted(type="enabled", budget_tokens=1024) == counted()


def test_a_stream_put_together_is_the_plain_answer(claude: anthropic.Anthropic) -> None:
    drawn = {"seed": 11, "temperature": 1.0}
    plain, streamed = (say(claude, [ASKED], **STOCKROOM, stream=s, extra_body=drawn) for s in (False, True))
    assert told(streamed) == told(plain)
    called = {"temperature": 0}
    plain, streamed = (say(claude, [ASKED], **STOCKROOM, stream=s, extra_body=called) for s in (False, True))
    assert plain.stop_reason == "tool_use"
    assert told(streamed) == told(plain)
    plain, streamed = (
        say(claude, "Hello", max_tokens=30, stream=s, **CLOSED, extra_body=THOUGHTFUL | {"temperature": 0})
        for s in (False, True)
    )
    assert [block.type for block in plain.content] == ["thinking", "text"]
    assert told(streamed) == told(plain)


def test_events_come_in_anthropics_order(claude: anthropic.Anthropic) -> None:
    request: Any = {**STOCKROOM, "messages": [ASKED], "stream": True, "extra_body": GREEDY}
    with claude.messages.create(**request) as stream:
        events: list[Any] = list(stream)
    kinds = [event.type for event in events]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert json.loads(events[2].delta.partial_json) == {"item": "cups"}
    assert events[0].message.prompt_token_ids
    assert events[-2].usage.output_tokens == len(events[-2].token_ids)
    assert events[-2].trace_id


def test_a_client_that_leaves_its_stream_stops_the_sampling(claude: anthropic.Anthropic, ephebe: Ephebe) -> None:
    request: Any = {"model": MODEL, "max_tokens": 1900, "messages": [{"role": "user", "content": "Hello"}]}
    with claude.messages.create(**request, stream=True, extra_body={"ignore_eos": True}) as stream:
        begun: Any = next(iter(stream))
    ephebe.until(lambda: 'palestra_queue_depth{base_model="ephebe",kind="sample"} 0.0' in ephebe.metrics())
    newest = ephebe.http().get("/v1/traces?limit=1&format=jsonl").text
    assert begun.message.id not in newest


def test_async_clients_stream_too(ephebe: Ephebe) -> None:
    import anthropic

    async def talk() -> tuple[str, Any, Any]:
        options: dict[str, Any] = {"base_url": ephebe.url, "api_key": "tml-test", "max_retries": 0}
        async with anthropic.AsyncAnthropic(**options) as client:
            request: Any = {"model": MODEL, "max_tokens": 12, "messages": [{"role": "user", "content": "Hello"}]}
            async with client.messages.stream(**request, extra_body={"temperature": 0}) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                return (
                    text,
                    await stream.get_final_message(),
                    await client.messages.create(**request, extra_body={"temperature": 0}),
                )

    text, streamed, plain = asyncio.run(talk())
    assert text == plain.content[0].text
    assert told(streamed) == told(plain)


def test_the_sdks_own_tool_runner_works(claude: anthropic.Anthropic) -> None:
    import anthropic

    @anthropic.beta_tool
    def count(item: str) -> str:
        return str(STOCK.get(item, 0))

    runner = claude.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=64,
        system=SYSTEM["content"],
        tools=[count],
        messages=[{"role": "user", "content": "How many cups are there?"}],
        max_iterations=4,
        extra_body={"temperature": 0},
    )
    said = list(runner)
    assert said[0].stop_reason == "tool_use"
    assert len(said) > 1


def test_what_ends_an_answer_is_told(claude: anthropic.Anthropic) -> None:
    for stream in (False, True):
        cut = say(claude, "Hello", max_tokens=1, stream=stream, extra_body={"ignore_eos": True})
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 1)
        regex = {"structured_outputs": {"regex": "abcdef"}}
        stopped = say(claude, "Hello", max_tokens=20, stop_sequences=["cd"], stream=stream, **CLOSED, extra_body=regex)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "cd")
        assert stopped.content[0].text == "ab"


def test_an_assistants_last_message_is_continued(claude: anthropic.Anthropic, ephebe: Ephebe) -> None:
    prefill = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The answer is ("}]
    first = say(claude, prefill, extra_body=GREEDY | {"ignore_eos": True})
    assert not first.content[0].text.startswith("The answer")
    prompt = ephebe.http().post("/detokenize", json={"tokens": first.prompt_token_ids}).json()["prompt"]
    assert prompt.endswith("assistant\nThe answer is (")
    more = [*prefill, {"role": "assistant", "content": first.content}, {"role": "user", "content": "Sure?"}]
    second = say(claude, more, extra_body={"return_token_ids": True})
    before = first.prompt_token_ids + first.token_ids
    assert second.prompt_token_ids[: len(before)] == before
    assert matches(ephebe, second.trace_id)[-1] == "continued"


def test_tools_can_be_forced(claude: anthropic.Anthropic) -> None:
    named = say(claude, "Hello", **STOCKROOM, tool_choice={"type": "tool", "name": "add"}, extra_body=GREEDY)
    assert [block.name for block in named.content if block.type == "tool_use"][:1] == ["add"]
    one: Any = {"type": "any", "disable_parallel_tool_use": True}
    some = say(claude, "Hello", **STOCKROOM, tool_choice=one, extra_body=GREEDY)
    assert [block.type for block in some.content] == ["tool_use"]
    none = say(claude, [ASKED], **STOCKROOM, tool_choice={"type": "none"}, extra_body=GREEDY)
    assert {block.type for block in none.content} == {"text"}


def test_answers_can_be_given_a_shape(claude: anthropic.Anthropic) -> None:
    class Sum(BaseModel):
        total: int

    request: Any = [{"role": "user", "content": "What is 2 + 3?"}]
    no_loops = {"temperature": 0, "frequency_penalty": 2}  # of spaces, which JSON allows
    parsed = claude.messages.parse(
        model=MODEL, max_tokens=200, messages=request, output_format=Sum, **CLOSED, extra_body=no_loops
    )
    assert isinstance(parsed.parsed_output, Sum)


def test_a_prompt_is_counted_as_it_would_be_read(claude: anthropic.Anthropic) -> None:
    shared = {name: STOCKROOM[name] for name in ("model", "system", "tools")}
    first = say(claude, [ASKED], **STOCKROOM, extra_body=GREEDY)
    assert claude.messages.count_tokens(**shared, messages=[ASKED]).input_tokens == len(first.prompt_token_ids)
    messages: Any = [ASKED, {"role": "assistant", "content": first.content}, results(first)]
    second = say(claude, messages, **STOCKROOM, extra_body=GREEDY)
    assert claude.messages.count_tokens(**shared, messages=messages).input_tokens == len(second.prompt_token_ids)


@pytest.mark.parametrize("path", ["", "/oai/api", "/anthropic"])
def test_each_base_url_serves_them(ephebe: Ephebe, path: str) -> None:
    with client_of(ephebe, path, api_key=None, auth_token="tml-test") as client:
        assert say(client, "Hello", max_tokens=1).usage.output_tokens == 1


REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"max_tokens": 0}, "max_tokens: ", None),
    ({"messages": []}, "messages: ", None),
    ({"messages": [{"role": "user", "content": "Hi " * 3000}]}, "prompt is too long: ", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: ", None),
    ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers: ", "unsupported"),
    ({"extra_body": {"temperature": -1}}, "temperature: ", None),
    ({"extra_body": {"stop": ["x"]}}, "stop is a field of chat completions", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "said", "code"), REFUSED)
def test_refusals_have_anthropics_envelope(
    claude: anthropic.Anthropic, options: dict[str, Any], said: str, code: str | None, stream: bool
) -> None:
    import anthropic

    messages = options.get("messages", "Hi")
    others = {name: value for name, value in options.items() if name != "messages"}
    with pytest.raises(anthropic.BadRequestError) as refused:
        say(claude, messages, stream=stream, **others)
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"], refused.value.error_code) == ("error", "invalid_request_error", code)
    assert said in body["error"]["message"]
    assert refused.value.request_id == body["request_id"]


def test_an_unknown_model_is_not_found(claude: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="'gpt-9' does not exist") as refused:
        say(claude, "Hi", model="gpt-9")
    assert (refused.value.type, refused.value.error_code) == ("not_found_error", "model_not_found")


def test_what_has_no_route_is_refused_the_same_way(ephebe: Ephebe) -> None:
    http = ephebe.http()
    for method, path, status in [("GET", "/v1/messages", 405), ("POST", "/v1/messages/batches", 404)]:
        answer = http.request(method, path)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
    long = http.post("/anthropic/v1/messages", content=b"x" * (17 << 20))
    assert (long.status_code, long.json()["error"]["type"]) == (413, "request_too_large")
    foreign = http.post("/v1/messages", headers={"origin": "http://example.org"}, json={})
    assert (foreign.status_code, foreign.json()["error"]["type"]) == (403, "permission_error")
    broken = http.post("/v1/messages", content=b"{")
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
