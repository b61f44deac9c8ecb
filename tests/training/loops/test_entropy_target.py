"""The entropy bonus: it follows the entropy's gradient, and its coefficient holds a target, also after a resume."""

from __future__ import annotations

import json
import math

import pytest

from palestra.config.correction import EntropyConfig
from palestra.runs.reader import RunReader
from palestra.runs.run_state import RunState
from palestra.training.batches.grpo_batch import build_batch
from palestra.training.loops.entropy_target import adapt_entropy_bonus, entropy_bonus
from tests.training.records import group_of, make_config, make_rollout, make_turn
from tests.training.trainers import FEW, SMALL, merged, train

PLAIN = {"advantage": "mean_baseline", "normalize": "none"}


def test_the_bonus_favours_tokens_that_were_less_likely_than_the_batchs_mean():
    rollouts = [make_rollout(f"g-{i}", 1.0 - i, [make_turn(2, logprob=-1.0 - 2 * i)]) for i in range(2)]
    batch = build_batch([group_of("g", rollouts)], make_config(algorithm=PLAIN), entropy_bonus=0.1)
    found = {row.rollout: row.advantages for row in batch.sequences}  # logprobs -1 and -3: their mean is -2
    assert found["g-0"] == pytest.approx([0, 0, 0.5 - 0.1, 0.5 - 0.1])
    assert found["g-1"] == pytest.approx([0, 0, -0.5 + 0.1, -0.5 + 0.1])


def test_the_bonus_is_the_gradient_of_the_entropy():
    """Tokens that come as often as their probability says: the mean update of the logits is the entropy's gradient."""
    probabilities, counts = [0.7, 0.2, 0.1], [7, 2, 1]
    turns = [make_turn(n, logprob=math.log(p)) for n, p in zip(counts, probabilities, strict=True)]
    rollouts = [make_rollout(f"g-{i}", 1.0, [turn]) for i, turn in enumerate(turns)]
    config = make_config(algorithm=PLAIN, data={"zero_variance": "keep"})  # equal rewards: no other advantage
    batch = build_batch([group_of("g", rollouts)], config, entropy_bonus=1.0)
    advantages = {row.rollout: row.advantages[-1] for row in batch.sequences}
    entropy = -sum(p * math.log(p) for p in probabilities)
    for place, p in enumerate(probabilities):
        update = sum(
            count / 10 * advantages[f"g-{token}"] * ((token == place) - p) for token, count in enumerate(counts)
        )
        assert update == pytest.approx(-p * (math.log(p) + entropy))


def test_groups_without_variance_stay_dropped():
    rollouts = [make_rollout(f"g-{i}", 1.0) for i in range(2)]
    assert build_batch([group_of("g", rollouts)], make_config(algorithm=PLAIN), entropy_bonus=0.1).sequences == []


def test_the_coefficient_grows_below_the_target_and_falls_above_it_within_its_bounds():
    config, state = EntropyConfig(bonus=0.01, target=0.5, rate=0.01, max_bonus=0.03), RunState()
    coefficients = []
    for measured in (0.4, 0.4, 0.4, 0.6, 0.5, 0.6, 0.6, 0.4):
        coefficients.append(entropy_bonus(config, state))
        adapt_entropy_bonus(config, state, {"policy/entropy_estimate": measured})
    assert coefficients == pytest.approx([0.01, 0.02, 0.03, 0.03, 0.02, 0.01, 0.0, 0.0])
    assert entropy_bonus(config, state) == pytest.approx(0.01)


def test_a_step_without_samples_leaves_the_coefficient():
    config, state = EntropyConfig(bonus=0.01, target=0.5), RunState()
    adapt_entropy_bonus(config, state, {})
    assert entropy_bonus(config, state) == 0.01


def test_without_a_target_the_coefficient_is_the_configs_own():
    state = RunState(entropy_bonus=0.07)  # of an earlier start with a target
    adapt_entropy_bonus(EntropyConfig(bonus=0.01), state, {"policy/entropy_estimate": 0.1})
    assert (entropy_bonus(EntropyConfig(bonus=0.01), state), state.entropy_bonus) == (0.01, None)


def test_a_first_bonus_above_its_maximum_is_refused():
    with pytest.raises(ValueError, match=r"bonus \(1\) must not be above max_bonus \(0.1\)"):
        EntropyConfig(bonus=1.0, target=0.5)


def test_a_resumed_run_goes_on_with_the_coefficient_it_had(ephebe_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    algorithm = {"entropy": {"target": 9.0, "rate": 0.002, "max_bonus": 0.003}}
    settings = {"server": ephebe_url, "steps": 1, "rollout": FEW, "algorithm": algorithm, "checkpoint": {"every": 1}}
    (tmp_path / "run.json").write_text(json.dumps(merged(SMALL, settings)))
    code, said = train("run.json", "--name", "cut")
    assert code == 0, said
    code, said = train("--resume", "cut", "steps=3")
    assert (code, "continuing after step 1" in said) == (0, True), said
    rows = RunReader(tmp_path / "runs" / "cut").read_metrics()
    assert [row["entropy/bonus"] for row in rows] == pytest.approx([0, 0.002, 0.003])
