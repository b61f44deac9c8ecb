"""From what was played at the server to what is trained: every sampled token once, every episode once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from palestra.rollouts.episodes.reader import EpisodeReader
from palestra.training.batches.compared_rewards import is_zero_variance
from palestra.training.batches.grpo_batch import DropReason, build_batch
from palestra.training.loops.step_metrics import batch_metrics, rollout_metrics
from palestra.types import StopReason
from palestra.types.episodes import (
    EpisodeError,
    EpisodeInfo,
    EpisodeKind,
    EpisodeResult,
    EpisodeState,
    EpisodeTrajectory,
    GroupState,
    PlayedEpisode,
    PlayedGroup,
)
from palestra.types.pictures import PlacedImage
from palestra.types.rollouts import Branch, Group, RolloutStop
from palestra.types.sampling import VersionSegment
from tests.training.records import group_of, make_config, make_rollout, make_turn
from tests.training.scripted import a_request, chat_tokenizer


def trajectory(
    mask: str, *, first: int = 10, version: int = 7, temperature: float = 1.0, **more: Any
) -> EpisodeTrajectory:
    """`mask`: "r" for a token that was read, "s" for one that was sampled."""
    sampled = [int(one == "s") for one in mask]
    return EpisodeTrajectory(
        tokens=list(range(first, first + len(mask))),
        loss_mask=sampled,
        logprobs=[-0.5 * one for one in sampled],
        temperatures=[temperature * one for one in sampled],
        versions=[version * one for one in sampled],
        trace_id="trace",
        **more,
    )


def played(*episodes: tuple[EpisodeResult, list[EpisodeTrajectory]], **group: Any) -> PlayedGroup:
    members = [
        PlayedEpisode(
            info=EpisodeInfo(
                episode_id=f"e{i}",
                run="r",
                group_id="n/g000000",
                index=i,
                seed=i,
                attempt=1,
                kind=EpisodeKind.TRAIN,
                state=EpisodeState.ENDED,
                priority=0,
                created_at=1.0,
                claimed_at=2.0,
                ended_at=5.5,
                result=result,
            ),
            trajectories=found,
        )
        for i, (result, found) in enumerate(episodes)
    ]
    response = {"number": 1, "group_id": "n/g000000", "task": a_request().task, "kind": EpisodeKind.TRAIN, "reason": ""}
    return PlayedGroup(**response | {"state": GroupState.READY} | group, episodes=members)


def read(group: PlayedGroup, newest: int = 3) -> Group:
    """Version 7 is step 2."""
    return EpisodeReader(chat_tokenizer(), lambda version: version - 5).group(group, a_request(count=2), newest)


def test_turns_are_the_sampled_stretches():
    result = EpisodeResult(step_rewards=[0.25, 0.5], metrics={"turns": 2.0}, metadata={"stop": "max_turns"})
    (rollout,) = read(played((result, [trajectory("rrrssrsss")]))).rollouts
    assert rollout.prompt == [10, 11, 12]
    assert [(turn.observation, turn.tokens) for turn in rollout.turns] == [([], [13, 14]), ([15], [16, 17, 18])]
    assert [turn.reward for turn in rollout.turns] == [0.25, 0.5]
    assert [turn.version for turn in rollout.turns] == [2, 2]
    assert (rollout.reward, rollout.stop, rollout.seconds) == (0.75, RolloutStop.MAX_TURNS, 3.5)
    assert rollout.metrics == {"turns": 2.0}
    assert not rollout.is_cut
    assert [message["role"] for message in rollout.messages][-3:] == ["assistant", "user", "assistant"]


@pytest.mark.parametrize(
    ("times", "known"),
    [
        ([[0.5, 0.25], [1, 0]], [(0.5, 0.25), (1.0, 0.0)]),
        ([[0.5, 0.25]], [(0.0, 0.0)] * 2),
        ([[0.5, "x"], [1, 0]], [(0.0, 0.0)] * 2),
        ("soon", [(0.0, 0.0)] * 2),
    ],
)
def test_turns_have_the_times_that_their_player_reports(times, known):
    result = EpisodeResult(reward=1.0, metadata={"turn_times": times})
    (rollout,) = read(played((result, [trajectory("rrrssrsss")]))).rollouts
    assert [(turn.sample_s, turn.env_s) for turn in rollout.turns] == known


def test_weights_of_a_lineage_that_was_given_up_are_not_newer_than_the_newest():
    (rollout,) = read(played((EpisodeResult(reward=1.0), [trajectory("rs", version=20)])), newest=3).rollouts
    assert rollout.oldest_version == 3


def test_a_cut_answer_and_its_temperature_are_known():
    found = [trajectory("rss", temperature=0.7, is_cut=True)]
    (rollout,) = read(played((EpisodeResult(reward=1.0), found))).rollouts
    assert rollout.turns[-1].stop is StopReason.LENGTH
    assert rollout.temperature == 0.7


@pytest.mark.parametrize(
    ("error", "stop"),
    [
        ("ValueError", RolloutStop.ENV_FAILED),
        ("sampling_failed", RolloutStop.SAMPLING_FAILED),
        ("ungraded", RolloutStop.DONE),
    ],
)
def test_failures_are_records_without_a_reward(error, stop):
    result = EpisodeResult(reward=1.0, error=EpisodeError(type=error, message="no such\nfile"))
    (rollout,) = read(played((result, [trajectory("rs")]))).rollouts
    assert (rollout.stop, rollout.reward, rollout.is_graded) == (stop, None, False)
    assert rollout.error == f"{error}: no such file"


@pytest.mark.parametrize(
    ("reason", "stop"), [("lost: 1 of 2 are left", RolloutStop.LOST), ("stale_weights: 3", RolloutStop.STALE)]
)
def test_a_dropped_group_says_why_and_teaches_nothing(reason, stop):
    group = read(played(state=GroupState.DROPPED, reason=reason))
    assert [(one.stop, one.error, one.is_graded) for one in group.rollouts] == [(stop, reason, False)] * 2
    assert is_zero_variance(group, make_config())


def test_an_episode_without_a_call_counts_but_is_not_trained():
    group = read(played((EpisodeResult(reward=1.0), []), (EpisodeResult(reward=0.0), [trajectory("rs")])))
    batch = build_batch([group], make_config())
    assert len(batch.sequences) == 1
    assert batch.dropped == {DropReason.EMPTY: 1}
    assert batch.sequences[0].advantages[1] < 0


def test_all_trajectories_are_trained_and_the_episode_counts_once():
    many = (EpisodeResult(reward=1.0), [trajectory("rrs"), trajectory("rrrss", first=50, agent="critic")])
    group = read(played(many, (EpisodeResult(reward=0.0), [trajectory("rs")])))
    batch = build_batch([group], make_config(algorithm={"normalize": "none", "advantage": "mean_baseline"}))
    assert {
        row.rollout: [a for a, m in zip(row.advantages, row.mask, strict=True) if m] for row in batch.sequences
    } == {
        "g-0": [0.5],
        "g-0/1": [0.5, 0.5],  # were it counted twice, the mean would be 2/3
        "g-1": [-0.5],
    }
    assert group.rollouts[0].response_length == 3
    found = {**rollout_metrics([group], make_config()), **batch_metrics(batch)}
    assert (found["rollouts/total"], found["batch/sequences"], found["turns/mean"]) == (2, 3, 1.5)


def test_agents_that_are_not_trained_are_left_out():
    """Such as a user that a model plays, whose calls come first."""
    result = EpisodeResult(reward=1.0, metadata={"trained_agents": ["solver", "solver-2"]})
    found = [
        trajectory("rs", first=first, agent=agent) for first, agent in ((10, "user"), (20, "solver"), (30, "solver-2"))
    ]
    rollout = read(played((result, found))).rollouts[0]
    assert [(row.agent, row.prompt) for row in rollout.rows] == [("solver", [20]), ("solver-2", [30])]


def agents(name: str, reward: float, critic: float) -> Any:
    branch = Branch(id=f"{name}/1", prompt=[1], turns=[make_turn(2)], agent="critic")
    return make_rollout(name, reward, branches=[branch], agent="solver", agent_rewards={"critic": critic})


def test_an_agent_with_a_reward_of_its_own_is_compared_with_its_like():
    group = group_of("g", [agents("g-0", 1.0, 3.0), agents("g-1", 0.0, 5.0)])
    config = make_config(algorithm={"normalize": "none", "advantage": "mean_baseline"})
    found = {row.rollout: row.advantages[-1] for row in build_batch([group], config).sequences}
    assert found == {"g-0": 0.5, "g-0/1": -1.0, "g-1": -0.5, "g-1/1": 1.0}


def test_a_group_teaches_where_only_one_agents_rewards_differ():
    group = group_of("g", [agents("g-0", 1.0, 3.0), agents("g-1", 1.0, 5.0)])
    assert not is_zero_variance(group, make_config())
    found = {row.rollout: row.advantages[-1] for row in build_batch([group], make_config()).sequences}
    assert found["g-0"] == 0
    assert found["g-1/1"] > 0


def test_shuffled_rewards_are_not_betrayed_by_an_agents_own():
    group = group_of("g", [agents("g-0", 1.0, 3.0), agents("g-1", 1.0, 5.0)])
    config = make_config(algorithm={"shuffle_rewards": True})
    assert is_zero_variance(group, config)


def test_a_cut_branch_is_left_out_and_the_rest_is_trained():
    rollout = agents("g-0", 1.0, 1.0)
    rollout.branches[0].turns[0].stop = StopReason.LENGTH
    batch = build_batch([group_of("g", [rollout, make_rollout("g-1", 0.0)])], make_config())
    assert sorted(row.rollout for row in batch.sequences) == ["g-0", "g-1"]
    assert not batch.dropped


def test_tokens_of_branches_are_kept(tmp_path):
    from palestra.runs.writer import RunFolder

    group = group_of("g", [agents("g-0", 1.0, 3.0), agents("g-1", 0.0, 5.0)])
    with RunFolder.create(tmp_path, "r", make_config()) as run:
        run.write_rollouts(1, [group], build_batch([group], make_config()).sequences)
        rows = list(run.read_tokens(1))
        assert [(row["id"], row["agent"]) for row in rows][:2] == [("g-0", "solver"), ("g-0/1", "critic")]
        assert all(row["advantages"] for row in rows)
        assert [record["branches"] for record in run.read_rollouts(1)] == [1, 1]


def test_a_turn_that_outlived_its_weights_has_segments():
    line = trajectory("rrsssssrs", version=7)
    line = msgspec.structs.replace(line, versions=[0, 0, 7, 7, 8, 9, 9, 0, 9], inexact_mask=[0] * 5 + [1, 1, 0, 0])
    (rollout,) = read(played((EpisodeResult(reward=1.0), [line])), newest=9).rollouts
    first, second = rollout.turns
    assert first.version == 2
    assert first.segments == [VersionSegment(0, 2), VersionSegment(2, 3), VersionSegment(3, 4, is_exact=False)]
    assert (first.versions, first.inexact_tokens) == ([2, 2, 3, 4, 4], 2)
    assert (second.version, second.segments) == (4, [])
    assert (rollout.oldest_version, rollout.newest_version) == (2, 4)


def test_a_rollout_whose_picture_the_server_lost_is_left_out():
    lost = trajectory("rrss", images=[PlacedImage(1, "0" * 64)])
    kept = trajectory("rs")
    lone, other = read(played((EpisodeResult(reward=1.0), [lost]), (EpisodeResult(reward=0.0), [kept]))).rollouts
    assert (lone.stop, lone.reward, lone.turns) == (RolloutStop.MASKED, None, [])
    assert lone.error is not None
    assert "raise limits.max_kept_picture_bytes" in lone.error
    assert other.reward == 0.0
