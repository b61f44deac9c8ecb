"""Thinking, text and calls are told apart from left to right, the same at once and in pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.chat import ParsedCall
from palestra.chat.output_parser import (
    ContentPiece,
    ParsedOutput,
    Piece,
    ReasoningParser,
    ReasoningPiece,
    ToolCallPiece,
    put_together,
)
from palestra.chat.tool_parsers import TOOL_FORMATS, AnswerFormat, tool_format
from palestra.chat.tool_parsers.hermes import HermesToolParser

HERMES = HermesToolParser()
F, G = '{"name": "f", "arguments": {"x": 1}}', '{"name": "g", "arguments": {}}'
CALL_F, CALL_G = ParsedCall(name="f", arguments={"x": 1}), ParsedCall(name="g", arguments={})


def speak(parser: ReasoningParser, *texts: str) -> list[Piece]:
    return [*(piece for text in texts for piece in parser.feed(text)), *parser.finish()]


def hear(text: str, *, in_thought: bool = False) -> ParsedOutput:
    return put_together(speak(ReasoningParser(HERMES, in_thought=in_thought), text))


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("", None, ""),
        ("plain", None, "plain"),
        ("\n a < think\n", None, "\n a < think\n"),
        ("  ", None, "  "),
        ("<think>\nhm\n\nso \n</think>\n\nyes\n", "hm\n\nso", "yes\n"),
        (" \n<think>hm</think>yes", "hm", "yes"),
        ("<think>\n\n</think>\n\nyes", "", "yes"),
        ("<think>hm</think>\n\n", "hm", ""),
        ("<think>a</think> <think>b</think>c", "a\nb", "c"),
        ("<think></think><think>b</think>c", "\nb", "c"),
        ("one <think> a </think> two", "a", "one  two"),
        ("<think>a<think>b</think>c", "a<think>b", "c"),
        ("<think>never closed \n", "never closed", ""),
        ("<think>a</th", "a</th", ""),
        ("<think>", None, ""),
        ("<think>a</think>b<think> ", "a", "b"),
        ("hm</think>yes", None, "hm</think>yes"),
        ("a <thi", None, "a <thi"),
    ],
)
def test_thinking_is_told_apart(text: str, reasoning: str | None, content: str) -> None:
    assert hear(text) == ParsedOutput(reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("hm\n</think>\n\nyes", "hm", "yes"),
        ("\n</think>\n\nyes", "", "yes"),
        ("<think>\nhm</think>yes", "hm", "yes"),
        (" \n<think>hm<think></think>yes", "hm<think>", "yes"),
        ("<thi</think>yes", "<thi", "yes"),
        ("<think></think>yes", "", "yes"),
        ("hm", "hm", ""),
        ("<thin", "<thin", ""),
        ("", None, ""),
        ("a</think>b<think>c</think>", "a\nc", "b"),
        ("a</think>b</think>c", "a", "b</think>c"),
    ],
)
def test_the_prompt_may_have_opened_the_thought(text: str, reasoning: str | None, content: str) -> None:
    assert hear(text, in_thought=True) == ParsedOutput(reasoning, content)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"I will.\n<tool_call>\n{F}\n</tool_call>\n", ParsedOutput(None, "I will.", [CALL_F])),
        (f" <tool_call>{F}</tool_call> ", ParsedOutput(None, "", [CALL_F])),
        (f"a <tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call> b", ParsedOutput(None, "a \n b", [CALL_F, CALL_G])),
        (f"<think>hm</think>\n\n<tool_call>{F}</tool_call>", ParsedOutput("hm", "", [CALL_F])),
        (f"<think>a <tool_call>{F}</think> <tool_call>{G}", ParsedOutput(f"a <tool_call>{F}", "", [CALL_G])),
        (f"<think>a <tool_call>{F}</tool_call>", ParsedOutput(f"a <tool_call>{F}</tool_call>", "")),
        (f"<tool_call>{F}</tool_call><think>b</think>", ParsedOutput(None, "<think>b</think>", [CALL_F])),
        (oops := "<tool_call>oops</tool_call><think>b</think> ", ParsedOutput(None, oops)),
        ("<tool_call>oops <think>b</think>", ParsedOutput(None, "<tool_call>oops <think>b</think>")),
        (f"<tool_call>{F} <tool_call>{G}", ParsedOutput(None, "", [CALL_F, CALL_G])),
        (f"<tool_call>{F}</tool_c", ParsedOutput(None, "</tool_c", [CALL_F])),
        (f"<tool_call>{F[:-1]}", ParsedOutput(None, f"<tool_call>{F[:-1]}")),
    ],
)  # fmt: skip
def test_calls_are_told_apart(text: str, wanted: ParsedOutput) -> None:
    assert hear(text) == wanted


def test_without_a_format_calls_are_text() -> None:
    text = f"<think>hm</think><tool_call>{F}</tool_call>"
    assert put_together(speak(ReasoningParser(None), text)) == ParsedOutput("hm", f"<tool_call>{F}</tool_call>")


def test_what_is_certain_is_told_at_once() -> None:
    parser = ReasoningParser(HERMES)
    assert parser.feed("<think>so, ") == [ReasoningPiece("so,")]
    assert parser.feed("then </thi") == [ReasoningPiece(" then")]
    assert parser.feed("nk>\n\nI wi") == [ContentPiece("I wi")]
    assert parser.feed("ll.\n<tool") == [ContentPiece("ll.")]
    assert parser.feed(f"_call>\n{F}\n</tool_cal") == []
    assert parser.feed("l>\n<tool_call>oops") == [
        ToolCallPiece(CALL_F),
        ContentPiece("\n\n<tool_call>"),
        ContentPiece("oops"),
    ]
    assert parser.feed(" and more") == [ContentPiece(" and more")]
    assert parser.finish() == []


TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function_call>", "<", "</", "<|python_tag|>"]
BRACKETS = ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "f[ARGS]{}", "{", "}", "[", "]", f"[{F}, {G}]", '{"a": 1}', "; "]
OTHERS = [F, F[:-3], '{"name": "h", "parameters": {"s": "</tool_call>"}}', '"', "\\", " ", "\n", "x", "oops"]
TAGGED = [name for name, tools in TOOL_FORMATS.items() if not isinstance(tools, AnswerFormat)]
PARTS = st.sampled_from([*TAGS, *BRACKETS, *OTHERS])


@given(st.lists(PARTS, max_size=12).map("".join), st.data(), st.booleans(), st.sampled_from([*TAGGED, None]))
def test_how_the_text_is_cut_changes_nothing(text: str, data: st.DataObject, thinks: bool, name: str | None) -> None:
    tools = tool_format(name) if name else None
    assert not isinstance(tools, AnswerFormat)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    at_once = put_together(speak(ReasoningParser(tools, in_thought=thinks), text))
    assert put_together(speak(ReasoningParser(tools, in_thought=thinks), *pieces)) == at_once
    assert put_together(speak(ReasoningParser(tools, in_thought=thinks), *text)) == at_once


@given(st.lists(PARTS, max_size=12).map("".join))
def test_text_without_thoughts_and_calls_is_kept_as_it_is(text: str) -> None:
    speech = hear(text)
    if "<think>" not in text and not speech.calls:
        assert speech == ParsedOutput(None, text)


@pytest.mark.parametrize("text", ["x " * 30_000, " " * 60_000, "<tool_call>" + F.replace("1", f'"{"a<" * 30_000}"')])
def test_long_answers_can_come_character_by_character(text: str) -> None:
    """For as long as each is looked at once; minutes otherwise."""
    speech = put_together(speak(ReasoningParser(HERMES), *text))
    assert speech.calls or speech.content == text
