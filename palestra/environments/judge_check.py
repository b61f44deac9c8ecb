"""Measures how far a judge agrees with gold: answers that people have graded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import msgspec
from msgspec import Struct

from palestra.environments.errors import TaskFileError
from palestra.environments.judge import Judge
from palestra.types.rollouts import Message, Rollout, RolloutStop, Task
from palestra.util.json_types import JsonObject


class GoldAnswer(Struct, frozen=True):
    text: str
    gold: float
    """Between 0 and 1."""


class GoldRow(Struct, frozen=True, kw_only=True):
    prompt: str | list[Message]
    answers: list[GoldAnswer]
    """Answers to the prompt, at least one."""
    answer: str | None = None
    """The reference answer, in the extras of the task under this name."""


class Agreement(Struct, frozen=True, kw_only=True):
    answers: int
    """Answers that were judged."""
    failed: int
    """Answers without a verdict, which count in no measure below."""
    pairs: int
    """Pairs of answers to one prompt that gold tells apart."""
    pair_accuracy: float | None
    """Share of them that the judge puts into the order of gold; one that it cannot tell apart counts half."""
    correlation: float | None
    """Pearson's, of scores and gold."""
    mean_error: float | None
    """Mean of the absolute difference of score and gold."""


def read_gold(file: Path) -> list[GoldRow]:
    """Raises TaskFileError."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise TaskFileError(f"{file}: {error.strerror}") from None
    rows = [_gold_row(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not any(row.answers for row in rows):
        raise TaskFileError(f"{file} has no answers")
    return rows


def _gold_row(line: bytes, where: str) -> GoldRow:
    try:
        return msgspec.json.decode(line, type=GoldRow)
    except msgspec.DecodeError as error:
        form = '{"prompt": …, "answers": [{"text": …, "gold": 0.8}]}'
        raise TaskFileError(f"{where}: {error}; a row is {form}") from None


async def judge_gold(judge: Judge, rows: Sequence[GoldRow]) -> tuple[Agreement, list[JsonObject]]:
    """Returns the measures, and for each answer its gold, its score and the judge's words. Raises JudgeError."""
    judged: list[JsonObject] = []
    for number, row in enumerate(rows):
        task, rollouts = _played(number, row)
        for answer, found in zip(row.answers, await judge.grade(task, rollouts), strict=True):
            judged.append({"row": number, "text": answer.text, "gold": answer.gold, **msgspec.to_builtins(found)})
    return agreement(judged), judged


def agreement(judged: Sequence[JsonObject]) -> Agreement:
    graded = [one for one in judged if one["score"] is not None and not one["error"]]
    pairs = [(a, b) for a, b in combinations(graded, 2) if a["row"] == b["row"] and a["gold"] != b["gold"]]
    points = [_order(a["score"] - b["score"], a["gold"] - b["gold"]) for a, b in pairs]
    scores, gold = [one["score"] for one in graded], [one["gold"] for one in graded]
    errors = [abs(a - b) for a, b in zip(scores, gold, strict=True)]
    return Agreement(
        answers=len(judged),
        failed=len(judged) - len(graded),
        pairs=len(pairs),
        pair_accuracy=sum(points) / len(points) if points else None,
        correlation=correlation(scores, gold),
        mean_error=sum(errors) / len(errors) if errors else None,
    )


def correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Returns Pearson's correlation; None if one of them does not vary."""
    if not first:
        return None
    means = (math.fsum(first) / len(first), math.fsum(second) / len(second))
    centred = [(a - means[0], b - means[1]) for a, b in zip(first, second, strict=True)]
    scale = math.sqrt(math.fsum(a * a for a, _ in centred) * math.fsum(b * b for _, b in centred))
    return math.fsum(a * b for a, b in centred) / scale if scale > 0 else None


def _order(judged: float, gold: float) -> float:
    return 0.5 if judged == 0 else float((judged > 0) == (gold > 0))


def _played(number: int, row: GoldRow) -> tuple[Task, list[Rollout]]:
    prompt: list[Message] = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    extras = {} if row.answer is None else {"answer": row.answer}
    task = Task(id=f"gold-{number}", environment="gold", prompt=prompt, extras=extras)
    rollouts = [
        Rollout(
            id=f"gold-{number}-{index}",
            group=task.id,
            index=index,
            task=task.id,
            environment="gold",
            seed=number,
            stop=RolloutStop.DONE,
            messages=[*prompt, {"role": "assistant", "content": answer.text}],
        )
        for index, answer in enumerate(row.answers)
    ]
    return task, rollouts
