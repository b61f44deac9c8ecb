"""What is held: by whom, for how long, how it is found again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from palestra.chat import ChatTokenizer
from palestra.chat.canonical import chain
from palestra.chat.conversations import Ask, Conversations, Match, Place, Prompt, Reply

TokenizerOf = Callable[[str], ChatTokenizer]
SCOPE = ("owner", "key", "model")
USER = {"role": "user", "content": "Hi"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Held:
    """Conversations of one tokenizer, with answers that are made up token by token."""

    def __init__(self, tokenizer: ChatTokenizer, **limits: Any):
        self.clock = Clock()
        given: dict[str, Any] = {"max_conversations": 100, "max_tokens": 10_000, "max_age_s": 100.0} | limits
        self.all = Conversations(clock=self.clock, **given)
        self.tokenizer = tokenizer
        self.traces = 0

    def prompt(self, *messages: dict[str, Any], **options: Any) -> Prompt:
        return self.all.prompt(self.tokenizer, Ask(**{"scope": SCOPE, "messages": messages} | options))

    def says(self, prompt: Prompt, text: str, *, ended: bool = True, **fields: Any) -> dict[str, Any]:
        """One token for each character: never as an encoder would have it."""
        self.traces += prompt.parent is None
        trace = f"t{self.traces}" if prompt.parent is None else prompt.parent.place.trace_id
        message = {"role": "assistant", "content": text, **fields}
        tokens = [t for character in text for t in self.tokenizer.encode_text(character)]
        tokens += [self.tokenizer.turn_end] if ended else []
        self.all.keep(prompt, [Reply(message, tokens, Place(trace, 0, 0))])
        return message


@pytest.fixture
def held(tokenizer_of: TokenizerOf) -> Held:
    return Held(tokenizer_of("chatml"))


def tokens_of(prompt: Prompt) -> list[int]:
    assert prompt.parent is not None
    return prompt.parent.ids()


@pytest.mark.parametrize("style", ["chatml", "thinking", "headers", "brackets"])
def test_a_conversation_goes_on_from_the_ids_that_were_sampled(style: str, tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of(style))
    first = held.prompt(USER)
    assert (first.match, first.ids) == (Match.NEW, held.tokenizer.encode_chat([USER]))
    answer = held.says(first, "hello there")
    second = held.prompt(USER, answer, {"role": "user", "content": "And?"})
    assert second.match is Match.CONTINUED
    assert second.ids == tokens_of(second) + held.tokenizer.observation([{"role": "user", "content": "And?"}])
    assert second.ids != held.tokenizer.encode_chat([USER, answer, {"role": "user", "content": "And?"}])


def test_a_turn_that_nobody_ended_is_ended_by_us(held: Held) -> None:
    answer = held.says(held.prompt(USER), "cut o", ended=False)
    prompt = held.prompt(USER, answer, USER)
    assert prompt.read == [held.tokenizer.turn_end, *held.tokenizer.observation([USER])]


def test_a_changed_history_branches_at_the_longest_match(held: Held) -> None:
    one = held.says(held.prompt(USER), "one")
    two = held.says(held.prompt(USER, one, USER), "two")
    edited = {**two, "content": "another"}
    prompt = held.prompt(USER, one, USER, edited, USER)
    assert prompt.match is Match.BRANCHED
    assert prompt.read == held.tokenizer.observation([USER, edited, USER])
    assert prompt.parent is not None
    assert prompt.parent.place.trace_id == "t1"
    held.says(prompt, "three")
    again = held.prompt(USER, one, USER, two, USER)  # the other branch is as it was
    assert again.match is Match.CONTINUED


@pytest.mark.parametrize(
    "changed",
    [
        {"scope": ("other", "key", "model")},
        {"scope": ("owner", "other", "model")},
        {"scope": ("owner", "key", "other")},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"template_kwargs": {"enable_thinking": False}},
        {"messages": [{"role": "user", "content": "Hi "}, {"role": "assistant", "content": "one"}, USER]},
    ],
)
def test_other_owners_tools_and_words_do_not_match(held: Held, changed: dict[str, Any]) -> None:
    answer = held.says(held.prompt(USER), "one")
    assert held.prompt(USER, answer, USER).match is Match.CONTINUED
    assert held.prompt(USER, answer, USER, **changed).match is Match.UNMATCHED


def test_of_equal_answers_the_newest_wins_and_it_is_told(held: Held) -> None:
    for ended in (True, False):
        answer = held.says(held.prompt(USER), "same", ended=ended)
    prompt = held.prompt(USER, answer, USER)
    assert prompt.candidates == 2
    assert prompt.parent is not None
    assert prompt.parent.place.trace_id == "t2"


def test_reasoning_may_be_left_out_but_not_changed(held: Held) -> None:
    answer = held.says(held.prompt(USER), "yes", reasoning_content="because")
    without = {"role": "assistant", "content": " yes\n"}
    for echoed in (answer, without, {**without, "content": "<think>\nbecause\n</think>\n\nyes"}):
        assert held.prompt(USER, echoed, USER).match is Match.CONTINUED
    for changed in ({**answer, "reasoning_content": "no"}, {**without, "content": "<think>no</think>yes"}):
        assert held.prompt(USER, changed, USER).match is Match.UNMATCHED


def test_reasoning_tells_equal_answers_apart(held: Held) -> None:
    answers = [held.says(held.prompt(USER), "yes", reasoning_content=thought) for thought in ("a", "b")]
    for number, answer in enumerate(answers, 1):
        prompt = held.prompt(USER, answer, USER)
        assert prompt.candidates == 1
        assert prompt.parent is not None
        assert prompt.parent.place.trace_id == f"t{number}"


def call(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def test_arguments_are_compared_by_what_they_mean() -> None:
    value = {"b": [1.0, {"c": None}], "a": "é"}
    same = [value, json.dumps(value), json.dumps(value, indent=2, sort_keys=True), '{"a":"\\u00e9","b":[1,{"c":null}]}']
    assert len({chain(None, [call(arguments)])[-1] for arguments in same}) == 1
    other = [{"a": "é"}, '{"a": "e"}', "{broken", "", None, {"a": 1}, {"a": True}, {"a": "1"}]
    assert len({chain(None, [call(arguments)])[-1] for arguments in [value, *other]}) == len(other)  # "" is None is {}


def test_the_least_recently_used_is_let_go(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("chatml"), max_conversations=2)
    users = [{"role": "user", "content": str(i)} for i in range(3)]
    answers = [held.says(held.prompt(users[i]), "x") for i in range(2)]
    assert held.prompt(users[0], answers[0], USER).match is Match.CONTINUED  # used again
    answers.append(held.says(held.prompt(users[2]), "x"))
    found = [held.prompt(u, a, USER).match for u, a in zip(users, answers, strict=True)]
    assert found == [Match.CONTINUED, Match.UNMATCHED, Match.CONTINUED]
    assert len(held.all) == 2


def test_age_and_tokens_are_bounded(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("chatml"), max_tokens=200)
    answer = held.says(held.prompt(USER), "x")
    held.clock.now = 101.0
    assert held.prompt(USER, answer, USER).match is Match.UNMATCHED
    assert (len(held.all), held.all.tokens) == (0, 0)
    for _ in range(20):
        held.says(held.prompt(USER), "y" * 30)
        assert held.all.tokens <= 200
    assert 0 < len(held.all) < 20


def test_a_turn_whose_parent_was_let_go_meanwhile_stands_alone(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("chatml"), max_conversations=1)
    answer = held.says(held.prompt(USER), "x")
    prompt = held.prompt(USER, answer, USER)
    held.says(held.prompt({"role": "user", "content": "other"}), "x")
    again = held.says(prompt, "z")
    found = held.prompt(USER, answer, USER, again, USER)
    assert found.match is Match.CONTINUED
    assert tokens_of(found)[: len(prompt.ids)] == prompt.ids
