"""Advisories: each names what goes wrong in a run, its usual cause and the setting to try; a healthy run has none."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config import dump_config
from palestra.runs import advisories, metric_table
from palestra.runs.advisories import Advisory, RunAdvisor, find_advisories, read_advisories
from palestra.runs.advisory_guidance import DROPPED, GUIDANCE, IDLE_ASYNC, TOO_EASY, TOO_HARD, AdvisoryKind
from palestra.runs.metric_table import MetricTable, read_table
from palestra.runs.record_files import read_added_blocks
from palestra.runs.writer import RunFolder
from tests.properties import examples
from tests.training.records import make_config

Row = dict[str, float]
GOOD: Row = {
    "reward/mean": 0.5,
    "reward/p10": 0.0,
    "rollouts/total": 96.0,
    "rollouts/failed": 1.0,
    "rollouts/truncated_share": 0.05,
    "rollouts/zero_variance_share": 0.3,
    "groups/informative": 8.0,
    "batch/sequences": 64.0,
    "batch/dropped_zero_variance": 32.0,
    "policy/entropy_estimate": 0.3,
    "kl/sampler_trainer_k3": 1e-13,
    "mismatch/logprob_abs_mean": 6e-8,
    "mismatch/not_finite": 0.0,
    "staleness/max": 0.0,
    "guard/kl": 2e-3,
    "guard/undone": 0.0,
    "guard/skipped": 0.0,
    "optim/grad_norm": 0.15,
    "time/idle_share": 0.6,
    "time/total_s": 1.0,
}
NAMES = [*GOOD, "eval/success", "eval/success_stderr", "eval/tasks"]
GROUPS = {"rollout": {"groups_per_step": 12}}


def evaluation(success: float, tasks: int = 256) -> Row:
    error = (success * (1 - success) / tasks) ** 0.5
    return {"eval/success": success, "eval/success_stderr": error, "eval/tasks": float(tasks)}


def write(run: RunFolder, rows: Sequence[Row], first: int = 1) -> None:
    for step, row in enumerate(rows, first):
        run.write_metrics(step, {**GOOD, **row})


def advise(root: Path, rows: Sequence[Row], **sections: Any) -> dict[AdvisoryKind, Advisory]:
    """The advisories of a run with these rows, in which every other metric is healthy."""
    lines = [json.dumps({"step": step, "attempt": 1, **GOOD, **row}) for step, row in enumerate(rows, 1)]
    (file := root / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    config = json.loads(dump_config(make_config(**{**GROUPS, **sections})))
    return {one.kind: one for one in find_advisories(read_table(file), config)}


K = AdvisoryKind
DROPPED_ALL: Row = {"batch/sequences": 0.0, "batch/dropped_zero_variance": 0.0}
UP_AND_DOWN: list[Row] = [
    *[{"reward/mean": 0.6}] * 4,
    {"reward/mean": 0.6, **evaluation(0.9)},
    *[{"reward/mean": 0.9}] * 4,
    {"reward/mean": 0.9, **evaluation(0.7)},
    *[{"reward/mean": 0.95}] * 4,
    {"reward/mean": 0.95, **evaluation(0.6)},
]
TRIGGERS: list[tuple[AdvisoryKind, str, float, list[Row]]] = [
    (K.NOT_FINITE, "mismatch/not_finite", 3.0, [{"mismatch/not_finite": 3.0}]),
    (K.EVALUATION_FELL, "eval/success", 0.43, [evaluation(0.89), {}, evaluation(0.43)]),
    (K.REWARD_WITHOUT_EVALUATION, "reward/mean", 0.95, UP_AND_DOWN),
    (K.UPDATE_UNDONE, "guard/undone", 2.0, [{}, {"guard/undone": 2.0}, {}]),
    (K.UPDATE_UNDONE, "guard/skipped", 1.0, [{}, {"guard/undone": 3.0, "guard/skipped": 1.0}]),
    (K.UPDATE_KL, "guard/kl", 0.02, [*[{}] * 6, {"guard/kl": 0.02}, {}]),
    (K.GRADIENT_NORM, "optim/grad_norm", 1.2, [*[{}] * 6, {"optim/grad_norm": 1.2}, {}]),
    (K.SEVERE_MISMATCH, "kl/sampler_trainer_k3", 0.2, [{"kl/sampler_trainer_k3": 0.2}] * 5),
    (K.MISMATCH, "mismatch/logprob_abs_mean", 0.01, [{"mismatch/logprob_abs_mean": 0.01}] * 5),
    (K.NOTHING_TO_TRAIN, "batch/sequences", 0.0, [DROPPED_ALL]),
    (K.ZERO_VARIANCE, "rollouts/zero_variance_share", 0.9, [{"rollouts/zero_variance_share": 0.9}] * 5),
    (K.FEW_INFORMATIVE_GROUPS, "groups/informative", 2.0, [{}, {"groups/informative": 2.0}, {}]),
    (K.FAILED_ROLLOUTS, "rollouts/failed", 50.0, [{"rollouts/failed": 10.0}] * 5),
    (K.TRUNCATED, "rollouts/truncated_share", 0.5, [{"rollouts/truncated_share": 0.5}] * 5),
    (
        K.ENTROPY_NEAR_ZERO,
        "policy/entropy_estimate",
        0.001,
        [{"policy/entropy_estimate": 0.001, "reward/mean": 0.1}] * 5,
    ),
    (
        K.ENTROPY_FALLING,
        "policy/entropy_estimate",
        0.1,
        [{"policy/entropy_estimate": 0.1 + (10 - step) / 20} for step in range(1, 10)]
        + [{"policy/entropy_estimate": 0.1}] * 2,
    ),
    (K.REWARD_STALLED, "reward/mean", 0.5, [{}] * 60),
    (K.IDLE, "time/idle_share", 0.97, [{"time/idle_share": 0.97}] * 5),
]


@pytest.mark.parametrize(("kind", "metric", "value", "rows"), TRIGGERS)
def test_what_goes_wrong_is_named_with_its_value_its_cause_and_a_setting(tmp_path, kind, metric, value, rows):
    found = advise(tmp_path, rows)
    assert list(found) == [kind]
    advisory = found[kind]
    assert (advisory.metric, advisory.value) == (metric, pytest.approx(value))
    assert advisory.settings
    for text in (advisory.text, metric, advisory.cause, *advisory.settings):
        assert text in advisory.message
    assert "`" not in advisory.message


def test_every_kind_is_triggered_here():
    of_a_running_one = {K.NO_PROGRESS, K.LOW_DISK}
    assert {kind for kind, *_ in TRIGGERS} | of_a_running_one == {*AdvisoryKind}


def test_a_healthy_run_has_no_advisories(tmp_path):
    """Its reward rises, its entropy falls with it, its norms and KL jump a little, and evaluations differ by chance."""
    rows: list[Row] = []
    for step in range(60):
        jitter = 1 + 0.5 * (step % 3)
        learned = {"reward/mean": 0.3 + step / 120, "policy/entropy_estimate": 0.4 * 0.95**step}
        rows.append({**learned, "optim/grad_norm": 0.1 * jitter, "guard/kl": 1e-3 * jitter})
        if step % 10 == 0:
            rows[-1] |= evaluation(0.5 + step / 200 - 0.02 * (step % 20 == 0))
    for count in (1, 3, 10, 60):
        assert advise(tmp_path, rows[:count]) == {}


def test_a_run_without_metrics_has_no_advisories(tmp_path):
    assert advise(tmp_path, []) == {}
    assert find_advisories(MetricTable(tmp_path / "none.jsonl"), {}) == []


@examples(200)
@given(st.lists(st.dictionaries(st.sampled_from(NAMES), st.floats(allow_nan=False, allow_infinity=False)), max_size=70))
def test_whatever_is_in_the_file_can_be_judged(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]):
    for one in advise(tmp_path_factory.getbasetemp(), rows).values():
        assert one.message


def test_the_recorded_collapse_is_named(tmp_path):
    """The demo's seed 0 on aarch64: step 14 learned from 2 of 12 groups and undid thirteen steps."""
    rows = [{"reward/mean": 0.9} for _ in range(13)]
    rows[6] |= evaluation(0.89)
    last = {"reward/mean": 0.98, "rollouts/zero_variance_share": 10 / 12, "groups/informative": 2.0}
    found = advise(tmp_path, [*rows, {**last, **evaluation(0.43)}])
    assert list(found) == [K.EVALUATION_FELL, K.FEW_INFORMATIVE_GROUPS]
    assert "below its best, 0.89 after step 7" in found[K.EVALUATION_FELL].message
    assert "Step 14 had fewer than 3 groups whose rewards differ" in found[K.FEW_INFORMATIVE_GROUPS].message


@pytest.mark.parametrize(
    ("row", "sections", "said"),
    [
        ({"batch/dropped_zero_variance": 96.0}, {}, "within each group its 96 rollouts have the same reward"),
        ({"batch/dropped_zero_variance": 96.0}, {}, "larger groups (rollout.group_size, now 8)"),
        ({"batch/dropped_zero_variance": 96.0, "reward/p10": 1.0}, {}, "use harder tasks"),
        ({"batch/dropped_overlong": 90.0}, {}, "90 of 96 rollouts are left out (overlong)"),
        ({"batch/dropped_overlong": 90.0}, {}, "raise rollout.max_tokens (now 256)"),
        ({"batch/dropped_prompt_too_long": 96.0}, {}, "raise data.max_sequence_length (now 4096)"),
        ({"batch/dropped_failed": 96.0}, {}, "palestra rollout list RUN --step 1 --where 'error!=None'"),
        ({"batch/dropped_broken": 96.0}, {}, "most rollouts are broken"),
        (
            {"batch/sequences": 96.0, "rollouts/zero_variance_share": 1.0},
            {"data": {"zero_variance": "keep"}},
            "have the same reward",
        ),
    ],
)
def test_a_step_with_nothing_to_train_on_says_why(tmp_path, row, sections, said):
    found = advise(tmp_path, [{**DROPPED_ALL, **row}], **sections)
    assert list(found) == [K.NOTHING_TO_TRAIN]
    assert found[K.NOTHING_TO_TRAIN].text.startswith("Step 1 has nothing to train on: ")
    assert said in found[K.NOTHING_TO_TRAIN].message


def test_rows_without_variance_that_learn_from_something_else_are_no_reason_to_warn(tmp_path):
    row = {"rollouts/zero_variance_share": 1.0}
    assert advise(tmp_path, [row], data={"zero_variance": "keep"}, penalty={"kl": 0.1}) == {}


def test_evaluations_that_differ_by_less_than_their_error_are_no_reason_to_warn(tmp_path):
    assert advise(tmp_path, [evaluation(0.6, tasks=20), evaluation(0.5, tasks=20)]) == {}
    assert advise(tmp_path, [evaluation(1.0, tasks=1), evaluation(0.0, tasks=1)]) == {}
    assert list(advise(tmp_path, [evaluation(1.0, tasks=20), evaluation(0.0, tasks=20)])) == [K.EVALUATION_FELL]


def test_an_evaluation_without_a_standard_error_has_that_of_its_number_of_tasks(tmp_path):
    rows = [{"eval/success": 0.9, "eval/tasks": 100.0}, {"eval/success": 0.7, "eval/tasks": 100.0}]
    assert list(advise(tmp_path, rows)) == [K.EVALUATION_FELL]
    assert advise(tmp_path, [{**row, "eval/tasks": 10.0} for row in rows]) == {}
    assert advise(tmp_path, [{"eval/success": row["eval/success"]} for row in rows]) == {}


def test_an_evaluation_that_came_back_is_no_reason_to_warn(tmp_path):
    assert advise(tmp_path, [evaluation(0.9), evaluation(0.4), evaluation(0.9)]) == {}


def test_one_bad_evaluation_after_a_rising_reward_is_not_called_gaming(tmp_path):
    assert list(advise(tmp_path, UP_AND_DOWN[:10])) == [K.EVALUATION_FELL]


def test_sampler_and_trainer_may_differ_where_the_weights_do(tmp_path):
    rows = [{"mismatch/logprob_abs_mean": 0.01}] * 5
    assert advise(tmp_path, rows, algorithm={"minibatches": 2}) == {}
    assert advise(tmp_path, [{**row, "staleness/max": 1.0} for row in rows]) == {}


def test_an_asynchronous_run_should_hardly_wait(tmp_path):
    rows = [{"time/idle_share": 0.7}] * 5
    assert advise(tmp_path, rows) == {}
    found = advise(tmp_path, rows, asynchronous={"enabled": True})
    assert list(found) == [K.IDLE]
    assert "(asynchronous.max_staleness, now 1)" in found[K.IDLE].remedy


def test_entropy_that_falls_while_the_reward_rises_is_well_spent(tmp_path):
    rows = [{"policy/entropy_estimate": 0.5 * 0.8**step, "reward/mean": 0.3 + step / 20} for step in range(12)]
    assert advise(tmp_path, rows) == {}
    flat = [{**row, "reward/mean": 0.5} for row in rows]
    assert list(advise(tmp_path, flat)) == [K.ENTROPY_FALLING]


def test_a_jump_of_the_kl_that_changes_nothing_is_no_reason_to_warn(tmp_path):
    assert advise(tmp_path, [*[{"guard/kl": 1e-6}] * 6, {"guard/kl": 5e-4}]) == {}


def test_the_settings_to_try_exist():
    config = json.loads(dump_config(make_config()))
    for _, remedy in (*GUIDANCE.values(), *DROPPED.values(), TOO_EASY, TOO_HARD, IDLE_ASYNC):
        for key in advisories.KEY.findall(remedy):
            section, _, name = key.partition(".")
            assert section in config, key
            assert not name or name in config[section], key


def test_every_kind_has_its_words_and_is_documented():
    text = Path(__file__).parents[2].joinpath("docs/metrics.md").read_text(encoding="utf-8")
    assert {*GUIDANCE} | {K.NOTHING_TO_TRAIN} == {*AdvisoryKind}
    for kind in AdvisoryKind:
        assert f"| `{kind}` |" in text


# While a run trains


def test_a_kind_is_reported_once_when_it_begins(tmp_path):
    with RunFolder.create(tmp_path, "one", make_config(**GROUPS)) as run:
        advisor = RunAdvisor(run)
        said: list[list[AdvisoryKind]] = []
        for step in range(1, 8):
            write(run, [{"rollouts/truncated_share": 0.5}] if step > 1 else [{}], first=step)
            said.append([one.kind for one in advisor.take_new()])
        warnings = [event for event in run.read_events() if event["event"] == "warning"]
    assert said == [[], [], [], [], [], [K.TRUNCATED], []]  # when all recent steps have it
    (warning,) = warnings
    assert (warning["advisory"], warning["step"], warning["metric"]) == (K.TRUNCATED, 6, "rollouts/truncated_share")
    assert "raise rollout.max_tokens (now 256)" in warning["message"]


def test_a_resumed_run_knows_the_steps_before(tmp_path):
    with RunFolder.create(tmp_path, "one", make_config(**GROUPS)) as run:
        write(run, [{}] * 8)
    with RunFolder.open(tmp_path / "one") as run:
        advisor = RunAdvisor(run)
        write(run, [{"optim/grad_norm": 1.5}], first=7)  # from the checkpoint of step 6
        (found,) = advisor.take_new()
    assert (found.kind, found.step) == (K.GRADIENT_NORM, 7)


def test_a_step_reads_only_what_was_added_to_the_metrics(tmp_path, monkeypatch):
    offsets: list[int] = []

    def read(file: Path, offset: int):
        offsets.append(offset)
        return read_added_blocks(file, offset)

    monkeypatch.setattr(metric_table, "read_added_blocks", read)
    with RunFolder.create(tmp_path, "one", make_config(**GROUPS)) as run:
        advisor, sizes = RunAdvisor(run), []
        for step in range(1, 4):
            write(run, [{}], first=step)
            advisor.take_new()
            sizes.append(run.metrics_file.stat().st_size)
    assert offsets == [0, *sizes[:-1]]


def test_a_run_without_a_step_for_minutes_is_warned_of_while_it_runs(tmp_path):
    with RunFolder.create(tmp_path, "one", make_config(**GROUPS)) as run:
        run.write_metrics(1, {**GOOD, "time": time.time() - 600})
        (late,) = read_advisories(run, read_table(run.metrics_file))
        assert (late.kind, late.text) == (K.NO_PROGRESS, "No step for 10 minutes")
        run.write_metrics(2, GOOD)
        assert read_advisories(run, read_table(run.metrics_file)) == []
        run.write_metrics(3, {**GOOD, "time": time.time() - 600})
    assert read_advisories(run, read_table(run.metrics_file)) == []


def test_a_disk_that_is_almost_full_is_warned_of_while_the_run_runs(tmp_path, monkeypatch):
    with RunFolder.create(tmp_path, "one", make_config(**GROUPS)) as run:
        assert read_advisories(run, read_table(run.metrics_file)) == []
        monkeypatch.setattr(advisories, "LOW_DISK", 1.0)
        (full,) = read_advisories(run, read_table(run.metrics_file))
    assert full.kind is K.LOW_DISK
    assert full.text.startswith("The disk is almost full: ")
    assert "checkpoint.keep" in full.settings
