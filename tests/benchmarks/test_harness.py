"""The shape all benchmarks share: the JSON line, the alternation, the arguments. No timing is judged here."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are scripts: they find each other because their folder comes first on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def harness() -> ModuleType:
    return importlib.import_module("harness")


@pytest.fixture
def compute() -> ModuleType:
    return importlib.import_module("compute")


def test_the_last_line_of_a_report_is_one_json_object_of_the_agreed_shape(harness, capsys):
    measure = harness.Measure
    rows = [
        harness.Row("fast", "tok/s", measure((9.0, 10.0, 30.0)), "peer", measure((5.0, 4.0, 6.0)), target_ratio=1.5),
        harness.Row("alone", "tok/s", measure((10.0,)), target_value=3000),
    ]
    report = harness.Report("demo", harness.machine(), harness.versions(["torch", "no-such-package"]), rows)
    harness.report(report, json_line=True)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(line) == ["benchmark", "machine", "versions", "rows"]
    assert line["benchmark"] == "demo"
    assert {"python", "torch"} == set(line["versions"])
    assert line["rows"] == [
        {
            "what": "fast",
            "ours": 10.0,
            "unit": "tok/s",
            "peer": "peer",
            "peer_value": 5.0,
            "ratio": 2.0,
            "target": "1.5x",
        },
        {
            "what": "alone",
            "ours": 10.0,
            "unit": "tok/s",
            "peer": None,
            "peer_value": None,
            "ratio": None,
            "target": "3000 tok/s",
        },
    ]
    assert [row.is_met for row in rows] == [True, False]


def test_a_ratio_above_one_means_ours_is_better_also_where_less_is_better(harness):
    ours, peer = harness.Measure((50.0,)), harness.Measure((100.0,))
    row = harness.Row("memory", "MiB", ours, "peer", peer, target_ratio=1.0, less_is_better=True)
    assert row.ratio == 2.0
    assert row.is_met


def test_contenders_take_turns_and_warm_ups_are_dropped(harness):
    calls: list[str] = []

    def contender(name: str):
        return lambda: float(calls.append(name) or len(calls))

    measured = harness.alternate({"a": contender("a"), "b": contender("b")}, 2, warmups=1)
    assert calls == ["a", "b"] * 3
    assert measured["a"].values == (3.0, 5.0)
    assert measured["b"].values == (4.0, 6.0)


def test_the_table_has_one_line_for_each_row(harness):
    rows = [harness.Row(name, "s", harness.Measure((1.0, 2.0))) for name in ("x", "y")]
    report = harness.Report("demo", {"cores": 2}, {"python": "3"}, rows, ["a note"])
    assert sum(line.startswith("| ") for line in report.table().splitlines()) == 2 + len(rows)
    assert "a note" in report.table()


def test_every_benchmark_understands_the_common_arguments(compute):
    args = compute.parse(["--quick", "--json", "--peer-url", "http://localhost:1", "--rounds", "2"])
    assert (args.quick, args.json, args.peer_url, args.rounds) == (True, True, "http://localhost:1", 2)
    assert set(compute.plan(args)) == {("qwen3", "tiny"), ("qwen3_moe", "tiny")}


def test_the_plan_follows_device_rows_and_shapes(compute):
    def names(*argv: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for (_, shape), cases in compute.plan(compute.parse(list(argv))).items():
            found.setdefault(shape, []).extend(c.name for c in cases)
        return found

    assert set(names()) == {"tiny", "small"}
    gpu_only = {"decode", "decode_roofline", "train_packed", "numerics"}
    assert set(names()["tiny"]) == set(compute.NAMES) - gpu_only - {"hybrid", "experts"}
    on_gpu = names("--device", "cuda")
    assert on_gpu["qwen3-0.6b"] == ["sample_ragged", "sample_uniform", "train_ragged"]
    assert on_gpu["qwen3-8b"] == ["decode_roofline"]
    assert gpu_only < set(on_gpu["qwen3-4b"])
    assert on_gpu["qwen3-30b-a3b"] == ["experts"]
    assert names("--rows", "sample_grpo", "--shape", "small,micro") == {
        "small": ["sample_grpo"],
        "micro": ["sample_grpo"],
    }


@pytest.mark.parametrize("argv", [["--rows", "sample_ragde"], ["--shape", "huge"], ["--rounds", "0"]])
def test_a_wrong_argument_is_refused_with_what_is_known(compute, argv, capsys):
    with pytest.raises(SystemExit):
        compute.parse(argv)
    assert "known" in capsys.readouterr().err or argv[0] == "--rounds"


@pytest.mark.parametrize(
    ("name", "option", "target"),
    [("episodes", "--lightning", "lightning"), ("local_platform", "--openenv-python", "clients")],
)
def test_a_benchmark_that_needs_another_environment_says_which_target_makes_it(
    harness, name, option, target, tmp_path, capsys
):
    benchmark, missing = importlib.import_module(name), str(tmp_path / "bin" / "python")
    with pytest.raises(SystemExit):
        benchmark.parse([option, missing])
    assert f"there is no program {missing}; to make it: make {target}" in capsys.readouterr().err
    assert getattr(benchmark.parse([option, sys.executable]), option[2:].replace("-", "_")) == Path(sys.executable)
