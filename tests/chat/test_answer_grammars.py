"""What grammars of whole answers let through is what the reader of answers makes of it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from palestra.chat import ChatTokenizer
from palestra.chat.answer_grammars import text_or_calls, thinking
from palestra.chat.output_parser import ParsedOutput, ReasoningParser, put_together
from palestra.chat.tool_parsers import TOOL_FORMATS, AnswerFormat, ToolParser, for_tools
from palestra.chat.tool_parsers.section_calls import DEEPSEEK, KIMI, SectionFormat
from palestra.model import load_tokenizer
from palestra.model.sampling.grammars import Grammars
from palestra.testing.random_tokenizer import write_tokenizer
from palestra.types import Grammar, GrammarKind

SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": ["</tool_call>", "<think>", "z"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "fg")]
VOCABULARY = 512
LONGEST = 150


@dataclass
class Follower:
    """Draws by a grammar, without a model."""

    tokenizer: ChatTokenizer
    grammars: Grammars

    def accepts(self, grammar: str, text: str) -> bool:
        mask = self.grammars.compile(Grammar(kind=GrammarKind.LARK, text=grammar)).result().begin(())
        tokens = self.encode(text)
        for at, token in enumerate(tokens):
            if not mask.allowed(tokens[:at])[token]:
                return False
        return self._is_complete(grammar, tokens)

    def draw(self, grammar: str, seed: int, likely: tuple[str, ...]) -> str | None:
        """Any token that is allowed, and at times all of a likely text. None: it did not come to an end."""
        mask = self.grammars.compile(Grammar(kind=GrammarKind.LARK, text=grammar)).result().begin((self.end,))
        rng, tokens, writing = random.Random(seed), list[int](), list[int]()
        goals = [[self.end], *map(self.encode, likely)]
        while len(tokens) < LONGEST:
            if not writing and rng.random() < 0.3:
                writing = list(rng.choice(goals))
            allowed = mask.allowed(tokens)
            if writing and not allowed[writing[0]]:
                writing = []
            tokens.append(writing.pop(0) if writing else rng.choice(allowed.nonzero().flatten().tolist()))
            if tokens[-1] == self.end:
                return self.tokenizer.decode(tokens[:-1], skip_special=False)
        return None

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode_text(text)

    @property
    def end(self) -> int:
        return self.tokenizer.turn_end

    def _is_complete(self, grammar: str, tokens: list[int]) -> bool:
        mask = self.grammars.compile(Grammar(kind=GrammarKind.LARK, text=grammar)).result().begin((self.end,))
        return bool(mask.allowed(tokens)[self.end])


@pytest.fixture(scope="module", params=["tags are tokens", "tags are text"])
def follower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Follower:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, vocab_size=VOCABULARY, max_positions=4096)
    if request.param == "tags are text":
        spec = json.loads((folder / "tokenizer.json").read_text())
        spec["added_tokens"] = [token for token in spec["added_tokens"] if token["special"]]
        (folder / "tokenizer.json").write_text(json.dumps(spec))
    return Follower(ChatTokenizer.load(folder), Grammars(load_tokenizer(folder), VOCABULARY))


TAGGED = {name: tools for name, tools in TOOL_FORMATS.items() if not isinstance(tools, AnswerFormat)}
"""Formats with think tags: the others bring grammars of whole answers along."""


@pytest.fixture(params=sorted(TAGGED))
def tools(request: pytest.FixtureRequest) -> ToolParser:
    return TAGGED[request.param]


def free(follower: Follower, tools: ToolParser, *, parallel: bool = True) -> str:
    tokenizer = follower.tokenizer
    calls = tools.grammar(TOOLS, parallel=parallel, special=tokenizer.special_texts)
    around = text_or_calls(tokenizer, tools) + thinking(tokenizer, is_open=False)
    return f"start: thinking text_or_calls\n{around}{calls}"


def call(tools: ToolParser, arguments: dict[str, Any], name: str = "f") -> str:
    written = json.dumps(arguments)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    tagged = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
    return {
        "glm": f"<tool_call>{name}\n{pairs}</tool_call>",
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>',
        "llama3_json": f'{{"name": "{name}", "parameters": {written}}}',
        "qwen_xml": f"<tool_call>\n<function={name}>\n{tagged}</function>\n</tool_call>",
        "deepseek": f"{DEEPSEEK.opening}{DEEPSEEK.call}{name}{DEEPSEEK.separator}{written}{DEEPSEEK.call_end}"
        f"{DEEPSEEK.closing}",
        "kimi": f"{KIMI.opening}{KIMI.call}functions.{name}:0{KIMI.separator}{written}{KIMI.call_end}{KIMI.closing}",
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {written}}}]',
    }[tools.name]


def heard(text: str, tools: ToolParser) -> ParsedOutput:
    parser = ReasoningParser(for_tools(tools, TOOLS))
    return put_together([*parser.feed(text), *parser.finish()])


def test_text_is_free_and_calls_are_not(follower: Follower, tools: ToolParser) -> None:
    grammar = free(follower, tools)
    good, bad = call(tools, {"x": -1, "y": "z"}), call(tools, {"x": "one", "y": "z"})
    for text in ("", "Hello, 1 < 2 [a] <b>you</b>\n\n", good, f"<think>hm <b> {bad}</think>\n\n{good}", "<tool_calls"):
        assert follower.accepts(grammar, text), text
    for text in (
        bad,
        f"<think>hm</think>{bad}",
        "a<think>b</think>",
        "a</think>",
        call(tools, {"x": 1, "y": "z"}, "g"),
    ):
        assert not follower.accepts(grammar, text), text


def test_text_may_come_before_calls_that_have_a_marker(follower: Follower, tools: ToolParser) -> None:
    text = "Well.\n" + call(tools, {"x": 1, "y": "z"})
    assert follower.accepts(free(follower, tools), text)
    assert bool(heard(text, tools).calls) == (not tools.openings), "or it is text"


def test_one_call_is_not_followed_by_another(follower: Follower, tools: ToolParser) -> None:
    one = call(tools, {"x": 1, "y": "z"})
    between = {"llama3_json": "; ", "mistral": ""}.get(tools.name, "\n")
    two = one + between + one if tools.name != "mistral" else one[:-1] + ", " + one.removeprefix("[TOOL_CALLS][")
    if isinstance(tools, SectionFormat):  # a section has all of them
        two = one.removesuffix(tools.closing) + one.removeprefix(tools.opening)
    assert follower.accepts(free(follower, tools), two)
    assert not follower.accepts(free(follower, tools, parallel=False), two)
    assert follower.accepts(free(follower, tools, parallel=False), one)


def test_thoughts_that_the_prompt_has_opened_end_before_the_answer(follower: Follower) -> None:
    grammar = f'start: thinking "yes"\n{thinking(follower.tokenizer, is_open=True)}'
    assert follower.accepts(grammar, "so </thin <think> yes</think>\n\nyes")
    assert follower.accepts(grammar, "</think>yes")
    assert not follower.accepts(grammar, "yes")
    assert not follower.accepts(grammar, "<think>no</think>no")


@pytest.mark.parametrize("parallel", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_whatever_is_drawn_is_read_as_it_was_meant(follower: Follower, tools: ToolParser, parallel: bool) -> None:
    grammar = free(follower, tools, parallel=parallel)
    likely = (*tools.markers, *tools.openings, "<think>", "</think>", "<", "[", "<function_call>")
    drawn = [text for seed in range(15) if (text := follower.draw(grammar, seed, likely)) is not None]
    all_heard = [heard(text, tools) for text in drawn]
    called = [speech for speech in all_heard if speech.calls]
    assert called, "some of them are calls"
    for speech in called:
        _check(speech, parallel)
    for speech in all_heard:
        assert speech.calls or not any(marker in speech.content for marker in tools.markers)


def _check(speech: ParsedOutput, parallel: bool) -> None:
    assert parallel or len(speech.calls) == 1
    for made in speech.calls:
        assert made.name in ("f", "fg")
        jsonschema.validate(made.arguments, SCHEMA)
