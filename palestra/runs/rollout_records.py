"""Records of a run's rollouts, as they are in its files of steps. Records of older versions lack fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Required

from typing_extensions import TypedDict  # `extra_items` comes with Python 3.15

from palestra.types.rollouts import Message
from palestra.types.sampling import VersionSegment
from palestra.util.json_types import JsonObject


class VersionCounts(TypedDict, total=False):
    versions: list[tuple[int, int]]
    """How many tokens each version of the weights drew, if there were several."""


class TurnTimes(TypedDict, total=False):
    turn_times: list[list[float]]
    """The seconds of sampling and of the environment for each turn, in the order of play, if they were measured."""


class Judgements(TypedDict, total=False):
    verdict: JsonObject
    """What the environment's verifier saw and said."""
    judgement: JsonObject
    """What a judge said."""


class ForkFacts(TypedDict, total=False):
    fork_of: str
    fork_turn: int | None
    forks: int
    not_forked: str


class TrainingUse(TypedDict, total=False):
    used: bool | None
    """Whether the rollout was trained on."""
    advantage: float | None
    """Before it was scaled: the mean over the tokens that were sampled."""
    advantage_divisor: float | None


class RolloutRecord(TypedDict, total=False, extra_items=Any):
    """A rollout for people to read."""

    id: Required[str]
    group: str
    index: int
    task: Required[str]
    environment: Required[str]
    reward: Required[float | None]
    stop: str
    turns: int
    branches: int
    tokens: int
    prompt_tokens: int
    version: int | None
    versions: list[tuple[int, int]]
    temperature: float | None
    seed: int | None
    seconds: float
    sample_s: float
    env_s: float
    turn_times: list[list[float]]
    metrics: dict[str, float]
    verdict: JsonObject
    judgement: JsonObject
    error: str | None
    failure: str | None
    messages: Required[list[Message]]
    fork_of: str | None
    fork_turn: int | None
    forks: int
    not_forked: str | None
    level: str | None
    step: int
    attempt: int
    used: bool | None
    advantage: float | None
    advantage_divisor: float | None


class TurnSegments(TypedDict, total=False):
    segments: Sequence[VersionSegment]
    """Where another version of the weights went on."""


class PicturePlaces(TypedDict, total=False):
    pictures: Sequence[Sequence[object]]
    """First position, number of positions and digest of each."""


class TurnRecord(TypedDict, extra_items=Any):
    """A turn of a record of tokens."""

    observation: list[int]
    tokens: list[int]
    logprobs: Sequence[float | None]


class TokenRecord(TypedDict, total=False, extra_items=Any):
    """The tokens of a rollout, or of a branch of one."""

    prompt: Required[list[int]]
    turns: Required[list[TurnRecord]]
    pictures: Sequence[Sequence[object]]
    """First position, number of positions and digest of each."""
    advantages: Required[Sequence[float | None] | None]
    advantage_divisor: float | None
    trainer_logprobs: Sequence[float | None] | None
    entropies: Sequence[float | None] | None
