"""Converts an agent's answer to a rollout: the tokens of its model calls, its reward, its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct

from palestra.chat import ChatTokenizer
from palestra.environments.step_results import verdict_of
from palestra.rollouts.sources import ERROR_LENGTH, set_turn_times
from palestra.types import StopReason
from palestra.types.gym import AGENT_REF, MASK_SAMPLE, PARAMS, TOKEN_FIELDS, TURN_TIMES
from palestra.types.gym_failures import FailureClass
from palestra.types.rollouts import Rollout, RolloutStop, Turn
from palestra.util.json_types import JsonMapping, JsonObject

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


COMPONENTS = "reward_components"
OWN_FIELDS = ("reward", MASK_SAMPLE)
PLAYED = frozenset({"response", PARAMS, AGENT_REF})
"""Fields of the row and of the conversation."""
STOPS = {
    TokenIdFlaw.NOT_CONTIGUOUS: RolloutStop.MASKED,
    TokenIdFlaw.NO_LOGPROB: RolloutStop.SAMPLING_FAILED,
    TokenIdFlaw.NO_IDS: RolloutStop.ENV_FAILED,
}
NO_IDS = (
    "its answers have no token ids; set return_token_id_information: true at the gym's model server, as "
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml does"
)


class NotTrainable(Exception):
    """An answer that says nothing about the policy, and why."""

    def __init__(self, stop: RolloutStop, reason: str) -> None:
        super().__init__(reason)
        self.stop = stop


def fill(rollout: Rollout, result: JsonMapping, tokenizer: ChatTokenizer, version: int) -> None:
    """Fills the rollout in place. An answer that cannot be trained on gets a stop reason that says so, and an error."""
    rollout.metrics = {**numbers(result), TokenIdFlaw.NOT_CONTIGUOUS: 0.0}
    rollout.verdict = verdict_of(verdict_fields(result))
    try:
        _take_turns(rollout, result, tokenizer, version)
        reward = reward_of(result)
    except NotTrainable as error:
        rollout.stop = error.stop
        rollout.failure = FailureClass.BAD_ANSWER if error.stop is RolloutStop.ENV_FAILED else ""
        rollout.error = " ".join(str(error).split())[:ERROR_LENGTH]
        return
    set_turn_times(rollout, result.get(TURN_TIMES))
    if not rollout.turns:
        rollout.error = "its prompt has no room for a turn in the model's context"
        return
    rollout.reward = rollout.turns[-1].reward = reward


def numbers(result: JsonMapping) -> dict[str, float]:
    """Returns every number of the answer, and the components of its reward."""
    components = result.get(COMPONENTS)
    named = {f"reward/{name}": value for name, value in components.items()} if isinstance(components, Mapping) else {}
    own = {name: value for name, value in result.items() if name not in OWN_FIELDS and not name.startswith("_ng_")}
    found = {name: value for name, value in {**own, **named}.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in found.items() if abs(value) < math.inf}


def verdict_fields(result: JsonMapping) -> JsonObject:
    """Returns what the answer says beside the conversation: what was expected, what was found, what a judge said."""
    return {name: value for name, value in result.items() if name not in PLAYED and not name.startswith("_ng_")}


def reward_of(result: JsonMapping) -> float:
    """Raises NotTrainable."""
    if result.get(MASK_SAMPLE):
        raise NotTrainable(RolloutStop.MASKED, f"its environment sets {MASK_SAMPLE}")
    reward = result.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise NotTrainable(RolloutStop.ENV_FAILED, f"its reward is not a number: {str(reward)[:100]}")
    return float(reward)


def _take_turns(rollout: Rollout, result: JsonMapping, tokenizer: ChatTokenizer, version: int) -> None:
    response = result.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(response, Mapping) or not isinstance(output, list):
        raise NotTrainable(RolloutStop.ENV_FAILED, "its answer has no response.output")
    found = model_calls(output)
    for call in found.calls:
        _add_turn(rollout, call, tokenizer, version)
    if found.flaw is not None:
        rollout.metrics[TokenIdFlaw.NOT_CONTIGUOUS] = float(found.flaw is TokenIdFlaw.NOT_CONTIGUOUS)
        raise NotTrainable(STOPS[found.flaw], found.why)
    last = output[-1] if output else None
    _end(rollout, response, was_last_sampled=isinstance(last, Mapping) and bool(last.get(GENERATION)))


def _add_turn(rollout: Rollout, call: GymModelCall, tokenizer: ChatTokenizer, version: int) -> None:
    is_first = not rollout.turns
    if is_first:
        rollout.prompt = call.read
    elif call.read:
        rollout.messages.append({"role": "user", "content": tokenizer.decode(call.read)})
    turn = Turn(
        observation=[] if is_first else call.read,
        tokens=call.tokens,
        logprobs=call.logprobs,
        stop=StopReason.STOP,
        version=version,
        text=tokenizer.decode(call.tokens),
    )
    rollout.messages.append({"role": "assistant", "content": turn.text})
    rollout.turns.append(turn)


def _end(rollout: Rollout, response: JsonMapping, *, was_last_sampled: bool) -> None:
    """Sets the end of an answer that was ended by its length: either its last call was cut, or that call had no room at
    all and has no tokens."""
    is_cut = response.get("status") == "incomplete" or bool(response.get("incomplete_details"))
    if is_cut and rollout.turns and was_last_sampled:
        rollout.stop = RolloutStop.LENGTH
        rollout.turns[-1].stop = StopReason.LENGTH
    elif is_cut:
        rollout.stop = RolloutStop.CONTEXT
    elif not rollout.turns:
        raise NotTrainable(RolloutStop.ENV_FAILED, NO_IDS)
