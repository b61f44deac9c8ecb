"""Scores rows of rollouts with other models: the base model, or the teacher of each environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct, field

from palestra.rollouts.policy_sampler import TopScores
from palestra.runs.listener import RunListener, Stage
from palestra.types.pictures import PromptPicture, whole_pictures
from palestra.types.rollouts import Branch, Group, Rollout, Task
from palestra.types.sampling import TopLogprobs


class TokenScorer(Protocol):
    async def score(self, tokens: Sequence[int], pictures: Sequence[PromptPicture] = ()) -> list[float]:
        """Returns the logprob of each token; the first one gets 0. Raises SamplingError."""
        ...

    async def score_top(self, tokens: Sequence[int], k: int, pictures: Sequence[PromptPicture] = ()) -> TopScores:
        """Returns that and the `k` likeliest tokens in the place of each. Raises SamplingError."""
        ...


class PlayedRow(NamedTuple):
    """A row with what it belongs to."""

    row: Branch
    rollout: Rollout
    task: Task


class TeacherView(Protocol):
    """A teacher's view of a row, and its scores of the tokens."""

    async def score(self, played: PlayedRow, limit: int, own: TokenScorer) -> TopScores:
        """Returns a logprob for each of the first `limit` tokens of a row, and what it would have said in their place,
        if that is needed. `own`: the policy that played. Raises SamplingError."""
        ...


class TeacherScores(Struct):
    """What the teachers say about rows, by the rows' ids."""

    logprobs: dict[str, list[float]] = field(default_factory=dict)
    top: dict[str, list[TopLogprobs | None]] = field(default_factory=dict)
    """Empty lists where only sampled tokens are scored."""


class Teachers:
    def __init__(self, by_environment: Mapping[str, TeacherView]) -> None:
        self._by_environment = by_environment

    async def score(
        self, groups: Sequence[Group], rows: Sequence[Branch], limit: int, listener: RunListener, own: TokenScorer
    ) -> TeacherScores:
        """Scores rows of these groups, each by the teacher of its environment. `own`: the policy that played. Raises
        SamplingError."""
        played = {one.row.id: one for one in played_rows(groups)}

        def score(row: Branch) -> Awaitable[TopScores]:
            one = played[row.id]
            return self._by_environment[one.rollout.environment].score(one, limit, own)

        found = await _score_all(rows, score, listener)
        return TeacherScores(
            {name: one.logprobs for name, one in found.items()}, {name: one.top for name, one in found.items()}
        )


async def score_rows(
    rows: Sequence[Branch], limit: int, scorer: TokenScorer, listener: RunListener
) -> dict[str, list[float]]:
    """Returns the logprobs of the first `limit` tokens of each row, by its id. Raises SamplingError."""

    async def score(row: Branch) -> TopScores:
        cut, pictures = whole_pictures(row.pictures, limit)
        return TopScores(await scorer.score(all_tokens(row)[:cut], pictures=pictures), [])

    return {name: one.logprobs for name, one in (await _score_all(rows, score, listener)).items()}


async def _score_all(
    rows: Sequence[Branch], score: Callable[[Branch], Awaitable[TopScores]], listener: RunListener
) -> dict[str, TopScores]:
    done = 0

    async def score_one(row: Branch) -> TopScores:
        nonlocal done
        found = await score(row)
        done += 1
        listener.stage(Stage.SCORE, done, len(rows))
        return found

    listener.stage(Stage.SCORE, 0, len(rows))
    scores = await asyncio.gather(*map(score_one, rows))
    return {row.id: one for row, one in zip(rows, scores, strict=True)}


def played_rows(groups: Sequence[Group]) -> Iterator[PlayedRow]:
    for group in groups:
        for rollout in group.all_rollouts:
            for row in rollout.rows:
                yield PlayedRow(row, rollout, group.task)


def row_environments(groups: Sequence[Group]) -> dict[str, str]:
    """Returns the environment of each row, by the row's id."""
    return {one.row.id: one.rollout.environment for one in played_rows(groups)}


def all_tokens(row: Branch) -> list[int]:
    return [*row.prompt, *(token for turn in row.turns for token in [*turn.observation, *turn.tokens])]
