"""From an agent's answer to a rollout: the tokens of its model calls, its reward, its numbers.

Owns: what of an answer becomes what of a rollout, which answers teach nothing. Never touches: servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from palestra.chat import ChatTokenizer
from palestra.training.sources import ERROR_LENGTH
from palestra.types import StopReason
from palestra.types.rollouts import Rollout, RolloutStop, Turn

PROMPT, GENERATION, LOGPROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
"""On the last output item of each model call."""
MASK = "mask_sample"
COMPONENTS = "reward_components"
NOT_CONTIGUOUS = "not_contiguous"
"""Its metric, where a call did not go on from the tokens of the one before."""
OWN_FIELDS = ("reward", MASK)
NO_IDS = (
    "its answers have no token ids; the gym's model server should say return_token_id_information: true, as "
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml does"
)


class NotTrainable(Exception):
    """With the stop that it is."""

    def __init__(self, stop: RolloutStop, reason: str) -> None:
        super().__init__(reason)
        self.stop = stop


class Interrupted(NotTrainable):
    """A model call did not go on from the tokens of the one before."""

    def __init__(self, call: int) -> None:
        super().__init__(
            RolloutStop.MASKED,
            f"the prompt of model call {call} does not begin with the tokens of the calls before it; the agent, or a "
            "chat template, has changed what was said",
        )


def fill(rollout: Rollout, result: Mapping[str, Any], tokenizer: ChatTokenizer, version: int) -> None:
    """In place. Always a record: what cannot be trained on has a stop that says so, and an error."""
    rollout.metrics = numbers(result)
    try:
        _take_turns(rollout, result, tokenizer, version)
        if result.get(MASK):
            raise NotTrainable(RolloutStop.MASKED, "its environment says mask_sample")
        reward = result.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise NotTrainable(RolloutStop.ENV_FAILED, f"its reward is no number: {str(reward)[:100]}")
    except NotTrainable as error:
        rollout.stop = error.stop
        rollout.error = " ".join(str(error).split())[:ERROR_LENGTH]
        rollout.metrics[NOT_CONTIGUOUS] = float(isinstance(error, Interrupted))
        return
    rollout.metrics[NOT_CONTIGUOUS] = 0.0
    if not rollout.turns:
        rollout.error = "its prompt has no room for a turn in the model's context"
        return
    rollout.reward = rollout.turns[-1].reward = float(reward)


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """Every number of the answer, and the parts of its reward."""
    components = result.get(COMPONENTS)
    named = {f"reward/{name}": value for name, value in components.items()} if isinstance(components, Mapping) else {}
    own = {name: value for name, value in result.items() if name not in OWN_FIELDS and not name.startswith("_ng_")}
    found = {name: value for name, value in {**own, **named}.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in found.items() if abs(value) < math.inf}


def _take_turns(rollout: Rollout, result: Mapping[str, Any], tokenizer: ChatTokenizer, version: int) -> None:
    response = result.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list):
        raise NotTrainable(RolloutStop.ENV_FAILED, "its answer has no response.output")
    items = [item for item in output if isinstance(item, Mapping)]
    seen: list[int] = []
    for item in items:
        if not item.get(GENERATION):
            continue
        prompt, tokens, logprobs = _call_of(item)
        if not rollout.turns:
            rollout.prompt = prompt
        elif prompt[: len(seen)] != seen:
            raise Interrupted(len(rollout.turns) + 1)
        turn = Turn(
            observation=prompt[len(seen) :] if rollout.turns else [],
            tokens=tokens,
            logprobs=logprobs,
            stop=StopReason.STOP,
            version=version,
            text=tokenizer.decode(tokens),
        )
        if turn.observation:
            rollout.messages.append({"role": "user", "content": tokenizer.decode(turn.observation)})
        rollout.messages.append({"role": "assistant", "content": turn.text})
        rollout.turns.append(turn)
        seen = prompt + tokens
    _end(rollout, response or {}, items)


def _end(rollout: Rollout, response: Mapping[str, Any], items: list[Mapping[str, Any]]) -> None:
    """An answer that ended by length was cut in its last call; or that call had no room at all, and has no tokens."""
    is_cut = response.get("status") == "incomplete" or bool(response.get("incomplete_details"))
    was_last_sampled = bool(items) and bool(items[-1].get(GENERATION))
    if is_cut and rollout.turns and was_last_sampled:
        rollout.stop = RolloutStop.LENGTH
        rollout.turns[-1].stop = StopReason.LENGTH
    elif is_cut:
        rollout.stop = RolloutStop.CONTEXT
    elif not rollout.turns:
        raise NotTrainable(RolloutStop.ENV_FAILED, NO_IDS)


def _call_of(item: Mapping[str, Any]) -> tuple[list[int], list[int], list[float]]:
    prompt, tokens, logprobs = _ids(item.get(PROMPT)), _ids(item.get(GENERATION)), item.get(LOGPROBS)
    if not prompt or not tokens or not isinstance(logprobs, list):
        raise NotTrainable(RolloutStop.ENV_FAILED, f"{PROMPT}, {GENERATION} and {LOGPROBS} are not all on its items")
    if len(tokens) != len(logprobs):
        raise NotTrainable(RolloutStop.ENV_FAILED, f"{len(tokens)} token ids with {len(logprobs)} logprobs")
    if not all(isinstance(one, int | float) and math.isfinite(one) for one in logprobs):
        raise NotTrainable(RolloutStop.SAMPLING_FAILED, "a logprob is no number")
    return prompt, tokens, [float(one) for one in logprobs]


def _ids(found: Any) -> list[int]:
    return found if isinstance(found, list) and all(type(one) is int for one in found) else []
