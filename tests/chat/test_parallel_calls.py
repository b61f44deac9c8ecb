"""All calls of an answer are found; what cannot be read stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.chat import ParsedCall, parse_tool_call
from palestra.chat.output_parser import ParsedOutput, ReasoningParser, put_together
from palestra.chat.tool_parsers.hermes import HermesToolParser

F, G = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "arguments": {}}'


def hear(text: str) -> ParsedOutput:
    parser = ReasoningParser(HermesToolParser())
    return put_together([*parser.feed(text), *parser.finish()])


@pytest.mark.parametrize(
    ("text", "calls", "around"),
    [
        (f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call>", ["f", "g"], ""),
        (f"a <tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call> b", ["f", "g"], "a \n b"),
        (f"<tool_call>{F}<tool_call>{G}", ["f", "g"], ""),
        (f"<function_call>{F}</function_call><tool_call>{G}</tool_call>", ["f", "g"], ""),
        (f"<tool_call>oops</tool_call><tool_call>{G}</tool_call>", ["g"], "<tool_call>oops</tool_call>"),
        (f"<tool_call>oops {G}", [], f"<tool_call>oops {G}"),
        ("no call", [], "no call"),
        ("", [], ""),
    ],
)
def test_every_call_is_found_and_the_rest_stays(text: str, calls: list[str], around: str) -> None:
    speech = hear(text)
    assert [call.name for call in speech.calls] == calls
    assert speech.content == around


arguments = st.dictionaries(st.text(), st.one_of(st.integers(), st.text(), st.booleans(), st.lists(st.text())))


@given(st.lists(st.tuples(st.text(min_size=1), arguments), min_size=1, max_size=4))
def test_calls_survive_whatever_their_arguments_hold(calls: list[tuple[str, dict[str, Any]]]) -> None:
    expected = [ParsedCall(name=name, arguments=given) for name, given in calls]
    bodies = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    found = hear("".join(f"<tool_call>{body}</tool_call>" for body in bodies))
    assert found.calls == expected
    assert found.content == ""


@given(st.text(alphabet="<>/{}\"'tool_callthinkname: x1\n,"))
def test_the_first_of_several_is_the_one_that_a_single_parser_finds(text: str) -> None:
    first = parse_tool_call(f"<tool_call>{F}</tool_call>{text}")
    if isinstance(first, ParsedCall) and "think" not in text:
        assert hear(f"<tool_call>{F}</tool_call>{text}").calls[0] == first
