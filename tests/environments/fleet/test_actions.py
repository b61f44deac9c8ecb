"""What the model wrote, read both ways: every row of the table, and what is done and what is not."""

from __future__ import annotations

import pytest

from palestra.environments.fleet.actions import ActionGrammar, CallRequest, parse_action

CALL = '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>'
A, B = CallRequest("a", {"x": 1}), CallRequest("b", {})
OTHER = '<tool_call>{"name": "b"}</tool_call>'

ROWS = {
    "one call": (CALL, A, A),
    "two calls": (CALL + OTHER, A, A),
    "first malformed, second valid": ("<tool_call>{oops}</tool_call>" + CALL, None, None),
    "malformed tool_call, valid function_call": (
        '<tool_call>{oops}</tool_call><function_call>{"tool": "b"}</function_call>',
        B,
        B,
    ),
    "missing closing tag": ('<tool_call>{"name": "b"}', B, B),
    "cut at a special token": ('<tool_call>{"name": "b"}<|im_end|>', B, B),
    "params": ('<tool_call>{"tool": "a", "params": {"x": 1}}</tool_call>', A, A),
    "no arguments: a list": ('<tool_call>{"name": "b", "arguments": []}</tool_call>', B, B),
    "no arguments: null": ('<tool_call>{"name": "b", "arguments": null}</tool_call>', B, B),
    "arguments that are text": (
        '<tool_call>{"name": "a", "arguments": "x"}</tool_call>',
        CallRequest("a", "x"),
        None,
    ),
    "a call in a thought": (f"<think>{OTHER}</think>{CALL}", B, A),
    "upper case": (CALL.replace("tool_call", "TOOL_CALL"), None, None),
    "bare JSON": ('{"name": "b"}', None, None),
    "a JSON list": ('<tool_call>[{"name": "b"}]</tool_call>', None, None),
    "a closing tag in a string": (
        '<tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call>',
        None,
        CallRequest("a", {"x": "</tool_call>"}),
    ),
    "a number as name": ('<tool_call>{"name": 5}</tool_call>', CallRequest(5, {}), None),
    "thousands of digits": (f'<tool_call>{{"name": "a", "arguments": {{"x": {"9" * 5000}}}}}</tool_call>', None, None),
    "nothing": ("I will look.", None, None),
}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_the_grammar(name: str):
    text, strict, lenient = ROWS[name]
    assert parse_action(text, ActionGrammar.STRICT).call == strict
    found = parse_action(text, ActionGrammar.LENIENT)
    assert found.call == lenient
    assert bool(found.problem) == (lenient is None and "<tool_call>" in text)
    assert not found.is_done


@pytest.mark.parametrize(
    ("text", "is_done"),
    [
        ("<done>", True),
        ("It is 4. <DONE>", True),
        ("[done]", True),
        (CALL + "<done>", True),
        ("<done>" + CALL, True),
        ('<tool_call>{"name": "b"}<done>', True),
        ("<think>then I say <done></think>" + CALL, False),
        ("<think>then I say <done>", False),
        ("so I say <done></think>" + CALL, False),
        ('<tool_call>{"name": "a", "arguments": {"x": "<done>"}}</tool_call>', False),
        ('<tool_call>{"name": "a", "arguments": {"x": "</tool_call><done>"}}</tool_call>', False),
        ("<tool_call>{oops <done>", False),
        ('<tool_call>{"name": "a", "arguments": {"x": "<think>"}}</tool_call><done>', True),
        ("<think>first" + CALL + "<done>", False),
        ("<tool_call>{oops</tool_call> <done>", True),
        ("done", False),
    ],
)
@pytest.mark.parametrize("grammar", ActionGrammar)
def test_done_counts_only_where_it_is_said(text: str, is_done: bool, grammar: ActionGrammar):
    assert parse_action(text, grammar).is_done is is_done


def test_calls_after_the_first_are_counted():
    assert parse_action(CALL + OTHER + OTHER).ignored_calls == 2
    assert parse_action(CALL).ignored_calls == 0
