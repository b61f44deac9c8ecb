"""Answers of gpt-oss: channels, calls, where a prompt ends, and what its grammar lets through."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.chat import ChatError, ChatTokenizer, ParsedCall
from palestra.chat.answer_formats import answer_start, output_parser
from palestra.chat.conversation_cache import ConversationCache, PromptRequest, SampledReply, SampleLocation
from palestra.chat.output_pieces import ContentPiece, ParsedOutput, ReasoningPiece, ToolCallPiece, put_together
from palestra.chat.tool_parsers import AnswerStart, tool_format
from palestra.chat.tool_parsers.harmony import HarmonyFormat
from palestra.model import load_tokenizer
from palestra.model.sampling.grammars import Grammars
from palestra.types import Grammar, GrammarKind

TokenizerOf = Callable[[str], ChatTokenizer]
HARMONY = HarmonyFormat()
CALL = ParsedCall(name="get", arguments={"city": "Rome"})
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
                "required": ["city"],
            },
        },
    }
]
THOUGHT = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
AFTER = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "Rome"}'
BEFORE = ' to=functions.get<|channel|>commentary json<|message|>{"city": "Rome"}'
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>18 °C"


def hear(*texts: str, calls: bool = True, start: AnswerStart = AnswerStart.FRESH) -> ParsedOutput:
    parser = output_parser(HARMONY, TOOLS if calls else None, start)
    return put_together([*(piece for text in texts for piece in parser.feed(text)), *parser.finish()])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (FINAL, ParsedOutput(None, "18 °C")),
        (THOUGHT + FINAL, ParsedOutput("why", "18 °C")),
        (THOUGHT + AFTER, ParsedOutput("why", "", [CALL])),
        (THOUGHT + BEFORE, ParsedOutput("why", "", [CALL])),
        (AFTER + "<|call|>", ParsedOutput(None, "", [CALL])),
        ('<|channel|>analysis to=functions.get code<|message|>{"city": "Rome"}', ParsedOutput(None, "", [CALL])),
        (BEFORE.replace("json", "<|constrain|>json"), ParsedOutput(None, "", [CALL])),
        (BEFORE.replace(": ", ":"), ParsedOutput(None, "", [CALL])),
        (THOUGHT + THOUGHT + FINAL, ParsedOutput("why\nwhy", "18 °C")),
        (PREAMBLE + AFTER, ParsedOutput(None, "I look.", [CALL])),
        ("<|channel|>commentary<|message|>A<|end|><|start|>assistant" + FINAL, ParsedOutput(None, "A\n18 °C")),
        ("<|channel|>analysis<|message|>" + FINAL, ParsedOutput("", "18 °C")),
        ("<|channel|>analysis<|message|><|end|><|start|>assistant" + FINAL, ParsedOutput("", "18 °C")),
        ("<|channel|>analysis<|message|>cut o", ParsedOutput("cut o", "")),
        ("<|channel|>analysis", ParsedOutput(None, "")),
        ("", ParsedOutput(None, "")),
        ("no header", ParsedOutput(None, "no header")),
        ("a", ParsedOutput(None, "a")),
        ("assistant", ParsedOutput(None, "assistant")),
        (AFTER[:-1], ParsedOutput(None, AFTER[:-1])),
        (AFTER + " and more", ParsedOutput(None, AFTER + " and more")),
        (' to=functions.get<|channel|>commentary json<|message|>["x"]<|end|>' + "<|start|>assistant" + FINAL,
         ParsedOutput(None, 'to=functions.get<|channel|>commentary json<|message|>["x"]\n18 °C')),
        ("<|channel|>final <|constrain|>json<|message|>{}", ParsedOutput(None, "{}")),
        (f"<|channel|>{'n' * 600}<|message|>x", ParsedOutput(None, f"<|channel|>{'n' * 600}<|message|>x")),
    ],
)  # fmt: skip
def test_channels_are_told_apart(text: str, wanted: ParsedOutput) -> None:
    assert hear(text) == wanted


def test_calls_are_text_where_nobody_offered_tools() -> None:
    assert hear(THOUGHT + AFTER, calls=False) == ParsedOutput("why", AFTER)


def test_an_answer_may_have_been_begun() -> None:
    assert hear(" so<|end|><|start|>assistant" + FINAL, start=AnswerStart.IN_THOUGHT) == ParsedOutput(" so", "18 °C")
    assert hear(" °C<|return|>", start=AnswerStart.IN_TEXT) == ParsedOutput(None, " °C")


def test_what_is_certain_is_told_at_once() -> None:
    parser = output_parser(HARMONY, TOOLS)
    assert parser.feed("<|channel|>analysis<|mess") == []
    assert parser.feed("age|>so, <|e") == [ReasoningPiece("so, ")]
    assert parser.feed("nd|><|start|>assistant<|channel|>final<|message|>I <b") == [ContentPiece("I <b")]
    assert parser.feed("<|end|><|start|>assistant" + BEFORE) == []
    assert parser.feed("<|call|>") == [ToolCallPiece(CALL)]
    assert parser.finish() == []


PARTS = st.sampled_from(
    [
        *HARMONY.tags,
        "assistant",
        "analysis",
        "final",
        "commentary",
        " to=functions.get",
        " ",
        "{}",
        "x",
        "<",
        "<|",
        AFTER,
    ]
)


@given(st.lists(PARTS, max_size=14).map("".join), st.data(), st.booleans(), st.sampled_from(AnswerStart))
def test_how_the_text_is_cut_changes_nothing(text: str, data: st.DataObject, calls: bool, start: AnswerStart) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    at_once = hear(text, calls=calls, start=start)
    assert hear(*(text[a:b] for a, b in pairwise([0, *cuts, len(text)])), calls=calls, start=start) == at_once
    assert hear(*text, calls=calls, start=start) == at_once


# Prompts

USER: dict[str, Any] = {"role": "user", "content": "Weather?"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "why",
    "tool_calls": [{"id": "c", "function": {"name": "get", "arguments": {"city": "Rome"}}}],
}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c", "content": "18"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "18 °C", "reasoning_content": "so"}


def test_the_template_shows_its_format_and_its_ends(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("harmony")
    assert tokenizer.tool_format.name == "harmony"
    assert {tokenizer.token_name(token) for token in tokenizer.stop_ids} == {"<|return|>", "<|call|>", "<|endoftext|>"}
    assert tokenizer.token_name(tokenizer.turn_end) == "<|return|>"


def test_thinking_is_given_under_the_name_that_the_template_has_for_it(tokenizer_of: TokenizerOf) -> None:
    text = tokenizer_of("harmony").render([USER, CALLED, RESULT], TOOLS)
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>why<|end|>"
        '<|start|>assistant to=functions.get<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
        "<|start|>functions.get to=assistant<|channel|>commentary<|message|>18<|end|><|start|>assistant"
    )
    assert 'type get = (_: {\ncity: "Rome" | "Paris",\n}) => any;' in text


def test_text_beside_thinking_and_a_call_is_no_reason_to_refuse(tokenizer_of: TokenizerOf) -> None:
    text = tokenizer_of("harmony").render([USER, {**CALLED, "content": "I look."}, RESULT], TOOLS)
    assert "<|channel|>analysis<|message|>why\nI look.<|end|>" in text


@pytest.mark.parametrize(
    ("messages", "continues", "start"),
    [
        ([USER], False, AnswerStart.FRESH),
        ([USER, CALLED, RESULT], False, AnswerStart.FRESH),
        ([USER, {"role": "assistant", "content": "18 and a word more <b>"}], True, AnswerStart.IN_TEXT),
    ],
)
def test_the_end_of_a_prompt_tells_where_the_answer_goes_on(
    tokenizer_of: TokenizerOf, messages: list[Any], continues: bool, start: AnswerStart
) -> None:
    tokenizer = tokenizer_of("harmony")
    ids = tokenizer.encode_chat(messages, TOOLS, not continues, continues)
    begun = len(tokenizer.encode_text(messages[-1]["content"])) if continues else 0
    assert answer_start(tokenizer, ids, begun) is start
    assert HARMONY.start("<|start|>assistant<|channel|>analysis<|message|>hm") is AnswerStart.IN_THOUGHT


def test_what_was_sampled_stays_where_the_template_writes_another_end(tokenizer_of: TokenizerOf) -> None:
    """`<|return|>` ends an answer, and the template makes it `<|end|>` once something follows: that is a drift."""
    tokenizer = tokenizer_of("harmony")
    held = ConversationCache(max_conversations=9, max_tokens=10**6, max_age_s=1e9)
    names = {tokenizer.token_name(token): token for token in tokenizer.special_ids()}

    def sampled(*parts: str) -> list[int]:
        return [token for part in parts for token in ([names[part]] if part in names else tokenizer.encode_text(part))]

    first = held.prompt(tokenizer, PromptRequest(("o",), [USER], TOOLS))
    call = sampled(" to=functions.get", "<|channel|>", "commentary json", "<|message|>", '{"city": "Rome"}', "<|call|>")
    plain = {key: value for key, value in CALLED.items() if key != "reasoning_content"}
    held.keep(first, [SampledReply(plain, call, SampleLocation("t", 0, 0))])
    history = [USER, plain, RESULT]
    second = held.prompt(tokenizer, PromptRequest(("o",), history, TOOLS))
    assert second.ids == tokenizer.encode_chat(history, TOOLS)
    assert not second.drift
    answer = sampled("<|channel|>", "final", "<|message|>", "18", "<|return|>")
    held.keep(second, [SampledReply({"role": "assistant", "content": "18"}, answer, SampleLocation("t", 1, 0))])
    history += [{"role": "assistant", "content": "18"}, USER]
    third = held.prompt(tokenizer, PromptRequest(("o",), history, TOOLS))
    assert third.ids[: len(second.ids) + len(answer)] == [*second.ids, *answer]
    assert third.drift
    rendered = tokenizer.encode_chat(history, TOOLS)
    assert [names["<|end|>"] if token == names["<|return|>"] else token for token in third.ids] == rendered


def test_an_answer_that_its_length_ended_gets_the_end_that_the_template_writes(tokenizer_of: TokenizerOf) -> None:
    tokenizer = tokenizer_of("harmony")
    following = tokenizer.following({"role": "assistant", "content": "cut"}, [USER])
    assert tokenizer.token_name(following.end) == "<|end|>"
    assert tokenizer.decode(following.tokens, skip_special=False).startswith("<|start|>user<|message|>")


# Grammars

RULES = "calls", "@answer", "text_or_calls", "(calls | @answer)"


@pytest.fixture(scope="module")
def accepts(style_folder: Callable[[str], Any]) -> Callable[..., bool]:
    folder = style_folder("harmony")
    tokenizer, library = ChatTokenizer.load(folder), load_tokenizer(folder)
    grammars = Grammars(library, library.get_vocab_size())

    def check(top: str, text: str, start: AnswerStart = AnswerStart.FRESH) -> bool:
        special = tokenizer.special_texts
        whole = HARMONY.layout(top, start=start, special=special)
        if "calls" in top:
            whole += HARMONY.grammar(TOOLS, parallel=True, special=special)
        given = Grammar(kind=GrammarKind.LARK, text=whole)
        if "@answer" in top:
            given = Grammar(kind=GrammarKind.REGEX, text="yes|no", around=whole)
        mask = grammars.compile(given).result().begin(tokenizer.stop_ids)
        tokens = library.encode(text, add_special_tokens=False).ids
        return all(mask.allowed(tokens[:at])[token] for at, token in enumerate(tokens)) and bool(
            mask.allowed(tokens)[tokenizer.turn_end]
        )

    return check


YES = "<|channel|>final<|message|>yes"


@pytest.mark.parametrize(
    ("text", "allowed_by"),
    [
        (AFTER, {"calls", "text_or_calls", "(calls | @answer)"}),
        (THOUGHT + BEFORE, {"calls", "text_or_calls", "(calls | @answer)"}),
        (BEFORE.replace("json", "<|constrain|>json"), {"calls", "text_or_calls", "(calls | @answer)"}),
        (PREAMBLE + AFTER, {"text_or_calls"}),
        (FINAL, {"text_or_calls"}),
        (THOUGHT + FINAL, {"text_or_calls"}),
        (THOUGHT + YES, {"@answer", "text_or_calls", "(calls | @answer)"}),
        (AFTER.replace("Rome", "Oslo"), set()),
        (AFTER.replace(".get", ".put"), set()),
        (THOUGHT, set()),
        ("yes", set()),
    ],
)
@pytest.mark.parametrize("top", RULES)
def test_a_grammar_lets_through_what_was_asked_for(
    accepts: Callable[..., bool], top: str, text: str, allowed_by: set[str]
) -> None:
    assert accepts(top, text) == (top in allowed_by)


@pytest.mark.parametrize(
    ("top", "text", "start"),
    [
        ("calls", f"so<|end|><|start|>assistant{AFTER}", AnswerStart.IN_THOUGHT),
        ("calls", f"so<|end|><|start|>assistant{AFTER}", AnswerStart.IN_TEXT),
        ("@answer", f"so<|end|><|start|>assistant{YES}", AnswerStart.IN_THOUGHT),
        ("@answer", "yes", AnswerStart.IN_TEXT),
        ("text_or_calls", "so", AnswerStart.IN_TEXT),
    ],
)
def test_a_grammar_goes_on_where_the_prompt_ends(
    accepts: Callable[..., bool], top: str, text: str, start: AnswerStart
) -> None:
    assert accepts(top, text, start)


def test_a_grammar_needs_the_tokens() -> None:
    with pytest.raises(ChatError, match="no token of this model's tokenizer"):
        tool_format("harmony").grammar(TOOLS, parallel=False, special={})
