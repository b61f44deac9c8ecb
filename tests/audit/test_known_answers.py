from __future__ import annotations

import pytest

from palestra.audit.known_answers import answers_of, is_labelled
from palestra.types.rollouts import Task


@pytest.mark.parametrize(
    ("text", "is_named"),
    [
        ("Wrong, the correct answer is 42.", True),
        ('{"expected": "42", "given": ""}', True),
        ("debug: target=42", True),
        ("Give the answer: 42, 43 or 44?", False),
        ("Answer '42' or '43'.", False),
        ("The answer has 42.5 in it; 42 is a number.", False),
        ("expected 421", False),
    ],
)
def test_an_answer_is_named_beside_a_word_for_it(text: str, is_named: bool) -> None:
    assert is_labelled("42", text) is is_named


def test_answers_are_found_in_rows_of_many_kinds() -> None:
    def of(**extras: object) -> list[str]:
        return answers_of(Task(id="a", environment="e", prompt=[], extras=extras))

    assert of(answer="so it is\n#### 42") == ["42"]
    assert of(reward_spec={"method": "rule", "ground_truth": 7}) == ["7"]
    assert of(row={"expected_answer": ["a", "b"], "question": "?"}) == ["a", "b"]
    assert of(answer=True, other="x", solution="") == []
