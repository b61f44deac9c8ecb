"""The advisories of a run stand above its charts."""

from __future__ import annotations

import time

from palestra.runs.reader import RunStatus
from palestra.runs.writer import RunFolder
from tests.training.records import make_config

EVALUATED = [{"eval/success": 0.9, "eval/success_stderr": 0.02}, {"eval/success": 0.4, "eval/success_stderr": 0.03}]


def test_a_run_whose_evaluation_fell_does_not_just_say_done(open_client, tmp_path):
    with RunFolder.create(tmp_path, "one", make_config(steps=2, optimizer={"lr": 1e-4})) as run:
        for step, row in enumerate(EVALUATED, 1):
            run.write_metrics(step, row)
        run.finish(RunStatus.DONE)
    client = open_client(tmp_path)
    page = client.get("/runs/one").text
    assert "The evaluation is below its best, 0.9 after step 1" in page
    assert "<code>eval/success 0.4</code>" in page
    assert "lower optimizer.lr (now 0.0001)" in page
    (warning,) = client.get("/api/v1/runs/one").json()["warnings"]
    assert (warning["kind"], warning["metric"], warning["value"]) == ("evaluation_fell", "eval/success", 0.4)
    assert "optimizer.lr" in warning["settings"]


def test_a_healthy_run_has_no_warnings(open_client, tmp_path):
    with RunFolder.create(tmp_path, "one", make_config(steps=2)) as run:
        for step, row in enumerate(reversed(EVALUATED), 1):
            run.write_metrics(step, row)
        assert 'class="warning"' not in open_client(tmp_path).get("/runs/one").text
        run.write_metrics(3, {"time": time.time() - 600})
        assert "No step for 10 minutes." in open_client(tmp_path).get("/runs/one").text
    assert "No step for" not in open_client(tmp_path).get("/runs/one").text
