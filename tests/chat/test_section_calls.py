"""Calls of DeepSeek and Kimi: sections of calls between special tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.chat import ParsedCall
from palestra.chat.answer_formats import output_parser
from palestra.chat.output_pieces import ParsedOutput, put_together
from palestra.chat.tool_parsers import tool_format
from palestra.chat.tool_parsers.section_calls import DEEPSEEK, KIMI, SectionFormat

F = ParsedCall(name="f", arguments={"x": 1})
G = ParsedCall(name="g", arguments={})
FORMATS = {form.name: form for form in (DEEPSEEK, KIMI)}
TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]
both = pytest.mark.parametrize("name", FORMATS)


def heard(name: str, *parts: str) -> ParsedOutput:
    parser = output_parser(tool_format(name), TOOLS)
    return put_together([piece for part in parts for piece in parser.feed(part)] + parser.finish())


def call(form: SectionFormat, name: str, arguments: str, number: int = 0) -> str:
    written = f"functions.{name}:{number}" if form is KIMI else name
    return f"{form.call}{written}{form.separator}{arguments}{form.call_end}"


@both
def test_section_has_calls(name: str) -> None:
    form = FORMATS[name]
    text = form.opening + call(form, "f", '{"x": 1}') + call(form, "g", "{}", 1) + form.closing
    assert heard(name, text) == ParsedOutput(None, "", [F, G])
    assert heard(name, f"<think>why</think>I look. {text}") == ParsedOutput("why", "I look.", [F, G])


@both
def test_what_the_model_forgets_to_close_ends_with_the_answer(name: str) -> None:
    form = FORMATS[name]
    text = form.opening + call(form, "f", '{"x": 1}')
    assert heard(name, text).calls == [F]
    assert heard(name, text.removesuffix(form.call_end)).calls == [F]
    assert heard(name, text.removesuffix(form.call_end) + form.closing).calls == [F]


@both
@pytest.mark.parametrize("arguments", ["[1]", '{"x": }', '{"x": 1', "x"])
def test_what_is_no_call_stays_text(name: str, arguments: str) -> None:
    form = FORMATS[name]
    text = form.opening + call(form, "f", arguments)
    assert heard(name, text) == ParsedOutput(None, text, [])


def test_older_deepseeks_write_the_type_and_fences() -> None:
    text = (
        f'{DEEPSEEK.opening}{DEEPSEEK.call}function{DEEPSEEK.separator}f\n```json\n{{"x": 1}}\n```{DEEPSEEK.call_end}'
    )
    assert heard("deepseek", text + DEEPSEEK.closing) == ParsedOutput(None, "", [F])


PARTS = st.sampled_from(
    [
        *(tag for form in FORMATS.values() for tag in form.tags),
        *(call(form, "f", '{"x": 1}') for form in FORMATS.values()),
        *("f", "functions.f:0", '{"x": 1}', "{", "```", "\n", " ", "<", "</think>"),
    ]
)


@given(st.lists(PARTS, max_size=12).map("".join), st.data(), st.sampled_from(sorted(FORMATS)))
def test_how_the_text_is_cut_changes_nothing(text: str, data: st.DataObject, name: str) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    at_once = heard(name, text)
    assert heard(name, *(text[a:b] for a, b in pairwise([0, *cuts, len(text)]))) == at_once
    assert heard(name, *text) == at_once
