"""Numbers of a run: read once, only what was added later, and as few points as show the same curve."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from palestra.runs.metric_table import MetricTable
from palestra.runs.reader import RunReader
from palestra.runs.record_files import BLOCK_BYTES, read_added
from palestra.view.runs.charts import Axis, Window, read_board, read_series, short_labels
from palestra.view.runs.downsampling import pick_points
from palestra.view.runs.metric_descriptions import FILE, explain
from scripts.reference.metric_descriptions import metric_descriptions
from tests.properties import examples
from tests.view.folders import write_run

numbers = st.floats(-1e6, 1e6)


@examples(100)
@given(ys=st.lists(numbers, max_size=300), count=st.integers(3, 60))
def test_few_points_keep_the_ends_and_the_order(ys, count):
    kept = pick_points(np.arange(len(ys), dtype=float), np.array(ys), count).tolist()
    assert len(kept) == min(count, len(ys))
    assert kept == sorted(set(kept))
    assert not ys or (kept[0], kept[-1]) == (0, len(ys) - 1)


def test_a_spike_among_thousands_of_points_is_kept():
    ys = np.zeros(10_000)
    ys[[6_001, 7_000]] = 5.0, -5.0
    assert {6_001, 7_000} <= {*pick_points(np.arange(10_000.0), ys, 500).tolist()}


rows = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(0, 8), "attempt": st.integers(1, 3)},
        optional={"a": numbers, "b": numbers, "c": st.none()},
    ),
    max_size=30,
)


@examples(100)
@given(rows=rows, cuts=st.lists(st.integers(0, 2000), max_size=5))
def test_a_table_that_grows_with_the_file_says_what_the_reader_says(tmp_path_factory, rows, cuts):
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.json").write_text("{}")
    rows = sorted(rows, key=lambda row: row["attempt"])  # attempts follow each other
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = folder / "metrics.jsonl"
    table = restored = MetricTable(file)
    for end in [*sorted(cut % (len(content) + 1) for cut in cuts), len(content)]:
        file.write_bytes(content[:end])  # cut anywhere, also within a line
        table = table.updated()
        restored = MetricTable.restore(file, restored.updated().saved())
    expected = RunReader(folder).read_metrics()
    for found in (table, restored.updated()):
        assert found.steps == [row["step"] for row in expected]
        for place, row in enumerate(expected):
            assert found.at(place) == {name: row[name] for name in ("a", "b") if row.get(name) is not None}


def test_rows_of_many_blocks_and_of_different_names_are_all_there(tmp_path):
    file = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "attempt": 1, "a": step, f"b{step % 3}": 0.5, "long": "x" * 9000} for step in range(300)]
    rows[7] |= {"a": True}
    rows[8] |= {"a": "text"}
    rows[9] |= {"a": 10**400}
    content = "".join(json.dumps(row) + "\n" for row in rows)
    assert len(content) > 5 * BLOCK_BYTES
    file.write_text(content)
    table = MetricTable(file).updated()
    assert table.steps == [*range(300)]
    assert table.names == ["a", "b0", "b1", "b2"]
    assert [place for place in range(300) if math.isnan(table.column("a")[place])] == [7, 8, 9]
    assert [place for place in range(300) if table.column("b1")[place] == 0.5] == [*range(1, 300, 3)]
    assert read_added(file, 0) == (rows, len(content))


def test_a_saved_table_goes_on_with_its_own_file_only(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "attempt": 1, "a": 1}\n')
    saved = MetricTable(file).updated().saved()
    with file.open("a") as stream:
        stream.write('{"step": 2, "attempt": 1, "a": 2}\n')
    assert [*MetricTable.restore(file, saved).updated().column("a")] == [1.0, 2.0]
    file.write_text('{"step": 1, "attempt": 1, "a": 5}\n{"step": 2, "attempt": 1, "a": 6}\n')
    assert [*MetricTable.restore(file, saved).updated().column("a")] == [5.0, 6.0]
    assert MetricTable.restore(file, b"nonsense").steps == []
    file.unlink()
    assert MetricTable.restore(file, saved).steps == []


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    file = tmp_path / "metrics.jsonl"
    table = MetricTable(file)
    table.refresh()
    assert table.steps == []
    file.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n')
    table.refresh()
    file.unlink()
    table.refresh()
    assert (table.steps, table.columns) == ([], {})
    file.write_text('{"step": 7, "a": 3}\n')
    table.refresh()
    assert (table.steps, table.last("a")) == ([7], 3.0)


def test_a_table_that_is_being_read_does_not_change(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 1}\n')
    table = MetricTable(file).updated()
    assert table.updated() is table
    with file.open("a") as stream:
        stream.write('{"step": 2, "a": 2, "b": 3}\n')
    newer = table.updated()
    assert (table.steps, [*table.columns], [*table.column("a")]) == ([1], ["a"], [1.0])
    assert (newer.steps, [*newer.columns], [*newer.column("a")]) == ([1, 2], ["a", "b"], [1.0, 2.0])


def board(path: Path, window: Window = Window()):  # noqa: B008 (frozen)
    table = MetricTable(path / "metrics.jsonl")
    table.refresh()
    return read_board(table, window)


def test_the_board_has_four_rows_and_leaves_nothing_out(tmp_path):
    found = board(write_run(tmp_path))
    assert [row.title for row in found.rows] == ["Learning", "Health", "Behaviour", "Speed"]
    charts = {chart.title: chart for row in found.rows for chart in row.charts}
    assert [line.name for line in charts["Reward"].band] == ["reward/p10", "reward/p90"]
    assert [line.label for line in charts["Stop reasons"].series.lines] == ["done", "length"]  # timeout is always 0
    assert charts["KL from the base model"].series.lines[0].values == [0.01, 0.01]  # two of four have a number
    assert charts["KL from the base model"].series.steps == [2, 4]
    assert "env/math/own_metric" in found.others
    assert found.zeros == ["reward/p10", "stop/timeout"]
    shown = {line.name for chart in charts.values() for line in (*chart.series.lines, *chart.band)}
    assert shown | {*found.others} >= set(RunReader(tmp_path / "first").read_metrics()[-1]) - {
        *("step", "time", "attempt", "stop/timeout")
    }


def test_a_long_run_is_drawn_with_few_points_and_a_part_of_it_with_all(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines = (
        json.dumps({"step": i, "attempt": 1, "time": 1000.0 + 2 * i, "reward/mean": math.sin(i / 50)})
        for i in range(10_000)
    )
    file.write_text("\n".join(lines) + "\n")
    table = MetricTable(file)
    table.refresh()
    whole = read_series(table, ["reward/mean"], Window(points=500))
    assert len(whole.x) == 500
    assert whole.is_sampled
    part = read_series(table, ["reward/mean"], Window(low=100, high=299, points=500))
    assert part.steps == [*range(100, 300)]
    assert not part.is_sampled


def test_axes_count_steps_seconds_and_tokens(tmp_path):
    file = tmp_path / "metrics.jsonl"
    table = MetricTable(file)
    file.write_text(
        "".join(
            json.dumps({"step": i, "attempt": 1, "time": 50.0 + 10 * i, "batch/sampled_tokens": 7, "a": i}) + "\n"
            for i in (1, 2, 3)
        )
    )
    table.refresh()
    x = {axis: read_series(table, ["a"], Window(axis)).x for axis in Axis}
    assert x == {Axis.STEP: [1, 2, 3], Axis.TIME: [0, 10, 20], Axis.TOKENS: [7, 14, 21]}


def test_labels_say_what_differs():
    assert short_labels(["reward/mean", "reward/best_of_group"]) == ["mean", "best of group"]
    assert short_labels(["eval/x/success", "eval/x/easy/success"]) == ["all", "easy"]
    assert short_labels(["kl/base"]) == ["base"]
    assert short_labels(["kl/base", "mismatch/max"]) == ["base", "max"]
    assert short_labels(["a/x", "b/y/x", "c/x"]) == ["a", "b y", "c"]


def test_metrics_are_explained_in_the_words_of_the_documentation():
    assert FILE.read_text(encoding="utf-8") == metric_descriptions(), (
        "renew it: python -m scripts.reference.metric_descriptions"
    )
    words = {
        name: explain(name) for name in ("reward/mean", "eval/pass_at_8", "env/x/reward", "env/x/easy/reward", "odd")
    }
    assert words["reward/mean"] is not None
    assert words["reward/mean"].meaning == "mean reward of graded rollouts, before penalties"
    assert {name: one.name for name, one in words.items() if one} == {
        "reward/mean": "reward/mean",
        "eval/pass_at_8": "eval/pass_at_<k>",
        "env/x/reward": "env/<name>/reward",
        "env/x/easy/reward": "env/<name>/<label>/reward",
    }


def test_the_extra_has_what_the_dashboard_imports():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extra = " ".join(project["optional-dependencies"]["view"])
    for package in ("fastapi", "jinja2", "numpy", "uvicorn", "zstandard", "httptools"):
        assert package in extra
