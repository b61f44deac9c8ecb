from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.chat import ParsedCall, ParseFailure, parse_tool_call

CALL = '{"name": "f", "arguments": {"x": 1}}'
F = ParsedCall(name="f", arguments={"x": 1})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"I will. <tool_call>{CALL}</tool_call> Done.", F),
        (f"<tool_call>\n  {CALL}\n</tool_call>", F),
        (f"<function_call>{CALL}</function_call>", F),
        ('<tool_call>{"tool": "f", "params": {"x": 1}}</tool_call>', F),
        ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', F),
        ('<tool_call>{"name": "f"}</tool_call>', ParsedCall(name="f", arguments={})),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', ParsedCall(name="f", arguments={})),
        ('<tool_call>{"name": "f", "arguments": []}</tool_call>', ParsedCall(name="f", arguments={})),
        (f"<tool_call>{CALL}", F),
        (f"<tool_call>{CALL}<|im_end|>", F),
        (f"<tool_call>{CALL}\n<done>", F),
        (f"<tool_call>{CALL}</tool_call><tool_call>{CALL.replace('f', 'g')}</tool_call>", F),
        (f"<tool_call>oops</tool_call><function_call>{CALL}</function_call>", F),
        (f"<think>maybe <tool_call>{CALL.replace('f', 'g')}</tool_call></think><tool_call>{CALL}</tool_call>", F),
        (f"<think>a</think><think><tool_call>x</think><tool_call>{CALL}", F),
        (f"maybe <tool_call>{CALL.replace('f', 'g')}</tool_call>\n</think>\n<tool_call>{CALL}</tool_call>", F),
        (f"<think>never closed <tool_call>{CALL}</tool_call>", F),
        ("no call at all", None),
        ("", None),
        (CALL, None),
        (f"<TOOL_CALL>{CALL}</TOOL_CALL>", None),
        (f"<think><tool_call>{CALL}</tool_call></think> no, better not", None),
    ],
)
def test_calls_are_found(text: str, wanted: ParsedCall | None) -> None:
    assert parse_tool_call(text) == wanted


@pytest.mark.parametrize("inside", ["</tool_call>", "<tool_call>", "<think>a</think>", "b</think>", "<|im_end|>", "}"])
def test_arguments_may_hold_any_text(inside: str) -> None:
    call = json.dumps({"name": "write", "arguments": {"text": f"a {inside} b"}})
    for text in (f"<tool_call>{call}</tool_call>", f"<think>x</think>ok <tool_call>{call}"):
        assert parse_tool_call(text) == ParsedCall(name="write", arguments={"text": f"a {inside} b"})


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        ("", "not valid JSON"),
        ('{"name": "f", "arguments": {"x": 1}', "at the end of the text"),
        ("{'name': 'f'}", "Expecting property name enclosed in double quotes"),
        ('["f"]', "holds a JSON list, not an object"),
        ("7", "holds a JSON number"),
        ("{}", "no 'name'"),
        ('{"name": 5}', "a number as 'name'"),
        ('{"name": "f", "arguments": "{}"}', "'arguments' of 'f' is a string, not an object"),
        ('{"name": "f", "arguments": [1]}', "is a list, not an object"),
        ('{"name": "f"}}', "text follows the JSON object"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": -1e999}}', "too large for a number"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "without its second half"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "digits"),
        ('{"name": ' + "[" * 100_000, "cannot be read"),
    ],
)
def test_a_failed_try_says_why(inner: str, reason: str) -> None:
    found = parse_tool_call(f"<tool_call>{inner}")
    assert isinstance(found, ParseFailure)
    assert reason in found.reason
    assert "\n" not in found.reason
    assert len(found.reason) < 300


def test_the_second_block_is_not_tried_after_a_broken_first() -> None:
    found = parse_tool_call(f"<tool_call>{{x}}</tool_call><tool_call>{CALL}</tool_call>")
    assert isinstance(found, ParseFailure)
    assert "<tool_call>" in found.reason


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=8), JSON, max_size=4)


@given(st.text(min_size=1, max_size=8), OBJECTS, st.booleans())
def test_every_call_survives_the_way_through_text(name: str, arguments: dict[str, Any], closed: bool) -> None:
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}" + "</tool_call>" * closed
    assert parse_tool_call(text) == ParsedCall(name=name, arguments=arguments)


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", CALL, "{", '"', "x"])))
def test_no_text_breaks_the_parser(pieces: list[str]) -> None:
    parse_tool_call("".join(pieces))
