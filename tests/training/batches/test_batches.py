"""Batches: only what the policy drew is learned from, with the weight it should have, and nobody is lost silently."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config.algorithm import AdvantageKind
from palestra.training.batches.compared_rewards import is_zero_variance
from palestra.training.batches.grpo_batch import DropReason, TrainingBatch, build_batch, trainable_rows
from palestra.training.custom_functions import FunctionError
from palestra.types.rollouts import Group, Rollout, RolloutStop
from tests.properties import examples
from tests.training.records import group_of, make_config, make_group, make_rollout, make_turn

PLAIN: dict[str, Any] = {"advantage": "mean_baseline", "normalize": "none"}


CENTRED = [
    *(AdvantageKind.GRPO, AdvantageKind.MEAN_BASELINE, AdvantageKind.LEAVE_ONE_OUT),
    *(AdvantageKind.DR_GRPO, AdvantageKind.BATCH_STD, AdvantageKind.MAXRL),
]


def by_rollout(batch: TrainingBatch) -> dict[str, Any]:
    return {sequence.rollout: sequence for sequence in batch.sequences}


def test_a_rollout_becomes_a_row_in_which_only_sampled_tokens_count():
    turns = [make_turn(2, logprob=-0.1), make_turn(3, observation=2, logprob=-0.2)]
    group = group_of("g", [make_rollout("g-0", 1.0, turns), make_rollout("g-1", 0.0)])
    row = by_rollout(build_batch([group], make_config(algorithm=PLAIN)))["g-0"]
    assert row.tokens == [1, 2, 10, 11, 900, 901, 10, 11, 12]
    assert row.mask == [False, False, True, True, False, False, True, True, True]
    assert row.logprobs == [0, 0, -0.1, -0.1, 0, 0, -0.2, -0.2, -0.2]
    assert row.advantages == [0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5, 0.5]


def test_failed_and_ungraded_rollouts_are_in_no_baseline():
    group = make_group("g", [1.0, 0.0, None])
    group.rollouts += [make_rollout("g-3", None), make_rollout("g-4", math.nan), make_rollout("g-5", math.inf)]
    group.rollouts.append(make_rollout("g-6", -100.0, stop=RolloutStop.STALE))
    batch = build_batch([group], make_config(algorithm=PLAIN))
    assert {name: row.advantages[-1] for name, row in by_rollout(batch).items()} == {"g-0": 0.5, "g-1": -0.5}
    assert batch.dropped == {DropReason.FAILED: 2, DropReason.UNGRADED: 3}


def test_an_overlong_rollout_teaches_nothing_but_is_in_the_baseline():
    group = make_group("g", [1.0, 0.0])
    group.rollouts.append(make_rollout("g-2", -1.0, [make_turn(), make_turn(cut=True)]))
    masked = build_batch([group], make_config(algorithm=PLAIN))
    assert masked.dropped == {DropReason.OVERLONG: 1}
    assert {name: row.advantages[-1] for name, row in by_rollout(masked).items()} == {"g-0": 1.0, "g-1": 0.0}
    kept = build_batch([group], make_config(algorithm=PLAIN, rollout={"endings": {"length": "grade"}}))
    assert by_rollout(kept)["g-2"].advantages[-1] == -1.0


@pytest.mark.parametrize("stop", [RolloutStop.MAX_TURNS, RolloutStop.CONTEXT, RolloutStop.TOOL_CALLS])
def test_a_masked_ending_teaches_nothing_but_is_in_the_baseline(stop: RolloutStop):
    group = make_group("g", [1.0, 0.0])
    group.rollouts.append(make_rollout("g-2", -1.0, stop=stop))
    masked = build_batch([group], make_config(algorithm=PLAIN, rollout={"endings": {stop: "mask"}}))
    assert masked.dropped == {DropReason.MASKED: 1}
    assert {name: row.advantages[-1] for name, row in by_rollout(masked).items()} == {"g-0": 1.0, "g-1": 0.0}


def test_a_rollout_that_ran_out_of_time_counts_if_it_has_a_reward():
    group = make_group("g", [1.0])
    group.rollouts += [make_rollout("g-1", 0.0, stop=RolloutStop.TIMEOUT)]
    assert len(build_batch([group], make_config(rollout={"endings": {"timeout": 0}})).sequences) == 2


def test_only_the_last_generated_turn_decides_about_overlong():
    """A run of the reference filtered on the last token of the whole response and so dropped every finished rollout."""
    earlier_cut = make_rollout("g-0", 1.0, [make_turn(cut=True), make_turn(observation=3)])
    out_of_turns = make_rollout("g-1", 0.0, stop=RolloutStop.MAX_TURNS)
    assert len(build_batch([group_of("g", [earlier_cut, out_of_turns])], make_config()).sequences) == 2


def test_truncation_keeps_the_prompt_and_cuts_everything_alike():
    turns = [make_turn(2, logprob=-0.1), make_turn(5, observation=2, logprob=-0.2)]
    group = group_of("g", [make_rollout("g-0", 1.0, turns), make_rollout("g-1", 0.0)])
    batch = build_batch([group], make_config(algorithm=PLAIN, data={"max_sequence_length": 7}))
    row = by_rollout(batch)["g-0"]
    assert (row.tokens, row.mask) == ([1, 2, 10, 11, 900, 901, 10], [False] * 2 + [True] * 2 + [False] * 2 + [True])
    assert (row.logprobs[-1], row.advantages[-1]) == (-0.2, 0.5)
    assert batch.truncated == 1


@pytest.mark.parametrize("length", [6, 7, 20])
def test_a_prompt_that_leaves_no_room_drops_its_rollout(length):
    group = group_of("g", [make_rollout("g-0", 1.0, prompt=list(range(length))), make_rollout("g-1", 0.0)])
    batch = build_batch([group], make_config(algorithm=PLAIN, data={"max_sequence_length": 6}))
    assert batch.dropped == {DropReason.PROMPT_TOO_LONG: 1}
    assert list(by_rollout(batch)) == ["g-1"]


def test_empty_and_broken_rollouts_have_their_own_reasons():
    wrong_length = make_turn(3)
    wrong_length.logprobs.pop()
    rollouts = [
        make_rollout("g-0", 1.0),
        make_rollout("g-1", 0.0, []),
        make_rollout("g-2", 0.0, [make_turn(0)]),
        make_rollout("g-3", 0.0, [wrong_length]),
        make_rollout("g-4", 0.0, [make_turn(logprob=math.nan)]),
        make_rollout("g-5", 0.0, prompt=[]),
    ]
    batch = build_batch([group_of("g", rollouts)], make_config(algorithm=PLAIN))
    assert batch.dropped == {DropReason.EMPTY: 2, DropReason.BROKEN: 3}
    assert by_rollout(batch)["g-0"].advantages[-1] == pytest.approx(5 / 6)


@pytest.mark.parametrize("policy", ["refill", "drop", "keep"])
def test_groups_that_teach_nothing_are_counted_and_only_kept_when_asked(policy):
    groups = [make_group("a", [1.0, 1.0]), make_group("b", [1.0, 0.0]), make_group("c", [None, None])]
    config = make_config(data={"zero_variance": policy})
    batch = build_batch(groups, config)
    assert sum(is_zero_variance(group, config) for group in groups) == 2
    assert len(batch.sequences) == (4 if policy == "keep" else 2)
    assert batch.dropped == {DropReason.FAILED: 2} | ({} if policy == "keep" else {DropReason.ZERO_VARIANCE: 2})


def test_zero_variance_is_judged_with_penalties():
    group = make_group("g", [1.0, 1.0])
    group.rollouts[0].metrics = {"parse_error": 1.0}
    assert is_zero_variance(group, make_config())
    assert not is_zero_variance(group, make_config(penalty={"format": 0.1}))
    assert is_zero_variance(make_group("g", [1.0, None]), make_config())
    assert is_zero_variance(make_group("g", []), make_config())


def lengths_1_and_3() -> Group:
    return group_of("g", [make_rollout("g-0", 1.0, [make_turn(1)]), make_rollout("g-1", 0.0, [make_turn(3)])])


@pytest.mark.parametrize(
    ("algorithm", "short", "long"),
    [
        ({"normalize": "none"}, 0.5, -0.5),
        ({"normalize": "tokens"}, 0.5 / 4, -0.5 / 4),
        ({"normalize": "sequences"}, 0.5 / (1 * 2), -0.5 / (3 * 2)),
        ({"normalize": "tokens", "advantage": "dr_grpo"}, 0.5 / (10 * 2), -0.5 / (10 * 2)),
    ],
)
def test_sums_over_tokens_become_the_mean_that_was_asked_for(algorithm, short, long):
    config = make_config(algorithm={"advantage": "mean_baseline", **algorithm}, rollout={"max_tokens": 10})
    rows = by_rollout(build_batch([lengths_1_and_3()], config))
    assert rows["g-0"].advantages[-1] == pytest.approx(short)
    assert rows["g-1"].advantages[-1] == pytest.approx(long)


def test_minibatches_are_the_same_for_the_same_seed_and_whole():
    groups = [make_group(f"g{i}", [1.0, 0.0, 0.5]) for i in range(5)]
    config = make_config(algorithm={"minibatches": 4})
    first, again = build_batch(groups, config), build_batch(list(reversed(groups)), config)
    assert first == again
    assert sorted(map(len, first.minibatches)) == [3, 4, 4, 4]
    assert len({row.rollout for row in first.sequences}) == 15
    other = build_batch(groups, make_config(seed=1, algorithm={"minibatches": 4}))
    assert [row.rollout for row in other.sequences] != [row.rollout for row in first.sequences]


def test_more_minibatches_than_sequences_leaves_none_empty():
    batch = build_batch([make_group("g", [1.0, 0.0])], make_config(algorithm={"minibatches": 5}))
    assert list(map(len, batch.minibatches)) == [1, 1]


def test_the_control_deals_the_same_rewards_to_others():
    groups = [make_group(f"g{i}", [1.0, 1.0, 0.0, 0.0]) for i in range(8)]
    true, control = make_config(algorithm=PLAIN), make_config(algorithm={**PLAIN, "shuffle_rewards": True})
    dealt = build_batch(groups, control)
    assert dealt == build_batch(groups, control)
    rows, truth = by_rollout(dealt), by_rollout(build_batch(groups, true))
    moved = sum(rows[name].advantages[-1] * truth[name].advantages[-1] <= 0 for name in rows.keys() & truth.keys())
    assert moved > 5
    assert [rollout.reward for rollout in groups[0].rollouts] == [1.0, 1.0, 0.0, 0.0]


def test_the_kl_penalty_asks_for_what_it_needs():
    config = make_config(penalty={"kl": 0.1}, algorithm=PLAIN)
    groups = [make_group("a", [1.0, 0.0]), make_group("b", [1.0, 1.0])]
    with pytest.raises(ValueError, match="needs the base model's logprobs"):
        build_batch(groups, config)
    expected = trainable_rows(groups, config)
    assert [rollout.id for rollout in expected] == ["a-0", "a-1"]
    base = {"a-0": [-0.5] * 5, "a-1": [-1.5] * 5}  # d: 0 and 1
    rows = by_rollout(build_batch(groups, config, base))
    assert rows["a-0"].advantages[-1] == pytest.approx(0.5 + 0.1 * 0.5)
    assert rows["a-1"].advantages[-1] == pytest.approx(-0.5 - 0.1 * 0.5)


def test_nothing_in_nothing_out():
    assert build_batch([], make_config()) == TrainingBatch(minibatches=[])


TURNS = st.builds(make_turn, st.integers(0, 6), st.integers(0, 4), cut=st.booleans())
REWARDS = st.one_of(st.none(), st.floats(-5, 5), st.just(math.nan))
ROLLOUTS = st.tuples(REWARDS, st.lists(TURNS, max_size=3), st.integers(0, 8), st.sampled_from(RolloutStop))


def named(groups: list[list[tuple]]) -> list[Group]:
    return [
        group_of(
            f"g{g}",
            [
                make_rollout(f"g{g}-{i}", reward, turns, prompt=list(range(100, 100 + prompt)), stop=stop)
                for i, (reward, turns, prompt, stop) in enumerate(group)
            ],
        )
        for g, group in enumerate(groups)
    ]


def of_kind(kind: AdvantageKind) -> dict[str, Any]:
    return {"advantage": kind, "reward_parts": {"reward": 1.0} if kind is AdvantageKind.GDPO else {}}


CONFIGS = st.builds(
    lambda advantage, normalize, parts, limit, overlong, variance, shuffle: make_config(
        algorithm={
            **of_kind(advantage),
            "normalize": normalize,
            "minibatches": parts,
            "shuffle_rewards": shuffle and advantage is not AdvantageKind.GDPO,
        },
        data={"max_sequence_length": limit, "zero_variance": variance},
        penalty={"length": 0.5, "length_window": 8, "cut": 0.25},
        rollout={"max_context": 16, "group_size": 4, "endings": {"length": overlong}},
    ),
    st.sampled_from(AdvantageKind),
    st.sampled_from(["tokens", "sequences", "none"]),
    st.integers(1, 4),
    st.integers(1, 24),
    st.sampled_from(["mask", "grade"]),
    st.sampled_from(["refill", "keep"]),
    st.booleans(),
)


@examples(150)
@given(st.lists(st.lists(ROLLOUTS, max_size=5), max_size=4), CONFIGS)
def test_whatever_comes_the_batch_is_sound(groups, config):
    played = named(groups)
    rollouts: dict[str, Rollout] = {one.id: one for group in played for one in group.rollouts}
    batch = build_batch(played, config)
    assert len(batch.sequences) + sum(batch.dropped.values()) == len(rollouts)
    assert all(batch.minibatches)
    assert [one.id for one in trainable_rows(played, config)] == sorted(row.rollout for row in batch.sequences)
    for row in batch.sequences:
        rollout = rollouts[row.rollout]
        assert len(row.tokens) == len(row.mask) == len(row.logprobs) == len(row.advantages)
        assert len(rollout.prompt) < len(row.tokens) <= config.data.max_sequence_length
        assert row.tokens[: len(rollout.prompt)] == rollout.prompt
        assert any(row.mask)
        assert not any(row.mask[: len(rollout.prompt)])
        assert all(token < 100 for token, sampled in zip(row.tokens, row.mask, strict=True) if sampled)
        for sampled, logprob, advantage in zip(row.mask, row.logprobs, row.advantages, strict=True):
            assert math.isfinite(advantage)
            assert sampled or logprob == advantage == 0.0


def test_with_reinforce_plus_plus_groups_without_variance_teach_too():
    groups = [make_group("g0", [1.0, 1.0]), make_group("g1", [1.0, 0.0])]
    config = make_config(algorithm={"advantage": "reinforce++", "normalize": "none"})
    assert not is_zero_variance(groups[0], config)
    found = {name: row.advantages[-1] for name, row in by_rollout(build_batch(groups, config)).items()}
    low, high = -0.75 / math.sqrt(3 / 16), 0.25 / math.sqrt(3 / 16)
    assert found == {
        name: pytest.approx(one, rel=1e-4) for name, one in zip(found, [high, high, high, low], strict=True)
    }


def test_gdpo_compares_metrics_of_the_environment():
    group = make_group("g", [1.0, 1.0, 1.0])
    for rollout, short in zip(group.rollouts, (0.0, 1.0, 1.0), strict=True):
        rollout.metrics["short"] = short
    parts = {"reward": 1.0, "short": 0.5}
    config = make_config(algorithm={"advantage": "gdpo", "reward_parts": parts, "normalize": "none"})
    assert not is_zero_variance(group, config)
    found = [row.advantages[-1] for row in build_batch([group], config).sequences]
    assert found == [pytest.approx(one, rel=1e-4) for one in (-math.sqrt(2), math.sqrt(0.5), math.sqrt(0.5))]
    misspelt = make_config(algorithm={"advantage": "gdpo", "reward_parts": {"shrot": 1.0}})
    with pytest.raises(FunctionError, match="no rollout of this step reports 'shrot'; did you mean short"):
        build_batch([group], misspelt)


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        ({"advantage": "gdpo"}, "needs reward_parts"),
        ({"reward_parts": {"reward": 1.0}}, "for advantage 'gdpo' only"),
        ({"advantage": "gdpo", "reward_parts": {"reward": 1.0}, "shuffle_rewards": True}, "has several"),
    ],
)
def test_parts_without_gdpo_and_gdpo_without_parts_are_refused(algorithm, problem):
    with pytest.raises(ValueError, match=problem):
        make_config(algorithm=algorithm)


@examples(60)
@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=6), min_size=1, max_size=4),
    st.sampled_from(CENTRED),
    st.integers(1, 3),
)
def test_weights_of_a_minibatch_add_up_to_one(rewards, kind, parts):
    groups = [make_group(f"g{i}", list(group)) for i, group in enumerate(rewards)]
    data = {"zero_variance": "keep"}
    bare = build_batch(groups, make_config(data=data, algorithm={"advantage": kind, "normalize": "none"}))
    plain = by_rollout(bare)
    sums = Counter()
    for row in bare.sequences:
        sums[row.rollout.partition("-")[0]] += row.advantages[-1]
    assert all(abs(total) < 1e-6 for total in sums.values())
    for normalize in ("tokens", "sequences"):
        algorithm = {"advantage": kind, "normalize": normalize, "minibatches": parts}
        batch = build_batch(groups, make_config(data=data, rollout={"max_tokens": 3}, algorithm=algorithm))
        for minibatch in batch.minibatches:
            scales = [
                scaled / plain[row.rollout].advantages[-1]
                for row in minibatch
                for scaled, sampled in zip(row.advantages, row.mask, strict=True)
                if sampled and abs(plain[row.rollout].advantages[-1]) > 1e-9
            ]
            if len(scales) == 3 * len(minibatch):  # all rollouts here have 3 tokens, so every way of counting agrees
                assert math.fsum(scales) == pytest.approx(1.0)
