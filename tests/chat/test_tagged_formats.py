"""Formats whose values are texts between tags: types come from the tools' schemas, whatever the texts hold."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.chat import ChatError, ChatTokenizer, ParsedCall
from palestra.chat.answer_formats import answer_start, output_parser
from palestra.chat.output_pieces import ParsedOutput, put_together
from palestra.chat.tool_parsers import tool_format
from palestra.chat.tool_parsers.protocol import AnswerStart
from tests.chat.test_tool_formats import PLAIN, Machine
from tests.chat.test_tool_formats import TOOLS as GRAMMAR_TOOLS

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "list": {"type": "array", "items": {"type": "integer"}},
    "deep": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["integer", "string"]},
    "colour": {"$ref": "#/$defs/Colour"},
    "any": {},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"Colour": {"enum": ["1", 2, "red"]}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
]
FORMATS = ["qwen_xml", "glm"]
TAGS = "</parameter> </arg_value> <parameter= <tool_call>"


def hear(name: str, *texts: str) -> ParsedOutput:
    parser = output_parser(tool_format(name), TOOLS)
    return put_together([*(piece for text in texts for piece in parser.feed(text)), *parser.finish()])


def written(name: str, function: str, values: dict[str, str]) -> str:
    if name == "glm":
        pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()]
        return f"<tool_call>{function}\n{''.join(pairs)}</tool_call>"
    pairs = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()]
    return f"<tool_call>\n<function={function}>\n{''.join(pairs)}</function>\n</tool_call>"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "12", "12"),
        ("text", "true", "true"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", '"quoted"', '"quoted"'),
        ("text", "", ""),
        ("text", "a\n\n b\n", "a\n\n b\n"),
        ("text", TAGS, TAGS),
        ("count", "12", 12),
        ("count", "12.0", 12.0),
        ("count", "twelve", "twelve"),
        ("count", "1.5", "1.5"),
        ("ratio", "-2.5e3", -2500.0),
        ("ratio", "NaN", "NaN"),
        ("flag", "true", True),
        ("flag", "True", True),
        ("flag", "False", False),
        ("flag", "1", "1"),
        ("list", "[1, 2]", [1, 2]),
        ("list", "[1, 2", "[1, 2"),
        ("deep", '{"a": {"b": [true, null]}}', {"a": {"b": [True, None]}}),
        ("deep", "[" * 200 + "]" * 200, "[" * 200 + "]" * 200),
        ("maybe", "None", None),
        ("maybe", "null", None),
        ("maybe", "nothing", "nothing"),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("colour", "1", "1"),
        ("colour", "2", 2),
        ("any", "3", 3),
        ("any", "None", None),
        ("any", "some words", "some words"),
        ("nobody said", '["x"]', ["x"]),
        ("nobody said", "x", "x"),
    ],
)  # fmt: skip
def test_values_have_the_types_that_the_schema_says(name: str, key: str, text: str, value: Any) -> None:
    found = hear(name, written(name, "f", {key: text}))
    assert found == ParsedOutput(None, "", [ParsedCall(name="f", arguments={key: value})])
    assert type(found.calls[0].arguments[key]) is type(value)


def test_references_in_a_circle_allow_anything() -> None:
    circle = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"$ref": "#/$defs/A"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": circle}}]
    parser = output_parser(tool_format("qwen_xml"), tools)
    assert put_together(parser.feed(written("qwen_xml", "f", {"a": "7"}))).calls[0].arguments == {"a": 7}


@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_stand_in_an_answer(name: str) -> None:
    text = "<think>hm</think>\n\nI will.\n\n" + "\n".join([written(name, "f", {"count": "1"}), written(name, "g", {})])
    f, g = ParsedCall(name="f", arguments={"count": 1}), ParsedCall(name="g", arguments={})
    assert hear(name, text) == ParsedOutput("hm", "I will.", [f, g])


G = ParsedCall(name="g", arguments={})
GIVEN = ParsedCall(name="g", arguments={"a": "b"})


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("<tool_call><function=g></function></tool_call>", [G], ""),
        ("<tool_call>\n<function=g>\n</function>", [G], ""),
        ("<tool_call>\n<function=g>\n</function>\n<tool_call>\n<function=g>\n</function>\n</tool_call>", [G, G], ""),
        ("<tool_call><function=g></function><function=g></function></tool_call>", [G, G], ""),
        ("ok <function=g>\n</function>\n</tool_call>", [G], "ok"),
        ("see <function=name> here: <tool_call><function=g></function></tool_call>", [G], "see <function=name> here:"),
        ("<tool_call>oops</tool_call>", [], "<tool_call>oops</tool_call>"),
        ("<tool_call>\n<function=g", [], "<tool_call>\n<function=g"),
        (open_value := "<tool_call>\n<function=g>\n<parameter=a>\nb", [], open_value),
        (cut := "<tool_call>\n<function=g>\n<parameter=a>\nb\n</parameter>\n</func", [], cut),
        (as_json := '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>', [], as_json),
        (f"<tool_call><function={'n' * 600}></function>", [], f"<tool_call><function={'n' * 600}></function>"),
    ],
)  # fmt: skip
def test_qwen_calls_that_are_not_quite_right(text: str, calls: list[ParsedCall], content: str) -> None:
    assert hear("qwen_xml", text) == ParsedOutput(None, content, calls)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ("<tool_call>g</tool_call>", [G], ""),
        ("<tool_call>g<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>", [GIVEN], ""),
        ("<tool_call>what is it</tool_call>", [], "<tool_call>what is it</tool_call>"),
        ("<tool_call>g\n<arg_key>a</arg_key>\n<arg_value>b", [], "<tool_call>g\n<arg_key>a</arg_key>\n<arg_value>b"),
    ],
)  # fmt: skip
def test_glm_calls_that_are_not_quite_right(text: str, calls: list[ParsedCall], content: str) -> None:
    assert hear("glm", text) == ParsedOutput(None, content, calls)


def test_a_value_that_holds_the_end_of_a_call_is_read_whole() -> None:
    value = "a</parameter>\n</function> is how a call ends\n</parameter>"
    text = written("qwen_xml", "f", {"text": value, "count": "1"})
    assert hear("qwen_xml", text).calls == [ParsedCall(name="f", arguments={"text": value, "count": 1})]


PARTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=text>", "</parameter>", "\n", " "),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "f", "12", "<", "</think>", "<think>"),
        *(written(name, "f", {"count": "1"}) for name in FORMATS),
    ]
)


@given(st.lists(PARTS, max_size=14).map("".join), st.data(), st.sampled_from(FORMATS))
def test_how_the_text_is_cut_changes_nothing(text: str, data: st.DataObject, name: str) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    at_once = hear(name, text)
    assert hear(name, *(text[a:b] for a, b in pairwise([0, *cuts, len(text)]))) == at_once
    assert hear(name, *text) == at_once


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(),
        "count": st.integers(),
        "ratio": st.floats(allow_nan=False, allow_infinity=False),
        "flag": st.booleans(),
        "list": st.lists(st.integers(), max_size=3),
        "deep": st.dictionaries(st.text(), st.text() | st.none() | st.booleans(), max_size=3),
    },
)


@settings(deadline=None)
@given(VALUES, st.sampled_from(["qwen35", "qwen38", "nemotron", "glm"]))
def test_what_a_template_writes_is_read_as_it_was_meant(
    tokenizer_of: Callable[[str], ChatTokenizer], arguments: dict[str, Any], style: str
) -> None:
    tokenizer = tokenizer_of(style)
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    hello = {"role": "user", "content": "Hi"}
    history = [hello, {"role": "assistant", "content": "", "tool_calls": [call]}]
    start = tokenizer.render([hello], TOOLS, add_generation_prompt=False)
    text = tokenizer.render(history, TOOLS, add_generation_prompt=False)[len(start) :]
    parser = output_parser(tokenizer.tool_format, TOOLS)
    (found,) = put_together([*parser.feed(text), *parser.finish()]).calls
    assert found == ParsedCall(name="f", arguments=arguments)
    assert json.dumps(found.arguments) == json.dumps(arguments)


@pytest.mark.parametrize("text", ["x" * 30_000, " " * 30_000, "</parameter>" * 3_000, "<parameter=" * 3_000])
def test_long_values_can_come_character_by_character(text: str) -> None:
    """For as long as each is looked at once; minutes otherwise."""
    call = written("qwen_xml", "f", {"text": text})
    assert hear("qwen_xml", *call).calls == [ParsedCall(name="f", arguments={"text": text})]


# Grammars

GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MACHINES = [("qwen_xml", PLAIN), ("glm", PLAIN), ("glm", Machine(*GLM_TAGS))]
BOUND = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "maximum": 999},
        "s": {"type": "string", "maxLength": 4, "minLength": 1},
        "p": {"type": "string", "pattern": "^[a-c]+/$"},
        "free": {"type": "string"},
        "flag": {"type": "boolean"},
        "of": {"$ref": "#/$defs/Colour"},
    },
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"Colour": {"enum": ["red", 'dark "blue"', 3]}},
}


def bound(parameters: dict[str, Any] | None = None) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters or BOUND}}]


@pytest.mark.parametrize(("name", "machine"), MACHINES)
@pytest.mark.parametrize(
    ("values", "is_right"),
    [
        ({"x": "1"}, True),
        ({"x": "1", "s": "né", "p": "ab/", "free": "any\n <b> text\n", "flag": "true", "of": "3"}, True),
        ({"x": "1", "flag": "True", "of": 'dark "blue"'}, True),
        ({"x": "1", "free": ""}, True),
        ({"x": "1000"}, False),
        ({"x": '"1"'}, False),
        ({"s": "a"}, False),
        ({"x": "1", "s": ""}, False),
        ({"x": "1", "s": "abcde"}, False),
        ({"x": "1", "p": "abd/"}, False),
        ({"x": "1", "of": "blue"}, False),
        ({"x": "1", "y": "2"}, False),
        ({"s": "a", "x": "1"}, False),
    ],
)
def test_a_grammar_follows_the_schema(name: str, machine: Machine, values: dict[str, str], is_right: bool) -> None:
    text = written(name, "f", values)
    assert machine.lets_through(text, machine.matcher(tool_format(name), given=bound())) == is_right


@pytest.mark.parametrize(("name", "machine"), MACHINES)
@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_grammar_lets_through_is_a_call(name: str, machine: Machine, seed: int) -> None:
    required = {**GRAMMAR_TOOLS[0]["function"]["parameters"], "required": ["x", "s", "of"]}
    given = bound(required)
    text = machine.wander(machine.matcher(tool_format(name), given=given), random.Random(seed))
    parser = output_parser(tool_format(name), given)
    output = put_together([*parser.feed(text), *parser.finish()])
    assert output.content == ""
    jsonschema.validate(output.calls[0].arguments, required)


@pytest.mark.parametrize(("name", "machine"), MACHINES)
def test_a_tool_without_a_schema_of_its_values_takes_any(name: str, machine: Machine) -> None:
    given, none = bound({"type": "object"}), bound({"type": "object", "properties": {}})
    for values in ({}, {"a": "x\ny", "b": "1"}):
        text = written(name, "f", values)
        assert machine.lets_through(text, machine.matcher(tool_format(name), given=given))
        assert machine.lets_through(text, machine.matcher(tool_format(name), given=none)) == (not values)


def test_what_a_grammar_cannot_say_is_refused_unless_it_may_be_left_open() -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", "format": "date"}}}
    with pytest.raises(ChatError, match="'format' of a string cannot be followed"):
        tool_format("qwen_xml").grammar(bound(schema), parallel=False, special={})
    with pytest.raises(ChatError, match="'anyOf' of the arguments"):
        tool_format("qwen_xml").grammar(bound({"anyOf": []}), parallel=False, special={})
    with pytest.raises(ChatError, match="'a>b' cannot be written"):
        tool_format("qwen_xml").grammar(bound({"properties": {"a>b": {}}}), parallel=False, special={})
    lenient = schema | {"x-guidance": {"lenient": True}}
    call = written("qwen_xml", "f", {"s": "some day"})
    assert PLAIN.lets_through(call, PLAIN.matcher(tool_format("qwen_xml"), given=bound(lenient)))


# Nemotron: Qwen's calls, with a word on whether there is a thought in every turn


@pytest.mark.parametrize(("thinks", "start"), [(True, AnswerStart.IN_THOUGHT), (False, AnswerStart.FRESH)])
def test_nemotron_says_whether_a_thought_begins(
    tokenizer_of: Callable[[str], ChatTokenizer], thinks: bool, start: AnswerStart
) -> None:
    tokenizer = tokenizer_of("nemotron")
    assert tokenizer.tool_format.name == "qwen_xml"
    prompt = tokenizer.encode_chat(
        [{"role": "user", "content": "Hi"}], TOOLS, template_kwargs={"enable_thinking": thinks}
    )
    assert answer_start(tokenizer, prompt, 0) is start
    parser = output_parser(tokenizer.tool_format, TOOLS, start)
    text = ("hm\n</think>\n" if thinks else "") + "I will.\n" + written("qwen_xml", "f", {"count": "1"})
    found = put_together([*parser.feed(text), *parser.finish()])
    call = ParsedCall(name="f", arguments={"count": 1})
    assert found == ParsedOutput("hm" if thinks else None, "I will.", [call])
