"""Arithmetic: one question, one number.

The bundled model was trained on exactly these texts, so they should not change without it.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from typing import Any, Literal

from palestra.chat.tool_calls import without_thinking
from palestra.environments.bundled.seeded_random import last_integer
from palestra.environments.tasks import LazyTasks
from palestra.environments.text import BaseTextEnv, BaseTextEnvStepOutput
from palestra.types.rollouts import Task
from palestra.util.json_types import JsonObject, JsonPayload

Op = Literal["+", "-", "*"]
OPS: tuple[Op, ...] = ("+", "-", "*")
OP_NAMES: dict[Op, str] = {"+": "add", "-": "subtract", "*": "multiply"}
PROBLEMS = {"+": 6000, "-": 4500, "*": 2000}
"""The maximum number of training questions of each kind: there are 10,000, 5,050 and 1,504 in all."""
HELD_OUT = 20  # one of this many questions is kept for evaluation

Problem = tuple[int, Op, int]


def question(a: int, op: Op, b: int) -> str:
    return f"What is {a} {op} {b}?"


def answer(a: int, op: Op, b: int) -> int:
    return a + b if op == "+" else a - b if op == "-" else a * b


def problems(op: Op) -> list[Problem]:
    """Returns all questions: numbers to 99, no negative results, products with a factor of one digit."""
    if op == "+":
        return [(a, op, b) for a in range(100) for b in range(100)]
    if op == "-":
        return [(a, op, b) for a in range(100) for b in range(a + 1)]
    return [(a, op, b) for a in range(2, 100) for b in range(2, 100) if min(a, b) <= 9]


def is_held_out(a: int, op: Op, b: int) -> bool:
    """Whether a question is never trained on; the same holds for the sum or product the other way round."""
    first, second = (a, b) if op == "-" else sorted((a, b))
    return _hash(f"{first}{op}{second}") % HELD_OUT == 0


def difficulty(a: int, op: Op, b: int) -> int:
    """Returns 1 if there is nothing to carry or borrow in the ones; 2 if there is, or for the times table; 3 for larger
    products."""
    if op == "*":
        return 2 if max(a, b) < 10 else 3
    carries = a % 10 + b % 10 > 9 if op == "+" else a % 10 < b % 10
    return 2 if carries else 1


def tasks(split: Literal["train", "eval"]) -> LazyTasks[Problem]:
    """Returns about 12,000 tasks to train on or 800 held-out ones, in a fixed mixed order."""
    chosen = _chosen(split)
    return LazyTasks(chosen, lambda pair: task(*pair))


def task(a: int, op: Op, b: int) -> Task:
    return Task(
        id=f"{OP_NAMES[op]}-{a}-{b}",
        environment="arithmetic",
        prompt=[{"role": "user", "content": question(a, op, b)}],
        extras={"answer": answer(a, op, b), "difficulty": difficulty(a, op, b)},
    )


def gym_rows(split: Literal["train", "eval"]) -> list[JsonObject]:
    """Returns the same questions for the gym's `math_with_judge` server."""
    return [
        {
            "responses_create_params": {"input": [{"role": "user", "content": question(*one)}]},
            "question": question(*one),
            "expected_answer": str(answer(*one)),
        }
        for one in _chosen(split)
    ]


def solve(task: Task) -> str:
    """Returns the answer of a perfect policy."""
    return str(task.extras["answer"])


class Arithmetic(BaseTextEnv):
    """A single turn: the reward is 1 if the last number is right, else 0."""

    tasks = staticmethod(tasks)
    gold = staticmethod(solve)
    reward_range = (0.0, 1.0)

    def __init__(self, env_config: Any = None, extras: JsonObject | None = None) -> None:
        super().__init__(env_config, extras)
        if not isinstance(self.extras.get("answer"), int):
            raise ValueError("arithmetic: a task needs an 'answer', a whole number, in its extras")
        self._has_number = True

    def step(self, action: str) -> BaseTextEnvStepOutput:
        if self.turns:
            raise RuntimeError("arithmetic: the episode is over after one step")
        self.turns += 1
        number = last_integer(without_thinking(action))
        self._has_number = number is not None
        reward = 1.0 if number == self.extras["answer"] else 0.0
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"said": number})

    def get_metrics(self) -> JsonPayload:
        return {"parse_error": 0.0 if self._has_number else 1.0}


@cache
def _chosen(split: str) -> list[Problem]:
    chosen: list[Problem] = []
    for op in OPS:
        of_split = [one for one in problems(op) if is_held_out(*one) == (split == "eval")]
        of_split.sort(key=lambda one: _hash(question(*one)))
        chosen += of_split[: PROBLEMS[op]]
    return sorted(chosen, key=lambda one: _hash(question(*one)))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=b"arithmetic").digest(), "big")
