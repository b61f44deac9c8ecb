"""The model calls in an agent's answer: their token ids, and the check that each continues the ones before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from palestra.types.gym import TOKEN_FIELDS
from palestra.util.json_types import JsonMapping

PROMPT, GENERATION, LOGPROBS = TOKEN_FIELDS


class TokenIdFlaw(StrEnum):
    NOT_CONTIGUOUS = "not_contiguous"
    """The prompt of a call does not begin with everything that was read and sampled before."""
    NO_LOGPROB = "no_logprob"
    """A logprob is not a number."""
    NO_IDS = "no_ids"
    """Some of the three fields are missing, or the lists do not match each other."""


class GymModelCall(Struct):
    item: JsonMapping
    """The item that has its ids."""
    read: list[int]
    """The part of its prompt that is new."""
    tokens: list[int]
    logprobs: list[float]


class GymModelCalls(Struct):
    calls: list[GymModelCall]
    """Calls up to the first flaw."""
    flaw: TokenIdFlaw | None = None
    why: str = ""


def model_calls(items: Sequence[Any]) -> GymModelCalls:
    """Reads items of `response.output`; those without ids are not from the model."""
    found = GymModelCalls([])
    seen: list[int] = []
    for item in items:
        if not isinstance(item, Mapping) or not item.get(GENERATION):
            continue
        prompt, tokens, logprobs = _ids(item.get(PROMPT)), _ids(item.get(GENERATION)), item.get(LOGPROBS)
        if not prompt or not tokens or not isinstance(logprobs, list):
            return _flawed(found, TokenIdFlaw.NO_IDS, f"its items lack some of {', '.join(TOKEN_FIELDS)}")
        if len(tokens) != len(logprobs):
            return _flawed(found, TokenIdFlaw.NO_IDS, f"{len(tokens)} token ids with {len(logprobs)} logprobs")
        if not all(isinstance(one, int | float) and math.isfinite(one) for one in logprobs):
            return _flawed(found, TokenIdFlaw.NO_LOGPROB, "a logprob is not a number")
        if prompt[: len(seen)] != seen:
            why = (
                f"the prompt of model call {len(found.calls) + 1} does not begin with the tokens of the calls before "
                "it; the agent or a chat template has changed earlier messages"
            )
            return _flawed(found, TokenIdFlaw.NOT_CONTIGUOUS, why)
        found.calls.append(GymModelCall(item, prompt[len(seen) :], tokens, [float(one) for one in logprobs]))
        seen = prompt + tokens
    return found


def _flawed(found: GymModelCalls, flaw: TokenIdFlaw, why: str) -> GymModelCalls:
    found.flaw, found.why = flaw, why
    return found


def _ids(found: object) -> list[int]:
    return found if isinstance(found, list) and all(type(one) is int for one in found) else []
