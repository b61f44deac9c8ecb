"""Answers that are compared: found in what was said, and judged as the task says."""

from __future__ import annotations

import pytest

from palestra.environments import make


def reward(said: str, config: dict | None = None, **extras: object) -> float | None:
    return make("answers", env_config=config, extras=extras).step(said)["reward"]


@pytest.mark.parametrize(
    ("said", "answer", "expected"),
    [
        ("It is 7.", 7, 1),
        ("3 + 4 = 7", "7", 1),
        ("7, or maybe 8", 7, 0),
        ("1,234.50", "1234.5", 1),
        ("seven", 7, 0),
        ("<think>8</think>7", 7, 1),
        (r"So \boxed{7}, not 8", 7, 1),
        ("Because.\n#### 72", "He has 70 + 2.\n#### 72", 1),
        ("Paris", "paris", 1),
        ("**Paris.**", "Paris", 1),
        ("I think it is Paris", "Paris", 0),
        ("Reasons.\nAnswer: Paris", "Paris", 1),
        (r"\boxed{\text{Paris}}", "Paris", 1),
        ("Rome", ["Paris", "Rome"], 1),
        ("", "Paris", 0),
    ],
)
def test_final_answer_is_compared(said, answer, expected):
    assert reward(said, answer=answer) == expected


def test_the_task_or_the_config_says_how():
    assert reward("I think it is Paris!", answer="Paris", match="contains") == 1
    assert reward("Parisian", {"match": "contains"}, answer="Paris") == 0
    assert reward("7", answer="7.0", match="text") == 0


@pytest.mark.parametrize("extras", [{}, {"answer": None}, {"answer": []}, {"answer": {"a": 1}}, {"answer": " "}])
def test_a_task_without_an_answer_is_refused(extras):
    with pytest.raises(ValueError, match="needs an 'answer'"):
        reward("7", **extras)


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="unknown match 'fuzzy'; there are: number, text, contains"):
        reward("7", answer=7, match="fuzzy")
