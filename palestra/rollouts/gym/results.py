"""Converts an agent's answer to a rollout: the tokens of its model calls, its reward, its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from palestra.chat import ChatTokenizer
from palestra.environments.gym.calls import GENERATION, GymModelCall, TokenIdFlaw, model_calls
from palestra.environments.step_results import verdict_of
from palestra.rollouts.sources import ERROR_LENGTH, set_turn_times
from palestra.types import StopReason
from palestra.types.gym import AGENT_REF, MASK_SAMPLE, PARAMS, TURN_TIMES
from palestra.types.gym_failures import FailureClass
from palestra.types.rollouts import Rollout, RolloutStop, Turn
from palestra.util.json_types import JsonMapping, JsonObject

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
