"""Records of rollouts as the pages rely on them, whichever version has written them.

Pages read records through `complete`: older versions lack fields.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeGuard

import msgspec
from msgspec import Meta, Struct
from typing_extensions import TypedDict  # `extra_items` comes with Python 3.15

from palestra.runs.rollout_records import RolloutRecord, TokenRecord
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonObject, JsonPayload

NUMBERS = (
    *(
        "index",
        "reward",
        "advantage",
        "advantage_divisor",
        "turns",
        "branches",
        "forks",
        "fork_turn",
        "tokens",
        "prompt_tokens",
        "version",
        "temperature",
        "seed",
    ),
    *("seconds", "sample_s", "env_s"),
)
TEXTS = ("id", "group", "task", "environment", "stop")
MESSAGES = ("error", "failure", "not_forked", "fork_of")
HUGE = 10**300
TABLES = ("metrics", "judgement", "verdict")


class ListedRecord(TypedDict, extra_items=Any):
    """A record as lists show it: without its conversation, but with how it begins and ends."""

    id: str
    group: str
    task: str
    environment: str
    stop: str
    step: int
    index: int | None
    reward: float | None
    advantage: float | None
    tokens: int | None
    branches: int | None
    fork_of: str | None
    prompt: str
    answer: str


class ShownRecord(TypedDict, extra_items=Any):
    """A record with every field that pages show. None where a field is missing or not of its kind."""

    id: str
    group: str
    task: str
    environment: str
    stop: str
    index: int | None
    reward: float | None
    advantage: float | None
    tokens: int | None
    branches: int | None
    fork_of: str | None
    verdict: JsonObject
    messages: list[Message]


def complete(record: RolloutRecord) -> ShownRecord:
    """The record with every field that pages show: None where it is missing or not of its kind, text for names."""
    numbers = dict.fromkeys(NUMBERS)
    numbers |= {name: value for name in NUMBERS if is_number(value := record.get(name))}
    texts = {name: str(record.get(name)) for name in TEXTS}
    messages = {name: None if not (value := record.get(name)) else str(value) for name in MESSAGES}
    tables = {name: value if isinstance(value := record.get(name), dict) else {} for name in TABLES}
    used, level = record.get("used"), record.get("level")
    shown: Any = {
        **record,
        **numbers,
        **texts,
        **messages,
        **tables,
        "level": None if level is None else str(level),
        "turn_times": turn_times(record.get("turn_times")),
        "versions": versions_of(record.get("versions")),
        "used": used if isinstance(used, bool) else None,
        "messages": messages_in(record),
    }
    return shown


def versions_of(versions: object) -> list[tuple[int, int]]:
    """Returns how many tokens each version of the weights drew; empty if one drew all, or it was not recorded."""
    try:
        pairs = msgspec.convert(versions, list[tuple[int, int]])
    except msgspec.ValidationError:
        return []
    return pairs if all(is_number(one) for pair in pairs for one in pair) else []


def turn_times(times: object) -> list[list[float]]:
    """The seconds of sampling and of the environment, turn by turn; empty if they were not recorded."""
    if not isinstance(times, list):
        return []
    pairs = [one for one in times if isinstance(one, list) and len(one) == 2 and all(is_number(value) for value in one)]
    return pairs if len(pairs) == len(times) else []


def messages_in(record: RolloutRecord) -> list[Message]:
    """The messages of a rollout's conversation."""
    messages: object = record.get("messages")
    return [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is one that can be drawn. JSON may have integers that no float can hold."""
    if isinstance(value, float):
        return math.isfinite(value)
    return type(value) is int and -HUGE < value < HUGE


TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class TokenSegment(Struct, frozen=True):
    """Tokens of a turn, from `start` to the next segment, that one version of the weights drew."""

    start: Annotated[int, Meta(ge=0)]
    version: int


class TurnTokens(Struct, frozen=True):
    tokens: list[TokenId]
    logprobs: list[float | None] = []
    observation: list[TokenId] = []
    version: int | None = None
    segments: list[TokenSegment] = []


class RolloutTokens(Struct, frozen=True):
    """A line of a step's file of tokens."""

    prompt: list[TokenId]
    turns: list[TurnTokens]
    advantages: list[float | None] | None = None
    advantage_divisor: float | None = None
    trainer_logprobs: list[float | None] | None = None
    entropies: list[float | None] | None = None
    pictures: list[tuple[int, int, str]] = []
    """First position, number of positions, digest."""


def complete_tokens(record: JsonPayload) -> TokenRecord:
    """The tokens with a log-probability each, None where none was kept. Raises msgspec.ValidationError."""
    known = msgspec.convert(record, RolloutTokens)
    turns = []
    for turn in known.turns:
        logprobs = [*turn.logprobs, *[None] * len(turn.tokens)][: len(turn.tokens)]
        turns.append(msgspec.structs.replace(turn, logprobs=logprobs))
    return msgspec.to_builtins(msgspec.structs.replace(known, turns=turns))
