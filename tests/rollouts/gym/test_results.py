"""An agent's answer as a rollout: its tokens hang together, or it is not learned from."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.rollouts.gym.results import fill
from palestra.rollouts.sources import blank_rollout
from palestra.types import StopReason
from palestra.types.rollouts import Rollout, RolloutStop
from tests.properties import examples
from tests.training.scripted import a_request, chat_tokenizer

IDS = st.lists(st.integers(5, 400), min_size=1, max_size=6)
CALLS = st.lists(st.tuples(IDS, IDS), min_size=1, max_size=5)


def item(prompt: list[int], tokens: list[int], logprobs: list[Any] | None = None) -> dict[str, Any]:
    return {
        "type": "message",
        "prompt_token_ids": prompt,
        "generation_token_ids": tokens,
        "generation_log_probs": [-0.5] * len(tokens) if logprobs is None else logprobs,
    }


def answer(*items: dict[str, Any], reward: Any = 1.0, **more: Any) -> dict[str, Any]:
    cut = more.pop("cut", False)
    details = {"reason": "max_output_tokens"} if cut else None
    status = "incomplete" if cut else "completed"
    return {
        "response": {"output": list(items), "status": status, "incomplete_details": details},
        "reward": reward,
        **more,
    }


def read(result: dict[str, Any]) -> Rollout:
    rollout = blank_rollout(a_request(), 0, 7)
    fill(rollout, result, chat_tokenizer(), version=3)
    return rollout


TOOL = {"type": "function_call_output", "call_id": "c", "output": "4"}


@examples(50)
@given(CALLS)
def test_calls_that_hang_together_become_turns_with_all_their_tokens(calls: list[tuple[list[int], list[int]]]) -> None:
    seen: list[int] = []
    items: list[dict[str, Any]] = []
    for read_ids, tokens in calls:
        items += [{"type": "reasoning", "summary": []}, item(seen + read_ids, tokens), TOOL]
        seen = seen + read_ids + tokens
    rollout = read(answer(*items))
    tokens = rollout.prompt + [one for turn in rollout.turns for one in [*turn.observation, *turn.tokens]]
    assert tokens == seen
    assert [turn.tokens for turn in rollout.turns] == [tokens for _, tokens in calls]
    assert rollout.is_graded
    assert rollout.reward == 1.0
    assert {turn.version for turn in rollout.turns} == {3}
    assert rollout.metrics["not_contiguous"] == 0.0


def test_turns_have_the_times_that_the_agent_measured() -> None:
    items = [item([1], [2]), TOOL, item([1, 2, 3], [4])]
    rollout = read(answer(*items, _ng_turn_times=[(0.5, 0.25), (1.0, 0.0)]))
    assert [(turn.sample_s, turn.env_s) for turn in rollout.turns] == [(0.5, 0.25), (1.0, 0.0)]
    assert "_ng_turn_times" not in {*rollout.metrics, *rollout.verdict}


def test_a_call_that_does_not_go_on_from_the_last_is_masked_and_counted() -> None:
    rollout = read(answer(item([5, 6], [7, 8]), item([5, 6, 7, 9, 10], [11])))
    assert rollout.stop is RolloutStop.MASKED
    assert rollout.stop.is_failure
    assert rollout.reward is None
    assert rollout.metrics["not_contiguous"] == 1.0
    assert "model call 2" in (rollout.error or "")


def test_a_sample_that_its_environment_flags_is_masked() -> None:
    rollout = read(answer(item([5], [6]), mask_sample=True))
    assert (rollout.stop, rollout.reward) == (RolloutStop.MASKED, None)
    assert rollout.metrics["not_contiguous"] == 0.0
    assert read(answer(item([5], [6]), mask_sample=False)).is_graded


def test_numbers_of_the_answer_are_metrics_and_so_are_the_parts_of_its_reward() -> None:
    more = {"score": 2, "is_right": True, "said": "4", "_ng_task_index": 9, "worst": -math.inf}
    rollout = read(answer(item([5], [6]), reward_components={"form": 0.5, "name": "x"}, **more))
    assert rollout.metrics == {"score": 2.0, "is_right": 1.0, "reward/form": 0.5, "not_contiguous": 0.0}


@pytest.mark.parametrize(
    ("result", "stop", "error"),
    [
        (answer({"type": "message"}), RolloutStop.ENV_FAILED, "return_token_id_information: true"),
        (answer(item([5], [6], [math.nan])), RolloutStop.SAMPLING_FAILED, "a logprob is not a number"),
        (answer(item([5], [6], [None])), RolloutStop.SAMPLING_FAILED, "a logprob is not a number"),
        (answer(item([5], [6, 7], [-1.0])), RolloutStop.ENV_FAILED, "2 token ids with 1 logprobs"),
        (answer(item([], [6])), RolloutStop.ENV_FAILED, "its items lack some of"),
        (answer(item([5], ["6"])), RolloutStop.ENV_FAILED, "its items lack some of"),  # pyright: ignore[reportArgumentType]
        (answer(item([5], [6]), reward="1"), RolloutStop.ENV_FAILED, "its reward is not a number"),
        (answer(item([5], [6]), reward=math.nan), RolloutStop.ENV_FAILED, "its reward is not a number"),
        ({"reward": 1.0}, RolloutStop.ENV_FAILED, "no response.output"),
    ],
)
def test_what_cannot_be_learned_from_is_a_record_that_says_why(
    result: dict[str, Any], stop: RolloutStop, error: str
) -> None:
    rollout = read(result)
    assert (rollout.stop, rollout.reward) == (stop, None)
    assert error in (rollout.error or "")


def test_a_last_call_that_was_cut_is_told_from_one_without_room() -> None:
    cut = read(answer(item([5], [6]), cut=True))
    assert (cut.stop, cut.turns[-1].stop, cut.reward) == (RolloutStop.LENGTH, StopReason.LENGTH, 1.0)
    full = read(answer(item([5], [6]), TOOL, {"type": "message"}, cut=True))
    assert (full.stop, full.turns[-1].stop, full.reward) == (RolloutStop.CONTEXT, StopReason.STOP, 1.0)
    nothing = read(answer({"type": "message"}, cut=True))
    assert (nothing.stop, nothing.turns, nothing.reward) == (RolloutStop.CONTEXT, [], None)
