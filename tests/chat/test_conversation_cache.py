"""What is held: by whom, for how long, how it is found again, where it was kept when it was let go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.canonical import chain
from palestra.chat.conversation_cache import (
    ConversationCache,
    HistoryMatch,
    HistoryMode,
    Prompt,
    PromptRequest,
    SampledReply,
    SampleLocation,
    StoredTurn,
    TokenPrefix,
)

TokenizerOf = Callable[[str], ChatTokenizer]
SCOPE = ("owner", "key", "model")
USER = {"role": "user", "content": "Hi"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Held:
    """Conversations of one tokenizer, with answers that are made up token by token, and a shelf of all turns."""

    def __init__(self, tokenizer: ChatTokenizer, **limits: Any):
        self.clock = Clock()
        given: dict[str, Any] = {"max_conversations": 100, "max_tokens": 10_000, "max_age_s": 100.0} | limits
        self.all = ConversationCache(clock=self.clock, **given)
        self.tokenizer = tokenizer
        self.traces = 0
        self.shelf: list[StoredTurn] = []
        self.looked_for: list[bytes] = []

    def prompt(self, *messages: dict[str, Any], recalls: bool = False, **options: Any) -> Prompt:
        ask = PromptRequest(**{"scope": SCOPE, "messages": messages} | options)
        return self.all.prompt(self.tokenizer, ask, self.recall if recalls else None)

    def recall(self, names: Sequence[bytes]) -> Iterator[tuple[bytes, list[StoredTurn]]]:
        self.looked_for = list(names)
        for name in names:
            for one in reversed([turn for turn in self.shelf if turn.name == name]):
                yield name, [turn for turn in self.shelf if turn.place.trace_id == one.place.trace_id]

    def says(self, prompt: Prompt, text: str, *, ended: bool = True, **fields: Any) -> dict[str, Any]:
        """One token for each character: never as an encoder would have it."""
        tokens = [t for character in text for t in self.tokenizer.encode_text(character)]
        message = {"role": "assistant", "content": text, **fields}
        self.samples(prompt, message, [*tokens, *([self.tokenizer.turn_end] if ended else ())], by_length=not ended)
        return message

    def samples(self, prompt: Prompt, message: dict[str, Any], tokens: list[int], *, by_length: bool = False) -> None:
        self.traces += prompt.parent is None
        trace = f"t{self.traces}" if prompt.parent is None else prompt.parent.place.trace_id
        place, parent = (
            SampleLocation(trace, len(self.shelf), 0),
            None if prompt.parent is None else prompt.parent.place,
        )
        answer = prompt.answered(message)
        self.all.keep(prompt, [SampledReply(message, tokens, place, by_length)])
        self.shelf.append(
            StoredTurn(
                place, parent, prompt.read, tokens, answer.name, answer.thoughts, prompt.begun, prompt.drift, by_length
            )
        )


@pytest.fixture
def held(tokenizer_of: TokenizerOf) -> Held:
    return Held(tokenizer_of("chatml"))


def tokens_of(prompt: Prompt) -> list[int]:
    assert prompt.parent is not None
    return prompt.parent.ids()


STYLE_NAMES = ["chatml", "thinking", "headers", "brackets", "turns", "bars"]


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_a_conversation_goes_on_from_the_ids_that_were_sampled(style: str, tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of(style))
    first = held.prompt(USER)
    assert (first.match, first.ids) == (HistoryMatch.NEW, held.tokenizer.encode_chat([USER]))
    answer = held.says(first, "hello there")
    second = held.prompt(USER, answer, {"role": "user", "content": "And?"})
    assert second.match is HistoryMatch.CONTINUED
    assert second.ids == tokens_of(second) + held.tokenizer.observation([{"role": "user", "content": "And?"}])
    assert second.ids != held.tokenizer.encode_chat([USER, answer, {"role": "user", "content": "And?"}])
    assert (list(first.messages), list(second.messages)) == ([USER], [{"role": "user", "content": "And?"}])


def test_a_turn_that_nobody_ended_is_ended_by_us(held: Held) -> None:
    answer = held.says(held.prompt(USER), "cut o", ended=False)
    prompt = held.prompt(USER, answer, USER)
    assert prompt.read == [held.tokenizer.turn_end, *held.tokenizer.observation([USER])]


def test_a_changed_history_branches_at_the_longest_match(held: Held) -> None:
    one = held.says(held.prompt(USER), "one")
    two = held.says(held.prompt(USER, one, USER), "two")
    edited = {**two, "content": "another"}
    prompt = held.prompt(USER, one, USER, edited, USER)
    assert prompt.match is HistoryMatch.BRANCHED
    assert prompt.read == held.tokenizer.observation([USER, edited, USER])
    assert list(prompt.messages) == [USER, edited, USER]
    assert prompt.parent is not None
    assert prompt.parent.place.trace_id == "t1"
    held.says(prompt, "three")
    again = held.prompt(USER, one, USER, two, USER)  # the other branch is as it was
    assert again.match is HistoryMatch.CONTINUED


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
    assert held.prompt(USER, answer, USER).match is HistoryMatch.CONTINUED
    assert held.prompt(USER, answer, USER, **changed).match is HistoryMatch.UNMATCHED


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
        assert held.prompt(USER, echoed, USER).match is HistoryMatch.CONTINUED
    for changed in ({**answer, "reasoning_content": "no"}, {**without, "content": "<think>no</think>yes"}):
        assert held.prompt(USER, changed, USER).match is HistoryMatch.UNMATCHED


@pytest.mark.parametrize(
    ("told", "changed"),
    [
        ("abc</think>xyz", ["CHANGED</think>xyz", "xyz", "<think>abc</think>xyz"]),
        ("Hi <think>p</think> there", ["Hi <think>CHANGED</think> there", "Hi  there"]),
        ("<tool_call>oops</tool_call><think>b</think>", ["<tool_call>oops</tool_call>"]),
        ("xyz", ["abc</think>xyz"]),
    ],
)
def test_think_tags_that_were_told_as_text_are_text(held: Held, told: str, changed: list[str]) -> None:
    answer = held.says(held.prompt(USER), told)
    assert held.prompt(USER, answer, USER).match is HistoryMatch.CONTINUED
    for content in changed:
        assert held.prompt(USER, {**answer, "content": content}, USER).match is HistoryMatch.UNMATCHED


def test_reasoning_may_be_told_in_several_blocks(held: Held) -> None:
    answer = held.says(held.prompt(USER), "yes", reasoning_content="a\nb")
    for content in ("<think>a</think> <think>b</think>yes", "<think>\na\nb\n</think>\n\nyes"):
        assert held.prompt(USER, {"role": "assistant", "content": content}, USER).match is HistoryMatch.CONTINUED
    other = {**answer, "reasoning_content": None, "content": "<think>a</think><think>c</think>yes"}
    assert held.prompt(USER, other, USER).match is HistoryMatch.UNMATCHED


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
    assert held.prompt(users[0], answers[0], USER).match is HistoryMatch.CONTINUED  # used again
    answers.append(held.says(held.prompt(users[2]), "x"))
    found = [held.prompt(u, a, USER).match for u, a in zip(users, answers, strict=True)]
    assert found == [HistoryMatch.CONTINUED, HistoryMatch.UNMATCHED, HistoryMatch.CONTINUED]
    assert len(held.all) == 2


def test_age_and_tokens_are_bounded(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("chatml"), max_tokens=200)
    answer = held.says(held.prompt(USER), "x")
    held.clock.now = 101.0
    assert held.prompt(USER, answer, USER).match is HistoryMatch.UNMATCHED
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
    assert found.match is HistoryMatch.CONTINUED
    assert tokens_of(found)[: len(prompt.ids)] == prompt.ids


# Whose they are


def test_an_owner_with_much_loses_its_own(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("chatml"), max_conversations=4)
    quiet = held.says(held.prompt(USER, scope=("quiet",)), "x")
    users = [{"role": "user", "content": str(i)} for i in range(8)]
    answers = [held.says(held.prompt(user, scope=("loud",)), "x") for user in users]
    assert held.prompt(USER, quiet, USER, scope=("quiet",)).match is HistoryMatch.CONTINUED
    found = [held.prompt(u, a, USER, scope=("loud",)).match for u, a in zip(users, answers, strict=True)]
    assert found == [HistoryMatch.UNMATCHED] * 5 + [HistoryMatch.CONTINUED] * 3


def test_long_conversations_of_one_owner_do_not_cost_others_theirs(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("chatml"), max_tokens=300)
    quiet = held.says(held.prompt(USER, scope=("quiet",)), "x")
    for i in range(5):
        held.says(held.prompt({"role": "user", "content": str(i)}, scope=("loud",)), "y" * 100)
        assert held.all.tokens <= 300
    assert held.prompt(USER, quiet, USER, scope=("quiet",)).match is HistoryMatch.CONTINUED


# What was let go


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_a_conversation_that_was_let_go_is_found_where_it_was_kept(style: str, tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of(style), max_conversations=1)
    one = held.says(held.prompt(USER), "one", reasoning_content="why")
    two = held.says(held.prompt(USER, one, USER), "two", ended=False)
    expected = held.prompt(USER, one, USER, two, USER)
    held.says(held.prompt({"role": "user", "content": "other"}), "x")
    assert held.prompt(USER, one, USER, two, USER).match is HistoryMatch.UNMATCHED
    found = held.prompt(USER, one, USER, two, USER, recalls=True)
    assert (found.match, found.ids, found.read) == (HistoryMatch.CONTINUED, expected.ids, expected.read)
    assert (found.drift, found.thoughts) == (expected.drift, expected.thoughts)
    assert found.parent is not None
    assert found.parent.place == held.shelf[1].place
    held.says(found, "three")


def test_nothing_is_looked_for_that_is_held_or_that_nobody_said(held: Held) -> None:
    one = held.says(held.prompt(USER, recalls=True), "one")
    held.prompt(USER, one, USER, recalls=True)
    assert held.looked_for == []
    held.prompt(USER, one, USER, {**one, "content": "other"}, USER, recalls=True)
    assert len(held.looked_for) == 1


def test_what_was_thought_decides_which_trace_is_revived(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("chatml"), max_conversations=1)
    answers = [held.says(held.prompt(USER), "yes", reasoning_content=thought) for thought in "abc"]
    for number, answer in enumerate(answers, 1):
        found = held.prompt(USER, answer, USER, recalls=True)
        assert found.parent is not None
        assert found.parent.place.trace_id == f"t{number}"


def test_a_branch_of_a_trace_that_is_held_in_part_is_revived(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("chatml"), max_conversations=1)
    one = held.says(held.prompt(USER), "one")
    waiting = held.prompt(USER, one, USER)
    held.says(held.prompt({"role": "user", "content": "other"}), "x")
    held.says(waiting, "two")  # its trace is held again, but for the turn it went on from
    found = held.prompt(USER, one, {"role": "user", "content": "else"}, recalls=True)
    assert found.match is HistoryMatch.CONTINUED
    assert len(held.all) == 1


def test_a_turn_whose_trace_was_revived_before_it_was_kept_is_there_once(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("chatml"))
    prompt = held.prompt(USER)
    tokens = [65, held.tokenizer.turn_end]
    held.samples(prompt, one := {"role": "assistant", "content": "one"}, tokens)
    size, place = held.all.tokens, held.shelf[0].place
    held.all.keep(prompt, [SampledReply(one, tokens, place)])
    assert held.all.tokens == size
    assert held.prompt(USER, one, USER).candidates == 1
    held.clock.now = 101.0
    assert (held.prompt(USER, one, USER).match, held.all.tokens) == (HistoryMatch.UNMATCHED, 0)


# The template's way


def test_a_template_that_keeps_the_past_gives_the_same_either_way(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("chatml"))
    tokens = [*held.tokenizer.encode_text("one"), held.tokenizer.turn_end]
    one = {"role": "assistant", "content": "one"}
    held.samples(held.prompt(USER), one, tokens)
    exact, rendered = (held.prompt(USER, one, USER, history=history) for history in HistoryMode)
    assert exact == rendered
    assert rendered.match is HistoryMatch.CONTINUED


def test_by_the_template_a_prompt_goes_on_only_from_what_it_still_shows(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("thinking"))
    one = {"role": "assistant", "content": "one"}
    held.samples(held.prompt(USER), one, [*held.tokenizer.encode_text("one"), held.tokenizer.turn_end])
    two = {"role": "assistant", "content": "two", "reasoning_content": "hm"}
    held.samples(held.prompt(USER, one, USER), two, held.tokenizer.encode_text("<think>\nhm\n</think>\n\ntwo"))
    prompt = held.prompt(USER, one, USER, two, USER, history=HistoryMode.TEMPLATE)
    assert prompt.ids == held.tokenizer.encode_chat([USER, one, USER, two, USER])
    assert (prompt.match, prompt.drift) == (HistoryMatch.BRANCHED, False)
    assert tokens_of(prompt) + prompt.read == prompt.ids
    held = Held(tokenizer_of("thinking"))
    odd = held.says(held.prompt(USER), "odd")
    prompt = held.prompt(USER, odd, USER, history=HistoryMode.TEMPLATE)
    assert (prompt.match, prompt.parent, prompt.read) == (HistoryMatch.UNMATCHED, None, prompt.ids)
    assert held.prompt(USER, history=HistoryMode.TEMPLATE).match is HistoryMatch.NEW


CALL = {"id": "c", "function": {"name": "f", "arguments": {}}}
TOOL = {"role": "tool", "content": "r", "tool_call_id": "c"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
SAYS: dict[str, dict[str, Any]] = {
    "words": {"content": "yes"},
    "thought": {"content": "yes", "reasoning_content": "hm"},
    "call": {"content": "", "tool_calls": [CALL]},
    "both": {"content": "yes", "tool_calls": [CALL]},
}


@pytest.mark.parametrize(
    ("style", "says", "back", "drift"),
    [
        ("chatml", "thought", USER, False),
        ("chatml", "both", TOOL, False),
        ("thinking", "words", USER, False),
        ("thinking", "thought", USER, True),  # thinking before the last question is dropped
        ("thinking", "thought", TOOL, False),
        ("headers", "thought", TOOL, True),  # it shows no thinking at all
        ("headers", "call", TOOL, False),
        ("brackets", "words", USER, False),
        ("brackets", "call", TOOL, False),
        ("brackets", "both", TOOL, True),  # it shows calls without the words beside them
        ("turns", "both", TOOL, False),
        ("bars", "words", USER, True),  # it opens a think block that it does not show afterwards
    ],
)
def test_a_template_that_rewrites_the_past_is_told_and_overruled(
    style: str, says: str, back: dict[str, Any], drift: bool, tokenizer_of: TokenizerOf
) -> None:
    held = Held(tokenizer_of(style))
    answer = {"role": "assistant", **SAYS[says]}
    held.samples(held.prompt(USER), answer, [*held.tokenizer.encode_text("what"), held.tokenizer.turn_end])
    echoed = {key: value for key, value in answer.items() if key != "reasoning_content"}
    prompt = held.prompt(USER, echoed, back)
    assert (prompt.match, prompt.drift) == (HistoryMatch.CONTINUED, drift)
    assert prompt.ids[: len(tokens_of(prompt))] == tokens_of(prompt)
    assert ("drift" in prompt.counts) == drift
    more = held.says(prompt, "more")
    assert held.prompt(USER, echoed, back, more, TOOL).drift == drift  # and it stays so


def test_what_was_read_may_be_rewritten_too(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("thinking"))
    options: dict[str, Any] = {
        "template_kwargs": {"enable_thinking": False}
    }  # an empty think block, until a question follows
    one = held.says(held.prompt(USER, **options), "one")
    assert held.prompt(USER, one, USER, **options).drift
    held = Held(tokenizer_of("brackets"))
    one = held.says(held.prompt(USER, tools=TOOLS), "one")  # tools stand before the last question only
    prompt = held.prompt(USER, one, USER, tools=TOOLS)
    assert prompt.drift
    shown = held.tokenizer.decode(prompt.ids, skip_special=False)
    assert (shown.count("[AVAILABLE_TOOLS]"), shown.count("[INST]")) == (1, 2)  # where they were read, once


def test_thinking_that_is_dropped_turns_later_is_told_then(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("thinking"))
    one = held.says(held.prompt(USER), "", reasoning_content="hm", tool_calls=[CALL])
    second = held.prompt(USER, one, TOOL)
    two = held.says(second, "two")
    third = held.prompt(USER, one, TOOL, two, USER)
    assert (second.drift, third.drift) == (False, True)


def test_where_nothing_ends_a_turn_the_next_one_does(tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of("open"))
    tokenizer = held.tokenizer
    user, observation = (tokenizer.encode_chat([message])[2] for message in (USER, TOOL))
    answer = {"role": "assistant", "content": "a"}
    for drawn, expected in ((user, []), (observation, [user]), (None, [user])):
        held.samples(held.prompt(USER), answer, [65, *([] if drawn is None else [drawn])])
        prompt = held.prompt(USER, answer, USER)
        assert prompt.read[: len(expected) + 1] == [*expected, *tokenizer.encode_text("\n")]
        assert not prompt.drift


# Ids that a client kept


def test_ids_that_come_with_a_request_stand(held: Held) -> None:
    said = {"role": "assistant", "content": "hello"}
    ids = [*held.tokenizer.encode_chat([USER]), 65, 66, 67]
    prompt = held.prompt(USER, said, USER, prefix=TokenPrefix(ids, 2))
    following = held.tokenizer.observation([USER])
    assert prompt.ids == [*ids, held.tokenizer.turn_end, *following]
    assert (prompt.match, prompt.parent, prompt.read) == (HistoryMatch.GIVEN, None, prompt.ids)
    ended = held.prompt(USER, said, USER, prefix=TokenPrefix([*ids, held.tokenizer.turn_end], 2))
    assert ended.ids == prompt.ids


def test_ids_that_are_ours_continue_our_turn(held: Held) -> None:
    one = held.says(held.prompt(USER), "one")
    ours = held.prompt(USER, one, USER)
    same = held.prompt(USER, one, USER, prefix=TokenPrefix(tokens_of(ours), 2))
    assert same == ours
    other = held.prompt(USER, one, USER, prefix=TokenPrefix([*tokens_of(ours)[:-2], 65], 2))
    assert (other.match, other.parent) == (HistoryMatch.GIVEN, None)
    two = held.says(ours, "two")
    further = held.prompt(USER, one, USER, two, USER, prefix=TokenPrefix(tokens_of(ours), 2))
    assert further == held.prompt(USER, one, USER, two, USER)


def test_an_answer_may_go_on_in_ids_that_a_client_kept(held: Held) -> None:
    said = {"role": "assistant", "content": "hello"}
    ids = [*held.tokenizer.encode_chat([USER]), 65]
    for given in (ids, [*ids, held.tokenizer.turn_end]):
        prompt = held.prompt(USER, said, prefix=TokenPrefix(given, 2), continue_final_message=True)
        assert (prompt.ids, prompt.match) == (ids, HistoryMatch.GIVEN)


# Answers that go on


@pytest.mark.parametrize("style", STYLE_NAMES)
def test_an_answer_goes_on_in_the_ids_it_has(style: str, tokenizer_of: TokenizerOf) -> None:
    held = Held(tokenizer_of(style))
    first = held.prompt(USER)
    begun = held.says(first, "hel", ended=False)
    prompt = held.prompt(USER, begun, continue_final_message=True)
    assert prompt.ids == tokens_of(prompt)
    assert (prompt.match, prompt.read, prompt.begun) == (HistoryMatch.CONTINUED, [], len(prompt.ids) - len(first.ids))
    more = held.says(prompt, "lo", ended=False)
    assert more["content"] == "lo"
    twice = held.prompt(USER, {**begun, "content": "hello"}, continue_final_message=True)
    assert twice.begun == len(twice.ids) - len(first.ids)
    held.says(twice, " you")
    after = held.prompt(USER, {**begun, "content": "hello you"}, USER)
    assert after.match is HistoryMatch.CONTINUED
    assert tokens_of(after)[: len(twice.ids)] == twice.ids


def test_an_answer_that_had_ended_goes_on_without_its_end(held: Held) -> None:
    one = held.says(held.prompt(USER), "one")
    two = held.says(held.prompt(USER, one, USER), "two")
    prompt = held.prompt(USER, one, USER, two, continue_final_message=True)
    whole = tokens_of(held.prompt(USER, one, USER, two, USER))
    assert prompt.ids == whole[:-1]
    assert prompt.match is HistoryMatch.CONTINUED
    assert prompt.parent is not None
    assert prompt.parent.name == held.shelf[0].name


def test_what_a_stop_string_cut_off_is_not_gone_on_from(held: Held) -> None:
    one = held.says(held.prompt(USER), "one")
    second = held.prompt(USER, one, USER)
    cut = {"role": "assistant", "content": "two"}
    held.samples(second, cut, held.tokenizer.encode_text("two STOP"))
    prompt = held.prompt(USER, one, USER, cut, continue_final_message=True)
    assert prompt.ids == [*second.ids, *held.tokenizer.encode_text("two")]
    assert prompt.match is HistoryMatch.CONTINUED


def test_a_beginning_that_a_client_wrote_is_rendered(held: Held) -> None:
    one = held.says(held.prompt(USER), "one")
    begun = {"role": "assistant", "content": "It is"}
    prompt = held.prompt(USER, one, USER, begun, continue_final_message=True)
    assert prompt.ids == [*held.prompt(USER, one, USER).ids, *held.tokenizer.encode_text("It is")]
    assert (prompt.match, prompt.begun) == (HistoryMatch.CONTINUED, len(held.tokenizer.encode_text("It is")))
    held.says(prompt, " so")
    assert held.prompt(USER, one, USER, {**begun, "content": "It is so"}, USER).match is HistoryMatch.CONTINUED
    assert held.prompt(USER, begun, continue_final_message=True).match is HistoryMatch.NEW


def test_thoughts_that_go_on_are_joined(held: Held) -> None:
    begun = held.says(held.prompt(USER), "", ended=False, reasoning_content="I th")
    prompt = held.prompt(USER, begun, continue_final_message=True)
    held.says(prompt, "yes", reasoning_content="ink")
    joined = {"role": "assistant", "content": "yes", "reasoning_content": "I think"}
    for echoed in (joined, {**joined, "reasoning_content": None}):
        assert held.prompt(USER, echoed, USER).match is HistoryMatch.CONTINUED
    assert held.prompt(USER, {**joined, "reasoning_content": "I thank"}, USER).match is HistoryMatch.UNMATCHED


def test_calls_cannot_be_continued(held: Held) -> None:
    with pytest.raises(ChatError, match="without tool calls"):
        held.prompt(USER, call({}), continue_final_message=True)
