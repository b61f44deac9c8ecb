"""A verdict on a run follows from the gain and its error."""

from __future__ import annotations

import json

import pytest

from palestra.runs.learning_verdict import has_learned, has_risen, judge_run
from palestra.runs.reader import RunReader
from palestra.runs.record_files import RunError


@pytest.mark.parametrize(
    ("before", "after", "tasks", "verdict"),
    [
        (0.22, 0.79, 96, True),  # said "not learned enough", since 22 is more than 20
        (0.34, 0.89, 256, True),
        (0.34, 0.43, 256, False),  # more than chance, and still little of what was missing
        (0.90, 0.96, 256, True),
        (0.34, 0.36, 256, False),
        (0.80, 0.40, 256, False),
        (0.0, 1.0, 1, False),  # one task shows nothing
        (0.0, 1.0, 8, True),
        (1.0, 1.0, 256, False),
    ],
)
def test_learning_needs_more_than_chance_and_half_of_what_was_missing(before, after, tasks, verdict):
    assert has_learned(before, after, tasks) is verdict


def test_small_evaluations_prove_little():
    assert has_risen(0.34, 0.43, 1000)
    assert not has_risen(0.34, 0.43, 64)


def a_run(folder, selected: int | None) -> RunReader:
    (folder / "config.json").write_text(json.dumps({"config": {}, "facts": {}}))
    values = {0: 0.34, 7: 0.89, 14: 0.43}
    rows = [{"step": step, "attempt": 1, "eval/success": value, "eval/tasks": 256.0} for step, value in values.items()]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    chosen = {} if selected is None else {"selected": {"step": selected, "metric": "eval/success", "value": 0}}
    (folder / "summary.json").write_text(json.dumps({"status": "done", "seconds": 240.0, **chosen}))
    return RunReader(folder)


def test_the_selected_weights_are_judged_and_a_collapse_after_them_is_told(tmp_path):
    verdict = judge_run(a_run(tmp_path, 7))
    assert (verdict.has_learned, verdict.has_fallen, verdict.kept_step) == (True, True, 7)
    assert str(verdict) == (
        "It has learned: 34% of 256 tasks it never trained on solved before, 89% after, with the weights of step 7. "
        "Training took 4.0 minutes, evaluations included. The weights of the last step, 14, solve 43% and were not "
        "selected."
    )


@pytest.mark.parametrize("selected", [14, None])
def test_a_run_that_ends_with_collapsed_weights_has_not_learned(tmp_path, selected):
    verdict = judge_run(a_run(tmp_path, selected))
    assert (verdict.has_learned, verdict.kept_step) == (False, 14)
    assert str(verdict).startswith("It has not learned enough: 34% of 256 tasks")


def test_a_run_without_evaluations_is_not_judged(tmp_path):
    run = a_run(tmp_path, None)
    run.metrics_file.write_text("")
    with pytest.raises(RunError, match=r"no evaluation to judge it by; set eval\.every"):
        judge_run(run)
