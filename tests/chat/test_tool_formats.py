"""Formats by name: what each reads, and that its grammar lets through what it reads and nothing else."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from palestra.chat import ChatError, ChatTokenizer, ParsedCall
from palestra.chat.answer_formats import output_parser
from palestra.chat.output_pieces import ParsedOutput, put_together
from palestra.chat.tool_parsers import TOOL_FORMATS, CallFormat, ToolCallBlock, detect, register, tool_format
from palestra.chat.tool_parsers.hermes import HermesToolParser
from palestra.chat.tool_parsers.section_calls import DEEPSEEK, KIMI
from palestra.config.bundled import bundled_model
from palestra.server.core.errors import ApiError
from palestra.server.model_api.openai_chat.schemas import ChatRequest
from palestra.server.model_api.openai_chat.structured_output import refuse_unknown_format
from palestra.testing.random_tokenizer import write_tokenizer

EPHEBE = bundled_model("ephebe") or Path()
F = ParsedCall(name="f", arguments={"x": 1})
G = ParsedCall(name="g", arguments={})


def read(name: str, text: str) -> ParsedOutput:
    parser = output_parser(tool_format(name), TOOLS)
    return put_together([*parser.feed(text), *parser.finish()])


# Reading

LLAMA_F, LLAMA_G = '{"name": "f", "parameters": {"x": 1}}', '{"name": "g", "parameters": {}}'
LIST_F = '[{"name": "f", "arguments": {"x": 1}}]'


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (LLAMA_F, [F], ""),
        (f"\n{LLAMA_F}\n", [F], ""),
        (f"<|python_tag|>{LLAMA_F}", [F], ""),
        (f"Let me see. <|python_tag|> {LLAMA_F}", [F], "Let me see."),
        (f"{LLAMA_F}; {LLAMA_G}", [F, G], ""),
        (f"{LLAMA_F}\n{LLAMA_G};", [F, G], ""),
        (f"<think>hm</think>\n\n{LLAMA_F}", [F], ""),
        ('{"type": "function", "name": "f", "arguments": {"x": 1}}', [F], ""),
        ('{"name": "Bob", "age": 3}', [], '{"name": "Bob", "age": 3}'),
        ('{"answer": [1, "}"]} is it', [], '{"answer": [1, "}"]} is it'),
        ("{x} <|python_tag|>" + LLAMA_F, [F], "{x}"),
        (f"so: {LLAMA_F}", [], f"so: {LLAMA_F}"),
        (f"{LLAMA_F} is what I would call", [], f"{LLAMA_F} is what I would call"),
        (f'{LLAMA_F}; {{"a": 1}}', [], f'{LLAMA_F}; {{"a": 1}}'),
        (LLAMA_F[:-1], [], LLAMA_F[:-1]),
        ('<|python_tag|>search.call(query="x")', [], '<|python_tag|>search.call(query="x")'),
        ("{", [], "{"),
    ],
)
def test_llama_answers_with_calls_or_with_text(text: str, calls: list[ParsedCall], content: str) -> None:
    speech = read("llama3_json", text)
    assert (speech.calls, speech.content) == (calls, content)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (f"[TOOL_CALLS]{LIST_F}", [F], ""),
        (f"ok [TOOL_CALLS] {LIST_F}\n", [F], "ok"),
        (f'[TOOL_CALLS]{LIST_F[:-1]}, {{"name": "g", "arguments": {{}}, "id": "a1b2c3d4e"}}]', [F, G], ""),
        ('[TOOL_CALLS]f{"x": 1}', [F], ""),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{} done', [F, G], " done"),
        ('[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"x": 1}', [F], ""),
        ('[TOOL_CALLS]{"name": "f", "arguments": {"x": 1}}', [F], ""),
        ("[TOOL_CALLS]", [], "[TOOL_CALLS]"),
        ("[TOOL_CALLS] is a token", [], "[TOOL_CALLS] is a token"),
        ("[TOOL_CALLS] is a token [TOOL_CALLS]g{}", [G], "[TOOL_CALLS] is a token"),
        ("[TOOL_CALLS]f[1]", [], "[TOOL_CALLS]f[1]"),
        ('[TOOL_CALLS]["[TOOL_CALLS]g{}"]', [], '[TOOL_CALLS]["[TOOL_CALLS]g{}"]'),
        (f"[TOOL_CALLS]{LIST_F[:-1]}, 7]", [], f"[TOOL_CALLS]{LIST_F[:-1]}, 7]"),
        (f"[TOOL_CALLS]{'n' * 300}{{}}", [], f"[TOOL_CALLS]{'n' * 300}{{}}"),
    ],
)
def test_mistral_calls(text: str, calls: list[ParsedCall], content: str) -> None:
    speech = read("mistral", text)
    assert (speech.calls, speech.content) == (calls, content)


# Names


class Shout:
    """`CALL name!`, for tools without arguments."""

    name = "shout"
    markers = ("CALL ",)
    openings = ()
    tags = ("CALL ",)

    def __init__(self) -> None:
        self._text = ""

    def block(self, marker: str) -> Shout:
        return Shout()

    def feed(self, text: str) -> ToolCallBlock | None:
        self._text += text
        name, found, rest = self._text.partition("!")
        return ToolCallBlock(calls=[ParsedCall(name=name, arguments={})], rest=rest) if found else None

    def finish(self) -> ToolCallBlock:
        return ToolCallBlock(text=self._text)

    def grammar(self, tools: Any, *, parallel: bool, special: Any) -> str:
        return 'calls: "CALL " /[a-z]+/ "!"\n'


@pytest.fixture
def names() -> Iterator[dict[str, CallFormat]]:
    before = dict(TOOL_FORMATS)
    yield TOOL_FORMATS
    TOOL_FORMATS.clear()
    TOOL_FORMATS.update(before)


def test_one_of_your_own_can_be_registered(names: dict[str, CallFormat]) -> None:
    register(Shout())
    assert read("shout", "I will CALL home! now CALL nobody") == ParsedOutput(
        None, "I will  now CALL nobody", [ParsedCall(name="home", arguments={})]
    )


def test_one_of_your_own_can_be_named_by_its_module(
    names: dict[str, CallFormat], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shouting", sys.modules[__name__])
    assert tool_format("shouting:Shout").name == "shout"
    assert tool_format("shouting:Shout") is tool_format("shout")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hermess", "did you mean: hermes?"),
        ("zzz", "there are: deepseek, gemma4, glm, harmony, hermes, kimi, llama3_json, mistral, qwen_xml"),
        ("no_such_module:X", "No module named 'no_such_module'"),
        ("json:nothing", "no attribute 'nothing'"),
        ("json:loads", "is not a tool format: it has no name, markers"),
        (":", "cannot be imported"),
    ],
)
def test_a_wrong_name_says_what_to_do(name: str, reason: str) -> None:
    with pytest.raises(ChatError, match=reason):
        tool_format(name)


def test_a_format_in_which_nothing_begins_a_call_is_refused() -> None:
    silent = Shout()
    silent.markers = ()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ChatError, match="neither markers nor openings"):
        register(silent)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("return a json object within <tool_call></tool_call> tags", "hermes"),
        ("{{- '[TOOL_CALLS]' + calls | tojson }}", "mistral"),
        ("{{- '<|python_tag|>' + call.name }}", "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary of its arguments}.', "llama3_json"),
        (r"'Respond with {\"name\": function name, \"parameters\": its arguments}'", "llama3_json"),
        ("{{- '<|start|>assistant<|channel|>final<|message|>' }}", "harmony"),
        ("{{- '<tool_call>\n<function=' + call.name + '>' }}", "qwen_xml"),
        ("{{- '<tool_call>' + call.name + '<arg_key>' + key }}", "glm"),
        ("{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.name }}", "deepseek"),
        ("<|tool_calls_section_begin|>{{ call.id }}", "kimi"),
        ("{{ tool | tojson }}", "hermes"),
    ],
)
def test_a_template_shows_its_format(template: str, name: str) -> None:
    assert detect(template).name == name


def test_a_template_in_a_format_that_nobody_knows_says_what_was_looked_for() -> None:
    with pytest.raises(ChatError, match="format that is not known") as error:
        detect("{% for call in message.tool_calls %}{{ '<|call_begin|>' + call.function.name }}{% endfor %}")
    for shown in ("<function= (qwen_xml)", "<tool_call> (hermes)", "<|channel|> (harmony)", "models[].tool_format"):
        assert shown in str(error.value)


def test_a_server_refuses_tools_where_calls_could_not_be_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=512, max_positions=4096)
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}<|im_end|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = ChatTokenizer.load(tmp_path)
    request: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    refuse_unknown_format(ChatRequest.model_validate(request), tokenizer)
    refuse_unknown_format(ChatRequest.model_validate(request | {"tools": TOOLS, "tool_choice": "none"}), tokenizer)
    with pytest.raises(ApiError, match="tools: the chat template writes tool calls in a format that is not known"):
        refuse_unknown_format(ChatRequest.model_validate(request | {"tools": TOOLS}), tokenizer)


def test_the_bundled_model_calls_as_hermes_does() -> None:
    tokenizer = ChatTokenizer.load(EPHEBE)
    assert tokenizer.tool_format.name == "hermes"
    tags = {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert {*tokenizer.special_texts} & {*tokenizer.spoken_tags} == tags


# Grammars

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer", "maximum": 999},
                    "s": {"type": "string", "maxLength": 4},
                    "of": {"$ref": "#/$defs/Colour"},
                },
                "required": ["x"],
                "additionalProperties": False,
                "$defs": {"Colour": {"enum": ["red", 'dark "blue"']}},
            },
        },
    },
    {"type": "function", "function": {"name": "g"}},
]
ADDED = ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")


class Machine:
    """A tokenizer, which is read when it is first needed, and what it lets through."""

    def __init__(self, *added: str):
        self._added = added

    @cached_property
    def special(self) -> dict[str, int]:
        known = dict(ChatTokenizer.load(EPHEBE).special_texts)
        return known | {text: 2039 + len(known) + i for i, text in enumerate(self._added)}

    @cached_property
    def _file(self) -> str:
        library = json.loads((EPHEBE / "tokenizer.json").read_text())
        for text in self._added:
            added = {**library["added_tokens"][0], "id": self.special[text], "content": text}
            library["added_tokens"].append(added)
        return json.dumps(library)

    @cached_property
    def _library(self) -> Tokenizer:
        return Tokenizer.from_str(self._file)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(self._file, eos_token=self.special["<|im_end|>"])

    def matcher(self, tools: CallFormat, parallel: bool = False, given: Any = TOOLS) -> LLMatcher:
        matcher = LLMatcher(
            self._tokenizer, "start: calls\n" + tools.grammar(given, parallel=parallel, special=self.special)
        )
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def lets_through(self, text: str, matcher: LLMatcher) -> bool:
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        return (
            matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        )

    def wander(self, matcher: LLMatcher, luck: random.Random) -> str:
        """Whatever the grammar allows, but no longer than it must."""
        tokens: list[int] = []
        while not matcher.is_accepting():
            bias = matcher.compute_logit_bias()
            allowed = [token for token, weight in enumerate(bias) if weight]
            tokens.append(luck.choice(allowed))
            assert matcher.consume_token(tokens[-1])
        return self._library.decode(tokens, skip_special_tokens=False)


PLAIN, MARKED = Machine(), Machine(*ADDED)

WRITTEN = [
    ("hermes", PLAIN, '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "\n"),
    ("llama3_json", PLAIN, '{"name": "f", "parameters": {"x": 1}}', "; "),
    ("llama3_json", MARKED, '{"name": "f", "parameters": {"x": 1}}', "; "),
    ("mistral", MARKED, '[TOOL_CALLS]f[ARGS]{"x": 1}', ""),
]
SECTIONS = [
    (form.name, machine, form.opening + form.call, f'{name}{form.separator}{{"x": 1}}{form.call_end}{form.closing}')
    for form, name in ((DEEPSEEK, "f"), (KIMI, "functions.f:0"))
    for machine in (PLAIN, Machine(*form.tags))
]


@pytest.mark.parametrize(("name", "machine", "call", "between"), WRITTEN)
def test_a_grammar_lets_calls_through_as_they_are_read(name: str, machine: Machine, call: str, between: str) -> None:
    tools = tool_format(name)
    assert machine.lets_through(call, machine.matcher(tools))
    assert read(name, call) == ParsedOutput(None, "", [F])
    two = between.join([call, call.replace('"f"', '"g"').replace("]f[", "]g[").replace('"x": 1', "")])
    assert machine.lets_through(two, machine.matcher(tools, parallel=True))
    assert not machine.lets_through(two, machine.matcher(tools))
    assert read(name, two) == ParsedOutput(None, "", [F, G])


@pytest.mark.parametrize(("name", "machine", "opening", "call"), SECTIONS)
def test_grammar_of_a_section_lets_through_one_call_or_several(
    name: str, machine: Machine, opening: str, call: str
) -> None:
    form = tools = DEEPSEEK if name == "deepseek" else KIMI
    other = re.sub(r"\bf\b", "g", call).replace('"x": 1', "")
    two = opening + call.removesuffix(form.closing) + form.call + other
    assert machine.lets_through(opening + call, machine.matcher(tools))
    assert machine.lets_through(two, machine.matcher(tools, parallel=True))
    assert not machine.lets_through(two, machine.matcher(tools))
    assert read(name, two) == ParsedOutput(None, "", [F, G])
    for right, wrong in (('"x": 1', '"x": "1"'), ('"x": 1', '"x":    1'), (form.closing, "")):
        assert not machine.lets_through(opening + call.replace(right, wrong), machine.matcher(tools))


@pytest.mark.parametrize(("name", "machine", "call", "between"), WRITTEN)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('"x": 1', '"x": "1"'),
        ('"x": 1', '"x": 1, "y": 2'),
        ('"x": 1', '"x": 1000'),
        ('"x": 1', '"s": "a"'),
        ('"x": 1', '"x":    1'),
        ("f", "h"),
    ],
)
def test_a_grammar_refuses_wrong_arguments(
    name: str, machine: Machine, call: str, between: str, right: str, wrong: str
) -> None:
    assert not machine.lets_through(call.replace(right, wrong, 1), machine.matcher(tool_format(name)))


def test_mistrals_older_way_is_written_where_the_tokenizer_is_older() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'
    machine, tools = Machine("[TOOL_CALLS]"), tool_format("mistral")
    assert machine.lets_through(text, machine.matcher(tools, parallel=True))
    assert not machine.lets_through(text, machine.matcher(tools))
    assert read("mistral", text) == ParsedOutput(None, "", [F, G])


@pytest.mark.parametrize(("name", "machine"), [(name, machine) for name, machine, *_ in WRITTEN])
def test_whatever_a_grammar_lets_through_is_a_call(name: str, machine: Machine) -> None:
    @settings(max_examples=12, deadline=None)
    @given(st.randoms(use_true_random=False), st.booleans())
    def check(luck: random.Random, parallel: bool) -> None:
        text = machine.wander(machine.matcher(tool_format(name), parallel), luck)
        speech = read(name, text)
        assert [call.name in "fg" for call in speech.calls] == [True]
        assert speech.content == ""

    check()


@pytest.mark.parametrize(("name", "machine"), [(name, machine) for name, machine, *_ in SECTIONS])
def test_whatever_the_grammar_of_a_section_lets_through_is_a_call(name: str, machine: Machine) -> None:
    for seed in range(6):
        speech = read(name, machine.wander(machine.matcher(tool_format(name)), random.Random(seed)))
        assert [call.name in "fg" for call in speech.calls] == [True]
        assert speech.content == ""


@pytest.mark.parametrize("name", ['say "hi"', "naïve", "back\\slash", "a/*b*/ //c #d"])
def test_names_are_quoted(name: str) -> None:
    given = [{"type": "function", "function": {"name": name, "parameters": {}}}]
    text = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {{"any": [1]}}}}\n</tool_call>'
    assert PLAIN.lets_through(text, PLAIN.matcher(HermesToolParser(), given=given))
    assert read("hermes", text).calls == [ParsedCall(name=name, arguments={"any": [1]})]


def test_a_grammar_needs_a_tool() -> None:
    with pytest.raises(ChatError, match="at least one tool"):
        tool_format("hermes").grammar([], parallel=False, special={})
