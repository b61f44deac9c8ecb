"""The stockroom's questions and all its texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Literal

from palestra.environments.bundled.seeded_random import SeededRandom
from palestra.environments.tasks import LazyTasks
from palestra.types.rollouts import Task

SYSTEM = (
    "You answer questions about a stockroom. Tools: count(item), add(a, b), subtract(a, b). "
    'Call one tool in each message: <tool_call>{"name": "count", "arguments": {"item": "cups"}}</tool_call> '
    "When you know the answer, say it and end with <done>"
)
_NOUNS = """
apples bags balls bells belts boats bolts books boots bowls boxes bricks brushes buckets buttons cakes candles
cards chairs clocks coats coins cups desks dishes doors drums eggs fans flags forks gloves hammers hats jars keys
knives lamps maps masks mirrors nails needles nets pans pencils pens pipes plates pots ropes rugs screws shirts
shoes spoons stamps tables towels wheels
"""
ITEMS = tuple(_NOUNS.split())
COUNTS = (10, 99)  # a range that is too large to guess in
STOCKED = 4  # items in one stockroom: those in the question, and others
TRAIN_TASKS, EVAL_TASKS = 20_000, 512
HELD_OUT = 12  # one of this many questions is kept for evaluation
DONE = "<done>"
NO_CALL = "no tool call found"

Split = Literal["train", "eval"]


class Kind(StrEnum):
    ONE = "one"
    SUM = "sum"
    DIFFERENCE = "difference"


SHARES = ((Kind.ONE, 30), (Kind.SUM, 40), (Kind.DIFFERENCE, 30))  # percent
DIFFICULTY = {Kind.ONE: 1, Kind.SUM: 2, Kind.DIFFERENCE: 3}


def question(kind: Kind, items: Sequence[str]) -> str:
    if kind is Kind.ONE:
        return f"How many {items[0]} are there?"
    if kind is Kind.SUM:
        return f"How many {items[0]} and {items[1]} are there together?"
    return f"How many more {items[0]} than {items[1]} are there?"


def answer(kind: Kind, items: Sequence[str], stock: Mapping[str, int]) -> int:
    if kind is Kind.ONE:
        return stock[items[0]]
    first, second = (stock[item] for item in items)
    return first + second if kind is Kind.SUM else first - second


def tool_result(result: int) -> str:
    return f"Tool result: {result}"


def tool_error(reason: str) -> str:
    return f"Error: {reason}"


def call_text(name: str, **arguments: str | int) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answer_text(number: int) -> str:
    return f"{number} {DONE}"


def solve(task: Task) -> list[str]:
    """Returns the messages of a perfect policy, turn by turn."""
    kind, items, stock = Kind(task.extras["kind"]), task.extras["items"], task.extras["stock"]
    turns = [call_text("count", item=item) for item in items]
    if kind is not Kind.ONE:
        first, second = (stock[item] for item in items)
        turns.append(call_text("add" if kind is Kind.SUM else "subtract", a=first, b=second))
    return [*turns, answer_text(answer(kind, items, stock))]


def is_held_out(kind: Kind, items: Sequence[str]) -> bool:
    """Whether a question is never trained on, whatever is in stock; the same holds for the two items the other way
    round."""
    return SeededRandom(f"stockroom/split/{kind}/{'/'.join(sorted(items))}").below(HELD_OUT) == 0


def tasks(split: Split) -> LazyTasks[int]:
    return LazyTasks(range(TRAIN_TASKS if split == "train" else EVAL_TASKS), partial(make_task, split))


def make_task(split: Split, index: int) -> Task:
    draws = SeededRandom(f"stockroom/{split}/{index}")
    kind = _kind(draws)
    stocked = draws.sample(ITEMS, STOCKED)
    while is_held_out(kind, items := stocked[: 1 if kind is Kind.ONE else 2]) != (split == "eval"):
        stocked = draws.sample(ITEMS, STOCKED)
    stock = {item: draws.between(*COUNTS) for item in stocked}
    while kind is Kind.DIFFERENCE and stock[items[0]] == stock[items[1]]:
        stock[items[1]] = draws.between(*COUNTS)
    if kind is Kind.DIFFERENCE:
        items = sorted(items, key=lambda item: -stock[item])
    return Task(
        id=f"{split}-{index}",
        environment="stockroom",
        prompt=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(kind, items)}],
        extras={"kind": str(kind), "items": items, "stock": stock, "difficulty": DIFFICULTY[kind]},
    )


def _kind(draws: SeededRandom) -> Kind:
    percent = draws.below(100)
    for kind, share in SHARES:
        percent -= share
        if percent < 0:
            return kind
    raise AssertionError("the shares are 100 percent")
