"""What a run's curves ask somebody to look at stands above its charts."""

from __future__ import annotations

import time

import pytest

from palestra.runs.writer import RunFolder
from palestra.view.runs import run_warnings
from tests.training.records import make_config

GOOD = {"reward/mean": 0.5, "rollouts/total": 100.0, "time/total_s": 1.0}


def page_of(open_client, root, rows: list[dict[str, float]], *, is_running: bool = False, ago_s: float = 0.0) -> str:
    with RunFolder.create(root, "one", make_config(steps=100)) as run:
        for step, row in enumerate(rows, 1):
            run.write_metrics(step, {**GOOD, **row, "time": time.time() - ago_s})
        client = open_client(root)
        if is_running:
            return client.get("/runs/one").text
    return client.get("/runs/one").text


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"mismatch/not_finite": 1.0}, "the model is broken"),
        ({"kl/sampler_trainer_k3": 0.2}, "Sampler and trainer disagree"),
        ({"rollouts/zero_variance_share": 0.9}, "Most groups teach nothing"),
        ({"rollouts/truncated_share": 0.5}, "cut at the token limit"),
        ({"rollouts/failed": 10.0}, "10% of the last rollouts failed"),
        ({"policy/entropy_estimate": 0.001, "reward/mean": 0.1}, "exploration is over"),
    ],
)
def test_a_curve_that_asks_for_it_is_warned_of(open_client, tmp_path, row, text):
    assert text in page_of(open_client, tmp_path / "bad", [row] * 6)
    assert text not in page_of(open_client, tmp_path / "good", [dict.fromkeys(row, 0.0) | {"reward/mean": 0.6}] * 6)


def test_a_reward_that_stalls_is_warned_of(open_client, tmp_path):
    assert "has not risen for 30 steps" in page_of(open_client, tmp_path / "flat", [{}] * 60)
    rising = [{"reward/mean": step / 100} for step in range(60)]
    assert "has not risen" not in page_of(open_client, tmp_path / "rising", rising)


def test_a_run_without_a_step_for_minutes_is_warned_of(open_client, tmp_path):
    assert "No step for" not in page_of(open_client, tmp_path / "now", [{}], is_running=True)
    assert "No step for 10 minutes" in page_of(open_client, tmp_path / "late", [{}], is_running=True, ago_s=600)
    assert "No step for" not in page_of(open_client, tmp_path / "over", [{}], ago_s=600)


def test_a_disk_that_is_almost_full_is_warned_of(open_client, tmp_path, monkeypatch):
    assert "almost full" not in page_of(open_client, tmp_path / "room", [{}], is_running=True)
    monkeypatch.setattr(run_warnings, "LOW_DISK", 1.0)
    assert "The disk is almost full" in page_of(open_client, tmp_path / "full", [{}], is_running=True)
