"""Long conversations through OpenAI's and Anthropic's SDKs, with the chat templates of seven families: every token that
was sampled is read again as it was, whatever the client does to the history."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from palestra.chat import ChatTokenizer
from palestra.testing.random_tokenizer import write_tokenizer
from tests.chat.conftest import dress
from tests.server.model_api.conftest import Ephebe

FAMILIES = ("thinking", "headers", "brackets", "turns", "bars", "qwen35", "harmony")
EVERYDAY = ("thinking", "qwen35", "harmony")
STYLES = [style if style in EVERYDAY else pytest.param(style, marks=pytest.mark.slow) for style in FAMILIES]
THINKS_ANYWAY = ("bars", "qwen35", "harmony")
WORDS = ["Hello", " né", " 🙂", "漢字", "<|im_end|>", "</s>", "<think>", " {", "1.0", "\n", "  "]
VOCABULARY, ROOM, POSITIONS = 528, 16, 16384
PAGE = 16  # tokens in a page of the engine's cache
PARAMETERS = {
    "type": "object",
    "properties": {
        "word": {"type": "string", "enum": ["né 🙂", '"quoted"\n', ""]},
        "number": {"type": "number", "enum": [1.0, 2.5, 3]},
        "deep": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["word", "number", "deep"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "put", "parameters": {"type": "object", "properties": {}}}},
]


HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


class Families(Ephebe):
    name = FAMILIES[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from palestra.testing.random_model import make_random_model

    made: dict[str, Path] = {}
    for seed, style in enumerate(FAMILIES):
        folder = make_random_model(
            tmp_path_factory.mktemp(style),
            seed=seed,
            vocab_size=VOCABULARY + ROOM,
            overrides={"max_position_embeddings": POSITIONS},
        )
        write_tokenizer(folder, VOCABULARY, POSITIONS)
        (folder / "generation_config.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
        dress(folder, style)
        made[style] = folder
    return made


@pytest.fixture(scope="module")
def families(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Families]:
    has_slow = any(item.get_closest_marker("slow") for item in request.session.items)
    served = FAMILIES if has_slow else EVERYDAY  # each has an engine of its own
    more = [part for style in served[1:] for part in ("--model", str(folders[style]), "--name", style)]
    server = Families(tmp_path_factory.mktemp("families"), folders[FAMILIES[0]], flags=tuple(more))
    with server:
        server.start()
        yield server


def thinking_bias(style: str, tokenizer: ChatTokenizer) -> dict[str, float]:
    """So that thinking begins, where no template opens it, and ends."""
    texts = ("<|channel|>", "<|end|>") if style == "harmony" else ("</think>",)
    return {str(tokenizer.special_texts[text]): 6.0 for text in texts}


class Agent:
    """One that is careless with histories. The model is random, so it is made to think, to call and to end."""

    def __init__(self, style: str, client: openai.OpenAI, tokenizer: ChatTokenizer, seed: int, *, streams: bool):
        self.style, self.client, self.tokenizer, self.rng = style, client, tokenizer, random.Random(seed)
        self.streams = streams
        self.history: list[Any] = [{"role": "system", "content": "Be."}, {"role": "user", "content": self.text()}]
        self.calls: list[Any] = []
        """Of the model: each with its prompt and what was sampled."""
        self.kinds: set[str] = set()

    def text(self) -> str:
        return "".join(self.rng.choice(WORDS) for _ in range(self.rng.randint(1, 5)))

    def ask(self, messages: list[Any], **options: Any) -> Any:
        extra = {"return_token_ids": True, **options.pop("extra_body", {})}
        given: dict[str, Any] = {"model": self.style, "messages": messages, "tools": TOOLS, "extra_body": extra}
        given |= {"seed": self.rng.randrange(2**31), **options}
        create = self.streamed if self.streams else self.client.chat.completions.create
        answer: Any = create(**given)
        self.calls.append(answer)
        if any("\ufffd" in self.tokenizer.decode([token]) for token in answer.choices[0].token_ids):
            self.kinds.add("parts of characters")
        return answer

    def streamed(self, **given: Any) -> Any:
        """The SDK's own sum of the parts, which loses some fields that are not OpenAI's."""
        chunks: list[Any] = []
        with self.client.chat.completions.stream(**given, stream_options={"include_usage": True}) as stream:
            try:
                chunks.extend(event.chunk for event in stream if event.type == "chunk")
                answer: Any = stream.get_final_completion()
            except openai.LengthFinishReasonError as cut:  # it wants whole answers from this call
                answer = cut.completion
        parts = [getattr(choice, "token_ids", None) or [] for chunk in chunks for choice in chunk.choices]
        answer.choices[0].token_ids = [token for part in parts for token in part]
        answer.trace_id = chunks[-1].trace_id
        return answer

    def turn(self) -> None:
        kind = self.rng.choice(["say", "say", "think", "call", "call"])
        end, closing = {str(self.tokenizer.turn_end): 4.0}, thinking_bias(self.style, self.tokenizer)
        some: dict[str, Any] = self.rng.choice([{}, {"parallel_tool_calls": False}])
        if kind == "call":
            answer = self.ask(self.history, tool_choice="required", max_tokens=400, logit_bias=closing, **some)
        elif kind == "think" and self.style not in THINKS_ANYWAY:
            begun = {"role": "assistant", "content": "<think>\n"}
            answer = self.go_on(begun, max_tokens=self.rng.randint(4, 30), logit_bias=closing | end)
            return
        else:
            answer = self.ask(self.history, max_tokens=self.rng.randint(1, 12), logit_bias=closing | end)
        message = answer.choices[0].message.model_dump(exclude_none=True)
        self.kinds |= {"thought"} if message.get("reasoning_content") else set()
        if answer.choices[0].finish_reason == "length" and self.rng.random() < 0.5:
            self.go_on(self.echoed(message), max_tokens=self.rng.randint(1, 12), logit_bias=end)
        else:
            self.goes_on_after(message)

    def go_on(self, begun: dict[str, Any], **options: Any) -> Any:
        """The answer that was begun, joined with what it goes on with."""
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        answer = self.ask([*self.history, begun], extra_body=extra, **options)
        self.kinds.add("continued")
        rest = answer.choices[0].message.model_dump(exclude_none=True)
        said = _content(begun).removeprefix("<think>\n") + _content(rest)  # what it opens is thought
        joined = {"role": "assistant", "content": said}
        thought = "".join(part.get("reasoning_content") or "" for part in (begun, rest))
        self.kinds |= {"thought"} if thought else set()
        calls = [*begun.get("tool_calls", ()), *rest.get("tool_calls", ())]
        self.goes_on_after(
            joined | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
        )
        return answer

    def goes_on_after(self, message: dict[str, Any]) -> None:
        calls = message.get("tool_calls") or []
        self.kinds |= {f"calls {len(calls)}"} if calls else set()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": self.text()} for call in calls]
        self.history += [self.echoed(message), *(results or [{"role": "user", "content": self.text()}])]

    def echoed(self, message: dict[str, Any]) -> dict[str, Any]:
        message = json.loads(json.dumps(message))
        if self.rng.random() < 0.4:
            message.pop("reasoning_content", None)
        content = _content(message)
        message["content"] = self.rng.choice([content, content.strip(), [{"type": "text", "text": content}]])
        for call in message.get("tool_calls") or ():
            pairs = list(json.loads(call["function"]["arguments"]).items())
            self.rng.shuffle(pairs)
            arguments = {key: 1 if value == 1.0 and value is not True else value for key, value in pairs}
            call["function"]["arguments"] = self.rng.choice(
                [json.dumps(arguments), json.dumps(arguments, indent=1, ensure_ascii=False)]
            )
        return message


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _whole(answer: Any) -> list[int]:
    return [*answer.prompt_token_ids, *answer.choices[0].token_ids]


def check(families: Families, folder: Path, style: str, turns: int, seed: int, *, streams: bool = False) -> Agent:
    with families.openai() as client:
        agent = Agent(style, client, ChatTokenizer.load(folder), seed, streams=streams)
        for _ in range(turns):
            agent.turn()
    for before, after in pairwise(agent.calls):
        assert after.prompt_token_ids[: len(_whole(before))] == _whole(before)
        # The engine finds pages by the ids in them: what it read begins with what it had read and sampled.
        assert after.usage.prompt_tokens_details.cached_tokens >= len(_whole(before)) - PAGE
    (name,) = {answer.trace_id for answer in agent.calls}
    kept = families.http().get(f"/v1/traces/{name}").json()["turns"]
    assert [turn["match"] for turn in kept] == ["new"] + ["continued"] * (len(kept) - 1)
    assert [turn["prompt"] for turn in kept] == [answer.prompt_token_ids for answer in agent.calls]
    (trajectory,) = families.http().get(f"/v1/traces/{name}/trajectories").json()["data"]
    assert trajectory["tokens"] == _whole(agent.calls[-1])
    sampled = [t for t, in_loss in zip(trajectory["tokens"], trajectory["loss_mask"], strict=True) if in_loss]
    assert sampled == [token for answer in agent.calls for token in answer.choices[0].token_ids]
    return agent


@pytest.mark.parametrize("style", STYLES)
def test_conversations_stay_token_for_token(families: Families, folders: dict[str, Path], style: str) -> None:
    check(families, folders[style], style, turns=5, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("style", FAMILIES)
def test_fifty_turns_stay_token_for_token(
    families: Families, folders: dict[str, Path], style: str, streams: bool
) -> None:
    agent = check(families, folders[style], style, turns=50, seed=2, streams=streams)
    assert agent.kinds >= {"thought", "continued", "calls 1", "parts of characters"}


# Calls and thinking, by both SDKs

CLOSED: list[Any] = [
    {
        **tool,
        "function": {
            **tool["function"],
            "parameters": {**tool["function"]["parameters"], "additionalProperties": False},
        },
    }
    for tool in TOOLS
]
"""A random model would write properties that nobody named for ever."""


@pytest.fixture(params=["qwen35", "harmony"])
def call(request: pytest.FixtureRequest, folders: dict[str, Path]) -> dict[str, Any]:
    """Fields of a request that makes a model think and call."""
    bias = thinking_bias(request.param, ChatTokenizer.load(folders[request.param]))
    return {"model": request.param, "logit_bias": bias, "max_tokens": 1000, "parallel_tool_calls": False}


def _said(message: Any) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return getattr(message, "reasoning_content", None) or "", message.content or "", calls


def _check_arguments(name: str, arguments: Any) -> None:
    jsonschema.validate(arguments, PARAMETERS if name == "look_up" else {"maxProperties": 0})


def test_a_stream_says_what_the_plain_answer_says(families: Families, call: dict[str, Any]) -> None:
    given = {**call, "messages": HELLO, "tools": CLOSED, "tool_choice": "required"}
    thoughts: list[str] = []
    with families.openai() as client:
        for seed in range(3):
            plain = client.chat.completions.create(**given, seed=seed).choices[0]
            with client.chat.completions.stream(**given, seed=seed) as stream:
                streamed = stream.get_final_completion().choices[0]
            assert streamed.finish_reason == plain.finish_reason == "tool_calls"
            assert _said(streamed.message) == _said(plain.message)
            thought, content, ((name, arguments),) = _said(plain.message)
            assert content == ""
            _check_arguments(name, json.loads(arguments))
            thoughts.append(thought)
    assert any(thoughts)


@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.slow), True])
def test_anthropics_client_goes_on_token_for_token(families: Families, call: dict[str, Any], streams: bool) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=families.url, api_key="tml-test", max_retries=0, timeout=60)
    tools = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in CLOSED]
    history, before = list(HELLO), list[int]()
    for turn in range(4):
        calls = turn % 2 == 0
        choice = {"type": "any", "disable_parallel_tool_use": True} if calls else {"type": "none"}
        given = {"model": call["model"], "messages": history, "tools": tools, "tool_choice": choice}
        given |= {"max_tokens": 1000 if calls else 8}
        given |= {"extra_body": {"return_token_ids": True, "seed": turn, "logit_bias": call["logit_bias"]}}
        answer: Any
        if streams:
            with client.messages.stream(**given) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**given)
        trace = families.http().get("/v1/traces?limit=1").json()["data"][0]["id"]
        last = families.http().get(f"/v1/traces/{trace}").json()["turns"][-1]
        assert last["prompt"][: len(before)] == before
        assert last["match"] == ("continued" if turn else "new")
        before = [*last["prompt"], *last["samples"][0]["tokens"]]
        uses = [block for block in answer.content if block.type == "tool_use"]
        for use in uses:
            _check_arguments(use.name, use.input)
        assert bool(uses) == calls
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": "né"} for use in uses]
        history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results or "And?"}]


def test_a_prompt_that_closes_the_thought_is_answered_without_one(families: Families) -> None:
    given: dict[str, Any] = {"model": "qwen35", "messages": HELLO, "tools": CLOSED, "tool_choice": "required"}
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    with families.openai() as client:
        answer = client.chat.completions.create(**given, max_tokens=1000, parallel_tool_calls=False, extra_body=extra)
    thought, content, calls = _said(answer.choices[0].message)
    assert (thought, content, len(calls)) == ("", "", 1)


def test_strict_tools_are_called_by_their_schemas_or_not_at_all(families: Families, call: dict[str, Any]) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in CLOSED]
    with families.openai() as client:
        given = {**call, "messages": HELLO, "tools": strict, "n": 8, "seed": 3, "max_tokens": 150}
        choices = client.chat.completions.create(**given).choices
    ended = [_said(choice.message) for choice in choices if choice.finish_reason != "length"]
    for _, content, calls in ended:
        assert "functions." not in content
        for name, arguments in calls:
            _check_arguments(name, json.loads(arguments))
    assert ended
