"""Off-policy corrections: each token's weight by the paper's rule, and what is masked teaches exactly nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config.train import GrpoConfig
from palestra.training.batches.grpo_batch import TrainingBatch, build_batch
from palestra.training.loops.step_metrics import policy_metrics
from palestra.training.policy import PolicyUpdate
from palestra.types.rollouts import Group, TrainSequence, Turn
from tests.properties import examples
from tests.training.records import group_of, make_config, make_rollout, make_turn
from tests.training.trainers import FEW

SAMPLED = [0.5, 0.5, 0.1]
"""The sampler's probabilities of the three tokens that each rollout has sampled."""


def config_of(**correction: Any) -> GrpoConfig:
    plain = {"advantage": "mean_baseline", "normalize": "none"}
    return make_config(algorithm={**plain, "correction": correction})


def sampled_turn(probabilities: list[float]) -> Turn:
    turn = make_turn(len(probabilities))
    turn.logprobs = [math.log(one) for one in probabilities]
    return turn


def two_rollouts(probabilities: list[float] = SAMPLED) -> Group:
    """One with the advantage 0.5 and one with -0.5, sampled alike, each after a prompt of two tokens."""
    return group_of("g", [make_rollout(f"g-{i}", 1.0 - i, [sampled_turn(probabilities)]) for i in range(2)])


def own_logprobs(good: list[float], bad: list[float]) -> dict[str, list[float]]:
    """The trainer's, from its probabilities of the sampled tokens; those of the prompt are -7."""
    return {name: [0.0, -7.0, *map(math.log, own)] for name, own in (("g-0", good), ("g-1", bad))}


def corrected(good: list[float], bad: list[float], **correction: Any) -> TrainingBatch:
    return build_batch([two_rollouts()], config_of(**correction), own_logprobs=own_logprobs(good, bad))


def advantages_of(batch: TrainingBatch) -> list[list[float]]:
    rows = sorted(batch.sequences, key=lambda row: row.rollout)
    assert all(row.advantages[:2] == [0.0, 0.0] for row in rows)
    return [row.advantages[2:] for row in rows]


def test_truncated_importance_sampling_weighs_each_token_by_its_bounded_ratio():
    batch = corrected([0.25, 0.5, 0.3], [0.75, 0.5, 0.1], truncate=2.0)  # ratios 0.5, 1, 3 and 1.5, 1, 1
    good, bad = advantages_of(batch)
    assert good == pytest.approx([0.25, 0.5, 1.0])
    assert bad == pytest.approx([-0.75, -0.5, -0.5])
    assert batch.correction is not None
    assert batch.correction.truncated_share == pytest.approx(1 / 6)
    assert batch.correction.ratio_mean == pytest.approx(8 / 6)
    weights = [0.5, 1, 2, 1.5, 1, 1]
    ideal = sum(weights) ** 2 / (6 * sum(one * one for one in weights))
    assert batch.correction.effective_sample_size == pytest.approx(ideal)
    assert (batch.correction.masked_share, batch.correction.masked_sequences_share) == (0, 0)


def test_the_loss_compares_with_the_trainers_own_logprobs_and_the_samplers_are_kept():
    batch = corrected([0.25, 0.5, 0.3], [0.75, 0.5, 0.1], truncate=2.0)
    good = next(row for row in batch.sequences if row.rollout == "g-0")
    assert good.logprobs == pytest.approx([0, 0, *map(math.log, [0.25, 0.5, 0.3])])
    assert good.sampler_logprobs == pytest.approx([0, 0, *map(math.log, SAMPLED)])


def test_icepop_masks_tokens_outside_its_bounds_and_weighs_the_others_by_their_ratio():
    batch = corrected([0.2, 0.5, 0.6], [0.75, 0.5, 0.1], token_mask=[0.5, 5.0])  # ratios 0.4, 1, 6 and 1.5, 1, 1
    good, bad = advantages_of(batch)
    assert (good[0], good[2]) == (0.0, 0.0)
    assert good[1] == pytest.approx(0.5)
    assert bad == pytest.approx([-0.75, -0.5, -0.5])
    assert batch.correction is not None
    assert batch.correction.masked_share == pytest.approx(2 / 6)
    assert batch.correction.masked_sequences_share == 0


def test_a_sequence_is_masked_by_the_geometric_mean_of_its_ratios():
    # Ratios 0.5, 1, 3: their geometric mean is 1.145. And 1.2, 1.2, 1.2.
    batch = corrected([0.25, 0.5, 0.3], [0.6, 0.6, 0.12], sequence_mask=[0.9, 1.15])
    good, bad = advantages_of(batch)
    assert good == pytest.approx([0.25, 0.5, 1.5])
    assert bad == [0.0, 0.0, 0.0]
    assert batch.correction is not None
    assert (batch.correction.masked_share, batch.correction.masked_sequences_share) == (0.5, 0.5)


def test_dppo_masks_what_would_move_further_away_and_nothing_else():
    # The first token has become likelier by 0.3, the second unlikelier by 0.3, the third tripled, but by 0.2 only.
    likely = [0.8, 0.2, 0.3]
    good, bad = advantages_of(corrected(likely, likely, divergence=0.25))
    assert good == pytest.approx([0.0, 0.2, 1.5])  # made still likelier: masked; pulled back: weighed by its ratio
    assert bad == pytest.approx([-0.8, 0.0, -1.5])
    assert (good[0], bad[1]) == (0.0, 0.0)


def test_corrections_combine():
    batch = corrected([0.9, 0.5, 0.3], [0.75, 0.5, 0.1], truncate=1.2, divergence=0.3, token_mask=[0.5, 2.0])
    good, bad = advantages_of(batch)
    assert good == pytest.approx([0.0, 0.5, 0.0])
    assert bad == pytest.approx([-0.6, -0.5, -0.5])


@examples(200)
@given(
    st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3),
    st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3),
    st.sampled_from([{"token_mask": [0.5, 2.0]}, {"sequence_mask": [0.9, 1.1]}, {"divergence": 0.1}, {"truncate": 2}]),
)
def test_penalties_and_bonuses_never_bring_a_masked_token_back(own, base, correction):
    section = {**config_of(**correction).algorithm.model_dump(), "normalize": "tokens"}
    config = make_config(algorithm=section, penalty={"kl": 0.1})
    scores = own_logprobs(base, base)
    batch = build_batch([two_rollouts()], config, scores, own_logprobs(own, own), entropy_bonus=0.1)
    assert batch.correction is not None
    zeros = sum(one == 0.0 for row in batch.sequences for one in sampled_of(row))
    assert zeros >= round(6 * batch.correction.masked_share)
    assert 0 <= batch.correction.effective_sample_size <= 1 + 1e-9


def sampled_of(row: TrainSequence) -> list[float]:
    return [one for one, is_sampled in zip(row.advantages, row.mask, strict=True) if is_sampled]


def test_equal_probabilities_change_nothing():
    correction = {"truncate": 2.0, "token_mask": [0.5, 2.0], "sequence_mask": [0.9, 1.1], "divergence": 0.1}
    batch = corrected(SAMPLED, SAMPLED, **correction)
    assert advantages_of(batch) == [[0.5] * 3, [-0.5] * 3]
    assert batch.correction is not None
    assert batch.correction.effective_sample_size == 1


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_token_without_a_number_is_masked(broken):
    own = own_logprobs(SAMPLED, SAMPLED)
    own["g-0"][2] = broken
    batch = build_batch([two_rollouts()], config_of(truncate=2.0), own_logprobs=own)
    assert advantages_of(batch)[0] == [0.0, 0.5, 0.5]


def test_corrections_need_the_trainers_own_logprobs():
    with pytest.raises(ValueError, match="needs the trainer's own logprobs"):
        build_batch([two_rollouts()], config_of(truncate=2.0))


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"token_mask": [2.0, 0.5]}, r"lower bound \(2\) must be below the upper one \(0.5\)"),
        ({"sequence_mask": [-1.0, 2.0]}, "greater than or equal to 0"),
        ({"truncate": 0}, "greater than 0"),
        ({"divergence": 1.5}, "less than 1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(correction, message):
    with pytest.raises(ValueError, match=message):
        config_of(**correction)


def test_the_mismatch_is_still_that_of_the_sampler_and_the_ratio_that_of_the_loss():
    config, trainer = config_of(truncate=2.0), [0.55, 0.55, 0.11]
    batch = build_batch([two_rollouts()], config, own_logprobs=own_logprobs(trainer, trainer))
    updates = [PolicyUpdate(metrics={}, logprobs=[row.logprobs[1:] for row in batch.sequences])]
    found = policy_metrics(batch, updates, config)
    assert found["mismatch/logprob_abs_max"] == pytest.approx(math.log(1.1))
    assert found["kl/sampler_trainer"] == pytest.approx(-math.log(1.1))
    assert found["policy/ratio_max"] == found["policy/ratio_min"] == 1


ALL_ON = {"truncate": 2.0, "token_mask": [0.2, 5.0], "sequence_mask": [0.5, 2.0], "divergence": 0.3}


def test_a_run_on_policy_corrects_nothing(run_training):
    algorithm = {"loss": "ppo", "loss_config": {"dual_clip": 3.0}, "correction": ALL_ON}
    run = run_training("corrected", steps=1, rollout=FEW, algorithm=algorithm)
    (row,) = run.read_metrics()
    assert row["correction/ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert row["correction/effective_sample_size"] == pytest.approx(1, abs=1e-4)
    assert row["correction/masked_share"] == row["correction/masked_sequences_share"] == 0
    assert row["mismatch/logprob_abs_max"] < 1e-4
    assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-5)


def test_at_another_temperature_corrections_mask_the_tokens_it_drew_too_often(run_training):
    settings = {"correction": {"truncate": 1.05, "token_mask": [0.8, 1.25]}, "normalize": "none"}
    run = run_training("hot", steps=1, rollout={**FEW, "temperature": 1.5}, algorithm=settings)
    (row,) = run.read_metrics()
    assert 0 < row["correction/masked_share"] < 1
    assert row["correction/truncated_share"] > 0
    assert row["correction/effective_sample_size"] < 1
    used = [record for record in run.read_tokens(1) if record["advantages"]]
    sampled = sum(len(turn["tokens"]) for record in used for turn in record["turns"])
    trained = sum(bool(one) for record in used for one in record["advantages"])
    assert trained == round(sampled * (1 - row["correction/masked_share"]))


@pytest.mark.slow
def test_samples_of_older_weights_are_weighed_by_their_ratio(run_training):
    algorithm = {"correction": {"truncate": 2.0}}
    run = run_training("stale", steps=4, asynchronous={"enabled": True, "max_staleness": 1}, algorithm=algorithm)
    stale = [row for row in run.read_metrics() if row["staleness/mean"] > 0 and "correction/ratio_mean" in row]
    assert stale
    for row in stale:
        assert row["correction/effective_sample_size"] < 1
        assert row["mismatch/logprob_abs_max"] > 1e-3
        assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
