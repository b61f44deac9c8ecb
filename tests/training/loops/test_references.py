"""The reference of a KL penalty that moves along, and a loss on what was read, in a run."""

from __future__ import annotations

import pytest

from tests.training.trainers import TOOLS


@pytest.mark.slow
def test_the_reference_is_the_policy_of_some_steps_ago(run_training):
    run = run_training(
        "moving",
        **TOOLS,
        steps=3,
        rollout={"group_size": 2, "groups_per_step": 2},
        data={"zero_variance": "keep"},
        penalty={"kl": 0.05, "kl_form": "k3", "kl_reference_every": 2},
        algorithm={"observation_loss": 0.2},
    )
    rows = run.read_metrics()
    kl = [row["kl/reference"] for row in rows]
    assert "kl/base" not in rows[0]
    assert kl[0] == pytest.approx(0.0, abs=1e-4)
    assert abs(kl[1]) > 1e-4
    assert kl[2] == pytest.approx(0.0, abs=1e-4)
    assert all(-2 < row["observation/logprob"] < 0 for row in rows)
    assert all(row["mismatch/logprob_abs_max"] < 1e-3 for row in rows)
