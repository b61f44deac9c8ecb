"""How teachers read what a student said: with more in the prompt, and in other tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.chat import ChatTokenizer
from palestra.config.bundled import bundled_model
from palestra.config.distillation import TeacherConfig
from palestra.rollouts.policy_sampler import SamplingError, TopScores
from palestra.testing.random_tokenizer import write_tokenizer
from palestra.training.batches.distillation import add_teacher_advantages
from palestra.training.batches.grpo_batch import to_sequence
from palestra.training.row_scores import PlayedRow
from palestra.training.teacher_views import OtherTokenizerTeacher, PlainTeacher, PrivilegedTeacher, as_students
from palestra.training.token_spans import TokenSpan, shared_spans
from palestra.types.rollouts import Rollout, Task
from palestra.types.sampling import TopLogprobs
from tests.properties import examples
from tests.training.records import make_rollout, make_turn
from tests.training.test_divergences import settings

ASKED = [{"role": "user", "content": "How many apples are there?"}]


@cache
def student() -> ChatTokenizer:
    return ChatTokenizer.load(bundled_model("ephebe"))


@cache
def teacher() -> ChatTokenizer:
    """Another tokenizer: other merges, other ids."""
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab_size=400, max_positions=4096)
        return ChatTokenizer.load(Path(folder))


class Scorer:
    """Gives the token at place i the logprob -i / 16, and remembers what it read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    async def score(self, tokens: Sequence[int], pictures: Any = ()) -> list[float]:
        self.read = list(tokens)
        return [-place / 16 for place in range(len(tokens))]

    async def score_top(self, tokens: Sequence[int], k: int, pictures: Any = ()) -> TopScores:
        top = [None, *(TopLogprobs((place,) * k, (-1.0,) * k) for place in range(1, len(tokens)))]
        return TopScores(await self.score(tokens), top)


def played(*said: str, **extras: Any) -> PlayedRow:
    """A rollout in which the student said these words, and was asked for more in between."""
    tokenizer, more = student(), {"role": "user", "content": "And more?"}
    turns, messages = [], list(ASKED)
    for number, text in enumerate(said):
        tokens = [*tokenizer.encode_text(text), tokenizer.turn_end]
        turn = make_turn(0, text=text)
        turn.observation = tokenizer.observation([more]) if number else []
        turn.tokens, turn.logprobs = tokens, [-0.5] * len(tokens)
        turns.append(turn)
        messages += [{"role": "assistant", "content": text}, more]
    rollout: Rollout = make_rollout("g-0", 1.0, turns, prompt=tokenizer.encode_chat(ASKED), messages=messages)
    task = Task(id="t", environment="math", prompt=ASKED, extras=extras)
    return PlayedRow(rollout.rows[0], rollout, task)


def all_of(one: PlayedRow) -> list[int]:
    return one.row.prompt + [token for turn in one.row.turns for token in [*turn.observation, *turn.tokens]]


def test_a_privileged_teacher_is_told_more_and_scores_the_same_tokens():
    scorer, one = Scorer(), played("There are 4.", "No, 5.", answer=4)
    view = PrivilegedTeacher(PlainTeacher(scorer, 0), student(), "The answer is {answer}.")
    found = asyncio.run(view.score(one, 4096, scorer))
    text = student().decode(scorer.read, skip_special=False)
    assert "How many apples are there?\n\nThe answer is 4." in text
    head, more = len(one.row.prompt), len(scorer.read) - len(all_of(one))
    assert scorer.read[head + more :] == all_of(one)[head:]
    assert found.logprobs[:head] == [0.0] * head
    assert found.logprobs[head:] == [-(place + more) / 16 for place in range(head, len(all_of(one)))]


def test_whole_distributions_of_a_privileged_teacher_stand_at_the_students_places():
    scorer, one = Scorer(), played("There are 4.", hint="Count twice.")
    view = PrivilegedTeacher(PlainTeacher(None, 3), student(), "{hint}")
    found = asyncio.run(view.score(one, 4096, scorer))
    more = len(scorer.read) - len(all_of(one))
    assert len(found.top) == len(found.logprobs) == len(all_of(one))
    places = [top.token_ids[0] for top in found.top if top is not None]
    assert places == [place + more for place in range(len(one.row.prompt), len(all_of(one)))]


def test_a_field_that_a_task_does_not_have_is_named():
    view = PrivilegedTeacher(PlainTeacher(Scorer(), 0), student(), "The answer is {answer}.")
    with pytest.raises(SamplingError, match=r"'answer'.*it has hint"):
        asyncio.run(view.score(played("4", hint="x"), 4096, Scorer()))


WORDS = st.lists(st.sampled_from(["apples", " 42", "naïve", "北", "🙂", "\n", " the", "<|im_", "e", "  "]), max_size=9)


@examples(60)
@given(WORDS.map("".join))
def test_spans_spell_the_same_text_and_are_as_short_as_can_be(text: str):
    own, other = student().encode_text(text), teacher().encode_text(text)
    spans = shared_spans(student(), own, teacher(), other)
    for span in spans:
        said = student().decode(own[slice(*span.student)]), teacher().decode(other[slice(*span.teacher)])
        assert said[0] == said[1]
    assert "".join(student().decode(own[slice(*span.student)]) for span in spans) == student().decode(own)
    for before, after in pairwise(spans):
        assert (before.student[1], before.teacher[1]) == (after.student[0], after.teacher[0])


def test_ends_of_turns_are_aligned_whatever_they_are_called():
    own = [*student().encode_text("so"), student().turn_end]
    other = [*teacher().encode_text("so"), teacher().turn_end]
    assert shared_spans(student(), own, teacher(), other)[-1] == TokenSpan(
        (len(own) - 1, len(own)), (len(other) - 1, len(other))
    )
    assert shared_spans(student(), own[:-1], teacher(), other)[-1].student[1] == len(own) - 1


def test_a_span_counts_for_each_of_the_students_tokens_in_it():
    spans = [TokenSpan((0, 2), (0, 1)), TokenSpan((2, 3), (1, 4))]
    found = as_students([-1.0, -2.0, -0.5, -0.25], [-1.5, -0.25, -0.25, -0.5], spans)
    gaps = [own - other for own, other in zip([-1.0, -2.0, -0.5, -0.25], found, strict=True)]
    assert gaps == [-1.5, -1.5, 0.5, 0.0]


def test_a_teacher_with_another_tokenizer_reads_its_own_tokens():
    scorer, one = Scorer(), played("There are 4 of them.", "naïve 北京")
    view = OtherTokenizerTeacher(scorer, teacher(), student())
    found = asyncio.run(view.score(one, 4096, scorer))
    messages = one.rollout.messages[:-1]
    assert scorer.read == teacher().encode_chat(messages, add_generation_prompt=False)[: len(scorer.read)]
    sequence = to_sequence(one.row, 0.0, 4096)
    assert len(found.logprobs) == len(sequence.tokens)
    add_teacher_advantages([sequence], {one.row.id: found.logprobs}, settings("sampled"))
    sampled = [a for a, is_sampled in zip(sequence.advantages, sequence.mask, strict=True) if is_sampled]
    assert all(sampled)
    turn = one.row.turns[0]
    start = len(teacher().encode_chat(ASKED))
    other = scorer.read[start:]
    (first, *_) = shared_spans(student(), turn.tokens, teacher(), other[: other.index(teacher().turn_end) + 1])
    said = sum(-(start + place) / 16 for place in range(*first.teacher))
    expected = said - sum(turn.logprobs[slice(*first.student)])
    assert sampled[: first.student[1]] == pytest.approx([expected] * first.student[1], abs=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "self"}, "give it a context"),
        ({"model": "x", "own_tokenizer": True, "context": "c"}, "cannot have a context"),
        ({"model": "x", "own_tokenizer": True, "endpoint": "http://127.0.0.1:1/v1"}, "needs its folder"),
    ],
)
def test_teachers_that_make_no_sense_are_refused(given: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        TeacherConfig.model_validate(given)
