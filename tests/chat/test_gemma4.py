"""Answers of Gemma 4: thoughts, calls with bare keys, where a prompt ends, and what its grammar lets through."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.chat import ChatTokenizer, ParsedCall
from palestra.chat.answer_formats import answer_start, output_parser
from palestra.chat.output_pieces import ParsedOutput, put_together
from palestra.chat.tool_parsers import AnswerStart, tool_format
from palestra.chat.tool_parsers.gemma4_values import read_arguments
from palestra.model import load_tokenizer
from palestra.model.sampling.grammars import Grammars
from palestra.types import Grammar, GrammarKind

TokenizerOf = Callable[[str], ChatTokenizer]
GEMMA4 = tool_format("gemma4")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Paris"]},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "note": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": SCHEMA}}]
THOUGHT = "<|channel>thought\nwhy\n<channel|>"
WRITTEN = '<|tool_call>call:get{city:<|"|>Rome<|"|>,days:3}<tool_call|>'
CALL = ParsedCall(name="get", arguments={"city": "Rome", "days": 3})


def hear(*texts: str, calls: bool = True, start: AnswerStart = AnswerStart.FRESH) -> ParsedOutput:
    parser = output_parser(GEMMA4, TOOLS if calls else None, start)
    return put_together([*(piece for text in texts for piece in parser.feed(text)), *parser.finish()])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("18 °C", ParsedOutput(None, "18 °C")),
        (THOUGHT + "18 °C", ParsedOutput("why", "18 °C")),
        (THOUGHT + WRITTEN, ParsedOutput("why", "", [CALL])),
        ("I look." + WRITTEN + WRITTEN, ParsedOutput(None, "I look.", [CALL, CALL])),
        (WRITTEN.removesuffix("<tool_call|>"), ParsedOutput(None, "", [CALL])),
        (WRITTEN.replace(":<", ": <"), ParsedOutput(None, "", [CALL])),
        (WRITTEN.replace("}", ""), ParsedOutput(None, WRITTEN.replace("}", ""))),
        ("<|tool_call>get<tool_call|>", ParsedOutput(None, "<|tool_call>get<tool_call|>")),
        ("<|channel>thought\ncut o", ParsedOutput("cut o", "")),
        ("<think>a</think>", ParsedOutput(None, "<think>a</think>")),
    ],
)
def test_thoughts_text_and_calls_are_told_apart(text: str, expected: ParsedOutput) -> None:
    assert hear(text) == expected


def test_calls_are_text_where_nobody_offered_tools() -> None:
    assert hear(THOUGHT + WRITTEN, calls=False) == ParsedOutput("why", WRITTEN)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        ('{a:<|"|><|"|>}', {"a": ""}),
        ('{a:<|"|>x, {y}: <tool_call|> "z"<|"|>}', {"a": 'x, {y}: <tool_call|> "z"'}),
        ("{a:1,b:-2.5,c:true,d:null,e:word}", {"a": 1, "b": -2.5, "c": True, "d": None, "e": "word"}),
        ('{a:{b:[1,[<|"|>x<|"|>],{}]}}', {"a": {"b": [1, ["x"], {}]}}),
        ('{<|"|>a<|"|>: 1 , b: 2 }', {"a": 1, "b": 2}),
        ("{a:1", None),
        ("{a 1}", None),
        ("[1]", None),
        ("{a:1}x", None),
        ('{a:<|"|>x}', None),
        ("{a:" * 500 + "1" + "}" * 500, None),
    ],
)
def test_arguments_are_read(text: str, value: Any) -> None:
    assert read_arguments(text) == value


def test_a_string_may_hold_the_end_of_a_call() -> None:
    text = '<|tool_call>call:get{city:<|"|>a<tool_call|>b<|"|>}<tool_call|>'
    assert hear(text).calls == [ParsedCall(name="get", arguments={"city": "a<tool_call|>b"})]


PARTS = st.sampled_from([*GEMMA4.tags, "thought\n", "call:get", "{", "}", "city:", "x", "<", "<|", "\n", WRITTEN])


@given(st.lists(PARTS, max_size=14).map("".join), st.data(), st.booleans(), st.sampled_from(AnswerStart))
def test_how_the_text_is_cut_changes_nothing(text: str, data: st.DataObject, calls: bool, start: AnswerStart) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    at_once = hear(text, calls=calls, start=start)
    assert hear(*(text[a:b] for a, b in pairwise([0, *cuts, len(text)])), calls=calls, start=start) == at_once
    assert hear(*text, calls=calls, start=start) == at_once


def test_long_values_can_come_character_by_character() -> None:
    """For as long as each is looked at once; minutes otherwise."""
    value = "<|" * 20_000
    text = f'<|tool_call>call:get{{city:<|"|>{value}<|"|>}}<tool_call|>'
    assert hear(*text).calls == [ParsedCall(name="get", arguments={"city": value})]


# Prompts

USER: dict[str, Any] = {"role": "user", "content": "Weather?"}
VALUES = st.dictionaries(
    st.from_regex(r"[a-z]{1,6}", fullmatch=True),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(lambda text: "<" not in text)
    | st.integers()
    | st.booleans()
    | st.none()
    | st.lists(st.integers(), max_size=3)
    | st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), st.integers(), max_size=2),
    max_size=4,
)


@settings(deadline=None)
@given(VALUES)
def test_what_a_template_writes_is_read_as_it_was_meant(tokenizer_of: TokenizerOf, arguments: dict[str, Any]) -> None:
    tokenizer = tokenizer_of("gemma4")
    call = {"id": "c", "function": {"name": "get", "arguments": arguments}}
    start = tokenizer.render([USER], TOOLS, add_generation_prompt=False)
    history = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = tokenizer.render(history, TOOLS, add_generation_prompt=False)[len(start) :]
    (found,) = hear(text.removeprefix("<|turn>model\n")).calls
    assert json.dumps(found.arguments, sort_keys=True) == json.dumps(arguments, sort_keys=True)


def test_the_template_shows_its_format_and_its_ends(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("gemma4")
    assert tokenizer.tool_format.name == "gemma4"
    assert {"<turn|>", "<|tool_response>"} <= {tokenizer.token_name(token) for token in tokenizer.stop_ids}


@pytest.mark.parametrize(("thinks", "end"), [(True, "model\n"), (False, "<channel|>")])
def test_the_end_of_a_prompt_tells_where_the_answer_goes_on(tokenizer_of: TokenizerOf, thinks: bool, end: str) -> None:
    tokenizer = tokenizer_of("gemma4")
    ids = tokenizer.encode_chat([USER], TOOLS, template_kwargs={"enable_thinking": thinks})
    assert tokenizer.decode(ids, skip_special=False).endswith(end)
    assert answer_start(tokenizer, ids, 0) is AnswerStart.FRESH
    assert GEMMA4.start("<|turn>model\n<|channel>thought\nhm") is AnswerStart.IN_THOUGHT


# Grammars


@pytest.fixture(scope="module")
def accepts(tokenizer_of: TokenizerOf, style_folder: Callable[[str], Any]) -> Callable[..., bool]:
    tokenizer = tokenizer_of("gemma4")
    backend = load_tokenizer(style_folder("gemma4"))
    grammars = Grammars(backend, backend.get_vocab_size())

    def check(
        top: str,
        text: str,
        start: AnswerStart = AnswerStart.FRESH,
        *,
        parallel: bool = True,
        tools: list[dict[str, Any]] = TOOLS,
    ) -> bool:
        special = tokenizer.special_texts
        calls = GEMMA4.grammar(tools, parallel=parallel, special=special)
        grammar = GEMMA4.layout(top, start=start, special=special) + calls
        compiled = grammars.compile(Grammar(kind=GrammarKind.LARK, text=grammar)).result()
        mask, tokens = compiled.begin((tokenizer.turn_end,)), encoded(tokenizer, text)
        return all(mask.allowed(tokens[:at])[token] for at, token in enumerate([*tokens, tokenizer.turn_end]))

    return check


def encoded(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """As a model writes it: what its format is written with are tokens."""
    tokens: list[int] = []
    while text:
        tag = next((tag for tag in GEMMA4.tags if text.startswith(tag)), None)
        if tag is not None:
            tokens.append(tokenizer.special_texts[tag])
            text = text[len(tag) :]
            continue
        ends = [at for tag in GEMMA4.tags if (at := text.find(tag)) > 0]
        size = min(ends, default=len(text))
        tokens += tokenizer.encode_text(text[:size])
        text = text[size:]
    return tokens


def written(arguments: str) -> str:
    return f"<|tool_call>call:get{arguments}<tool_call|>"


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (WRITTEN, True),
        (THOUGHT + WRITTEN, True),
        (WRITTEN + WRITTEN, True),
        (written('{city:<|"|>Rome<|"|>,days:-1,exact:true}'), True),
        (written('{city:<|"|>Paris<|"|>,days:1,note:<|"|>a {b}<|"|>,tags:[<|"|>x<|"|>,<|"|><|"|>]}'), True),
        (written('{city:<|"|>Paris<|"|>,days:1,tags:[]}'), True),
        (written('{city:<|"|>Bonn<|"|>,days:1}'), False),
        (written('{city:<|"|>Rome<|"|>}'), False),
        (written('{city:<|"|>Rome<|"|>,days:one}'), False),
        (written('{days:1,city:<|"|>Rome<|"|>}'), False),
        (written('{city:<|"|>Rome<|"|>,days:1,note:<|"|>too long a note<|"|>}'), False),
        (written('{city:<|"|>Rome<|"|>,days:1,more:1}'), False),
        ("Rome", False),
    ],
)
def test_calls_follow_the_schema(accepts: Callable[..., bool], text: str, is_allowed: bool) -> None:
    assert accepts("calls", text) is is_allowed
    if is_allowed:
        for call in hear(text).calls:
            jsonschema.validate(call.arguments, SCHEMA)


def test_text_and_thoughts_are_free(accepts: Callable[..., bool]) -> None:
    for text in ("", "Hello, {you}", THOUGHT + "Hello", "Well. " + WRITTEN, WRITTEN):
        assert accepts("text_or_calls", text), text
    assert accepts("text_or_calls", "so<channel|>Yes", AnswerStart.IN_THOUGHT)
    assert not accepts("text_or_calls", "Well. <|tool_call>call:put{}<tool_call|>")
    assert not accepts("calls", WRITTEN + WRITTEN, parallel=False)


@pytest.mark.parametrize(
    ("parameters", "arguments", "is_allowed"),
    [
        ({"type": "object"}, '{a:1,b:{c:[<|"|>x<|"|>,null,true]}}', True),
        ({"type": "object"}, "{}", True),
        ({"type": "object"}, "{a}", False),
        (None, "{}", True),
        (None, "{a:1}", False),
        ({"type": "object", "properties": {"a": {"type": ["integer", "null"]}}}, "{a:null}", True),
        ({"type": "object", "properties": {"a": {"type": ["integer", "null"]}}}, "{a:true}", False),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array"}]}}}, "{a:[1]}", True),
        ({"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "array"}]}}}, "{a:1}", False),
    ],
)
def test_schemas_that_say_little_allow_much(
    accepts: Callable[..., bool], parameters: Any, arguments: str, is_allowed: bool
) -> None:
    function = {"name": "get"} | ({} if parameters is None else {"parameters": parameters})
    assert accepts("calls", written(arguments), tools=[{"type": "function", "function": function}]) is is_allowed
