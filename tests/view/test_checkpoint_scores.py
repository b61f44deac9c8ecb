"""Scores of a run's checkpoints on benchmarks, on the run's page."""

from __future__ import annotations

from pathlib import Path

from palestra.config.environment_entries import EnvironmentEntry
from palestra.config.evaluate import EvaluationConfig
from palestra.runs.reader import RunStatus
from palestra.runs.writer import RunFolder

CHARTS = "/api/v1/runs/first/charts"


def write_evaluation(root: Path, name: str, step: int, score: float, run: str = "first") -> None:
    config = EvaluationConfig(model=f"{run}@{step}", environments=[EnvironmentEntry(name="gsm8k")])
    metrics = {"eval/success": score, "eval/gsm8k/pass_at_1": score}
    edges = {"eval/gsm8k/pass_at_1_low": score - 0.1, "eval/gsm8k/pass_at_1_high": score + 0.1}
    with RunFolder.create(root, name, config, {"checkpoint": {"run": run, "step": step}}) as folder:
        folder.write_eval(0, [], metrics | edges)
        folder.finish(RunStatus.DONE)


def test_scores_of_checkpoints_are_drawn_over_the_steps_of_their_run(client, root):
    before = [row["title"] for row in client.get(CHARTS).json()["rows"]]
    write_evaluation(root, "late", 4, 0.5)
    write_evaluation(root, "early", 2, 0.25)
    write_evaluation(root, "another", 3, 0.75, run="other")
    rows = client.get(CHARTS).json()["rows"]
    assert [row["title"] for row in rows] == [*before, "Benchmarks"]
    (chart,) = rows[-1]["charts"]
    assert (chart["title"], chart["series"]["x"], chart["series"]["steps"]) == ("gsm8k pass@1", [2, 4], [2, 4])
    assert [line["values"] for line in chart["series"]["lines"]] == [[0.25, 0.5]]
    assert [line["values"] for line in chart["band"]] == [[0.15, 0.4], [0.35, 0.6]]
    write_evaluation(root, "again", 4, 0.625)
    (chart,) = client.get(CHARTS, params={"low": 3}).json()["rows"][-1]["charts"]
    assert chart["series"]["lines"][0]["values"] == [0.625]
    assert [row["title"] for row in client.get(CHARTS, params={"x": "time"}).json()["rows"]] == before
