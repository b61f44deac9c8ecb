"""Rollouts that a limit has ended are worth what the config says, whoever played them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from palestra.config.endings import DistillEndingsConfig, EndingsConfig
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.training.collecting.endings import EndedRollouts
from palestra.types.rollouts import Group, GroupRequest, Rollout, RolloutStop
from tests.training.records import group_of, make_config, make_rollout, make_turn
from tests.training.scripted import ScriptedSampler


class Played:
    """A source whose one group has been played."""

    def __init__(self, rollout: Rollout) -> None:
        self._group = group_of("g", [rollout])

    async def play(self, requests: Sequence[GroupRequest], sampler: PolicySampler) -> AsyncIterator[Group]:
        yield self._group

    async def close(self) -> None: ...


def ended(rollout: Rollout, **endings: Any) -> Rollout:
    async def play() -> None:
        source = EndedRollouts(Played(rollout), EndingsConfig(**endings))
        assert [group.id async for group in source.play([], ScriptedSampler(""))] == ["g"]

    asyncio.run(play())
    return rollout


@pytest.mark.parametrize("stop", ["max_turns", "length", "context", "timeout", "tool_calls", "parse_failures"])
def test_a_number_takes_the_place_of_all_rewards(stop: str) -> None:
    turns = [make_turn(), make_turn(cut=stop == "length")]
    turns[0].reward = 0.5
    rollout = ended(make_rollout("g-0", 0.5, turns, stop=RolloutStop(stop)), **{stop: -1.0})
    assert (rollout.reward, [turn.reward for turn in rollout.turns], rollout.is_graded) == (-1.0, [0.0, 0.0], True)


@pytest.mark.parametrize("stop", [RolloutStop.DONE, RolloutStop.ENV_FAILED, RolloutStop.STALE])
def test_what_no_limit_has_ended_stays_as_it_is(stop: RolloutStop) -> None:
    zeros = dict.fromkeys(EndingsConfig.model_fields, 0.0)
    rollout = ended(make_rollout("g-0", None if stop is RolloutStop.ENV_FAILED else 0.5, stop=stop), **zeros)
    assert rollout.reward == (None if stop is RolloutStop.ENV_FAILED else 0.5)


def test_a_rollout_without_a_reward_gets_one_for_running_out_of_time() -> None:
    late = make_rollout("g-0", None, stop=RolloutStop.TIMEOUT)
    assert not ended(late).is_graded
    assert ended(late, timeout=0.0).is_graded


def test_a_cut_last_turn_counts_although_its_environment_was_done() -> None:
    assert ended(make_rollout("g-0", 1.0, [make_turn(cut=True)]), length=0.0).reward == 0.0
    earlier = make_rollout("g-0", 1.0, [make_turn(cut=True), make_turn()])
    assert ended(earlier, length=0.0).reward == 1.0


def test_true_is_no_reward() -> None:
    with pytest.raises(ValueError, match="true is no reward; give grade, mask or a number"):
        EndingsConfig(length=True)


def test_a_teacher_also_scores_what_was_cut() -> None:
    assert EndingsConfig().length == "mask"
    assert DistillEndingsConfig(timeout=0).length == "grade"


@pytest.mark.parametrize("limit", ["max_tool_calls", "max_parse_failures"])
@pytest.mark.parametrize(
    ("played", "instead"),
    [
        ({"environments": [{"name": "gym:sums", "config": {"head": "http://127.0.0.1:1"}}]}, "max_steps"),
        ({"environments": [{"name": "coding"}], "rollouts": "agent"}, r"agent\.timeout_s"),
    ],
    ids=["gym", "agent"],
)
def test_a_limit_that_nobody_would_count_is_refused(played: dict[str, Any], instead: str, limit: str) -> None:
    make_config(**played)
    with pytest.raises(ValueError, match=rf"rollout\.{limit} has no effect .* set {instead}"):
        make_config(rollout={limit: 3}, **played)
    mixed = [*played["environments"], {"name": "stockroom"}]
    if "rollouts" not in played:
        assert make_config(rollout={limit: 3}, environments=mixed).rollout.endings.parse_failures == "grade"
