"""Scores rows of rollouts with other models: the base model, or the teacher of each environment.

Owns: which model scores which row. Never touches: what is done with the scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from palestra.runs.listener import RunListener, Stage
from palestra.types.rollouts import Branch, Group


class TokenScorer(Protocol):
    async def score(self, tokens: Sequence[int]) -> list[float]:
        """Returns the logprob of each token; the first one gets 0. Raises SamplingError."""
        ...


class Teachers:
    def __init__(self, by_environment: Mapping[str, TokenScorer]) -> None:
        self._by_environment = by_environment

    async def score(
        self, groups: Sequence[Group], rows: Sequence[Branch], limit: int, listener: RunListener
    ) -> dict[str, list[float]]:
        """Scores rows of these groups, each by the teacher of its environment. Raises SamplingError."""
        environments = row_environments(groups)
        return await score_rows(rows, limit, lambda row: self._by_environment[environments[row.id]], listener)


async def score_rows(
    rows: Sequence[Branch],
    limit: int,
    scorer_of: Callable[[Branch], TokenScorer],
    listener: RunListener,
) -> dict[str, list[float]]:
    """Returns the logprobs of the first `limit` tokens of each row, by its id. Raises SamplingError."""
    done = 0

    async def score(row: Branch) -> list[float]:
        nonlocal done
        found = await scorer_of(row).score(all_tokens(row)[:limit])
        done += 1
        listener.stage(Stage.SCORE, done, len(rows))
        return found

    listener.stage(Stage.SCORE, 0, len(rows))
    scores = await asyncio.gather(*map(score, rows))
    return {row.id: one for row, one in zip(rows, scores, strict=True)}


def row_environments(groups: Sequence[Group]) -> dict[str, str]:
    """Returns the environment of each row, by the row's id."""
    rollouts = [rollout for group in groups for rollout in group.all_rollouts]
    return {row.id: rollout.environment for rollout in rollouts for row in rollout.rows}


def all_tokens(row: Branch) -> list[int]:
    return [*row.prompt, *(token for turn in row.turns for token in [*turn.observation, *turn.tokens])]
