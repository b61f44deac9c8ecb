"""`palestra run`: what the files of a run say, in words, beside each other, in other forms and as a picture."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from palestra.cli.run.commands import run
from palestra.cli.run.common import sparkline
from palestra.runs.advisories import RunAdvisor
from palestra.runs.reader import RunStatus
from palestra.runs.writer import EventKind, RunFolder
from palestra.training.batches.grpo_batch import build_batch
from palestra.util.figures import duration_text, number_text
from palestra.util.safe_text import safe_text
from tests.training.records import make_config, make_group


def call(*args: object) -> Result:
    return CliRunner().invoke(run, [*map(str, args)], prog_name="palestra run")


def answer(*args: object):
    result = call(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def _two_runs(tmp_path, monkeypatch):
    """`slow` was killed by its tracker's sins, `fast` is done."""
    monkeypatch.chdir(tmp_path)
    for name, lr in (("slow", 1e-5), ("fast", 1e-4)):
        config = make_config(optimizer={"lr": lr}, steps=10)
        with RunFolder.create("runs", name, config) as folder:
            for step in range(1, 5):
                groups = [make_group(f"g{step}", [1.0, 0.0], metrics={"parse_error": 0.0})]
                folder.write_rollouts(step, groups, build_batch(groups, config).sequences)
                figures = {"reward/mean": step * lr * 1e3, "reward/p10": 0.0, "reward/p90": 1.0}
                folder.write_metrics(
                    step, {**figures, "time/collect_s": 1.0, "time/update_s": 2.0, "odd": float("nan")}
                )
            folder.write_metrics(4, {"eval/success": 0.5})
            if name == "fast":
                folder.finish(RunStatus.DONE)
            else:
                folder.event(EventKind.WARNING, message="disk \x1b[31malmost full")


def test_runs_are_listed_with_how_they_stand():
    slow, fast = sorted(answer("list"), key=lambda one: -len(one["name"] + one["status"]))
    assert {slow["name"], fast["name"]} == {"slow", "fast"}
    by_name = {one["name"]: one for one in (slow, fast)}
    assert (by_name["fast"]["status"], by_name["slow"]["status"]) == ("done", "killed")
    assert by_name["fast"]["last_step"] == 4
    assert by_name["fast"]["reward_mean"] == pytest.approx(0.4)
    shown = call("list").stdout
    assert shown.splitlines()[0].split() == ["name", "status", "step", "reward", "eval", "model", "started"]
    assert "fast" in shown


@pytest.mark.parametrize(("metric", "shown"), [("eval/success", "0.25 (step 2)"), ("eval/loss", "loss 0.25 (step 2)")])
def test_an_evaluation_is_listed_with_its_step(metric, shown):
    with RunFolder.create("runs", "evaluated", make_config()) as folder:
        for step in range(4):
            folder.write_metrics(step, {"reward/mean": 0.1} | ({metric: step / 8} if step in (0, 2) else {}))
    (row,) = [one for one in answer("list") if one["name"] == "evaluated"]
    assert (row["last_step"], row["eval_step"], row[metric.replace("/", "_")]) == (3, 2, 0.25)
    (line,) = [line for line in call("list").stdout.splitlines() if line.startswith("evaluated")]
    assert f"  3     0.1     {shown}  " in line


@pytest.mark.parametrize("status", [RunStatus.STOPPED, RunStatus.FAILED, RunStatus.KILLED])
def test_a_dead_run_is_shown_with_the_command_that_resumes_it(status, tmp_path):
    with RunFolder.create("runs", "dead", make_config()) as folder:
        if status is not RunStatus.KILLED:
            folder.finish(status)
    with RunFolder.create("other runs", "dead", make_config()):
        pass
    assert answer("show", "dead")["resume"] == "palestra train --resume dead"
    assert "\nto continue: palestra train --resume dead\n" in call("show", "dead").stdout
    elsewhere = f"to continue: palestra train --resume '{tmp_path}/other runs/dead'\n"
    assert elsewhere in call("show", "dead", "--runs", "other runs").stdout


def test_a_run_that_is_done_or_runs_has_nothing_to_resume():
    with RunFolder.create("runs", "running", make_config()):
        assert answer("show", "running")["summary"]["status"] == "running"
        for name in ("running", "fast"):
            assert answer("show", name)["resume"] is None
            assert "--resume" not in call("show", name).stdout


def test_a_damaged_run_does_not_hide_the_others():
    Path("runs/slow/config.json").write_text("{")
    assert {one["name"]: one["status"] for one in answer("list")} == {"slow": "damaged", "fast": "done"}
    assert "damaged" in call("list").stdout


def test_no_runs_say_how_to_start_one():
    assert "to start one: palestra train" in call("list", "--runs", "elsewhere").stdout
    assert answer("list", "--runs", "elsewhere") == []


def test_a_run_is_shown_with_its_course_and_its_warnings():
    shown = call("show", "slow")
    assert shown.exit_code == 0, shown.output
    for text in (
        "killed, 4 of 10 steps",
        "reward/mean",
        "▁",
        "disk \\x1b[31malmost full",
        "rollout list slow --step 4",
    ):
        assert text in shown.stdout
    assert "\x1b" not in shown.stdout
    response = answer("show", "runs/fast")
    assert response["summary"]["best"]["reward/mean"]["step"] == 4
    assert (response["summary"]["status"], response["config"]["optimizer"]["lr"]) == ("done", 1e-4)


def test_a_run_whose_evaluation_fell_does_not_just_say_done():
    fallen = [{"eval/success": 0.9, "eval/success_stderr": 0.02}, {"eval/success": 0.4, "eval/success_stderr": 0.03}]
    with RunFolder.create("runs", "fallen", make_config(optimizer={"lr": 1e-4})) as folder:
        advisor = RunAdvisor(folder)
        for step, row in enumerate(fallen, 1):
            folder.write_metrics(step, row)
            advisor.take_new()
        folder.finish(RunStatus.DONE)
    lines = call("show", "fallen").stdout.splitlines()
    (warning,) = [line for line in lines if "below its best" in line]  # its event does not say it again
    assert warning.startswith("warning: The evaluation is below its best, 0.9 after step 1")
    assert "(eval/success 0.4)" in warning
    assert "lower optimizer.lr (now 0.0001)" in warning
    (advisory,) = answer("show", "fallen")["advisories"]
    assert (advisory["kind"], advisory["metric"], advisory["value"]) == ("evaluation_fell", "eval/success", 0.4)
    assert answer("show", "fast")["advisories"] == []


def test_a_run_that_has_just_begun_can_be_shown():
    RunFolder.create("runs", "new", make_config()).close()
    assert call("show", "new").exit_code == 0
    assert call("compare", "new", "fast").exit_code == 0


def test_runs_are_compared_where_they_differ():
    one, other = answer("compare", "slow", "fast")
    assert (one["config"], other["config"]) == ({"optimizer.lr": 1e-5}, {"optimizer.lr": 1e-4})
    assert one["last"]["eval/success"] == 0.5
    shown = call("compare", "slow", "fast").stdout
    assert "optimizer.lr" in shown
    assert "group_size" not in shown
    assert "time/collect_s" in call("compare", "slow", "fast", "--all").stdout


def test_metrics_and_rollouts_are_exported():
    rows = [json.loads(line) for line in call("export", "fast").stdout.splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    table = list(csv.DictReader(io.StringIO(call("export", "fast", "--to", "csv").stdout)))
    assert table[3]["eval/success"] == "0.5"
    assert table[0]["eval/success"] == ""
    response = answer("export", "fast", "--what", "rollouts", "--to", "csv", "--output", "r.csv")
    assert response == {"file": "r.csv", "rows": 8}
    exported = list(csv.DictReader(io.StringIO(Path("r.csv").read_text(encoding="utf-8"))))
    assert exported[0]["metrics.parse_error"] == "0.0"
    assert json.loads(exported[0]["messages"]) == []
    tokens = [json.loads(line) for line in call("export", "fast", "--what", "tokens").stdout.splitlines()]
    assert tokens[0]["prompt"] == [1, 2]


def test_parquet_needs_a_file():
    refused = call("export", "fast", "--to", "parquet")
    assert (refused.exit_code, "with --output FILE" in refused.stderr) == (2, True)
    result = call("export", "fast", "--to", "parquet", "--output", "m.parquet")
    assert result.exit_code == 0, result.output
    assert Path("m.parquet").read_bytes()[:4] == b"PAR1"


def test_what_the_readme_installs_is_enough_to_plot_and_export():
    """Both ways to install that it names."""
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file in ("README.md", "Makefile"):
        (named,) = re.findall(r"""\.\[(server,engine|engine,server)([a-z,]*)\]""", (root / file).read_text())
        needs = {re.split(r"\W", need)[0] for name in "".join(named).split(",") for need in extras[name]}
        assert {"matplotlib", "pyarrow"} <= needs, file


@pytest.mark.parametrize(
    ("package", "command"),
    [("matplotlib.figure", ["plot"]), ("pyarrow", ["export", "--to", "parquet", "--output", "m.parquet"])],
)
def test_a_core_install_says_what_to_install(monkeypatch, package, command):
    monkeypatch.setitem(sys.modules, package, None)
    result = call(command[0], "fast", *command[1:])
    assert result.exit_code == 1
    assert result.stderr == f"error: this command needs {package}; to install it: pip install 'palestra[train]'\n"
    assert not Path("m.parquet").exists()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_run_is_drawn(suffix):
    response = answer("plot", "fast", "--output", f"x.{suffix}")
    assert response["panels"] == ["reward", "evaluation", "seconds of a step"]
    begin = Path(f"x.{suffix}").read_bytes()[:20]
    assert begin.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    RunFolder.create("runs", "new", make_config()).close()
    assert "no metrics to draw yet" in call("plot", "new").stderr


@pytest.mark.parametrize("command", ["show", "compare", "export", "plot"])
def test_a_mistyped_run_gets_the_nearest_name_and_exit_code_3(command):
    result = call(command, "fats")
    assert result.exit_code == 3
    assert "no run 'fats' in runs (did you mean 'fast'?); to see all: palestra run list" in result.stderr
    assert result.stderr.count("\n") == 1


def test_wrong_usage_is_exit_code_2():
    assert call("plot", "fast", "--output", "x.gif").exit_code == 2
    assert call("export", "fast", "--to", "xml").exit_code == 2
    assert call("export", "fast", "--json").exit_code == 2
    assert call("compare").exit_code == 2


def test_importing_the_commands_loads_nothing_heavy():
    script = (
        "import sys\nimport palestra.cli.run.commands, palestra.cli.run.rollout\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'matplotlib', 'tokenizers', 'zstandard', 'palestra.training'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_small_words():
    assert safe_text("a\x1b[2Jb\u202ec\x07\nd\u00a0é") == "a\\x1b[2Jb\\u202ec\\x07\nd\u00a0é"
    assert safe_text("a\nb", keep="") == "a\\nb"
    assert [number_text(x) for x in (None, 3, 3.0, 0.123456, 1e-7, float("inf"), True)] == [
        *("-", "3", "3", "0.1235", "1e-07", "inf", "True")
    ]
    assert sparkline([0, 1, None, 2]) == "▁▅█"
    assert sparkline([1.0]) == ""
    assert sparkline([5.0] * 100) == "▁" * 40
    assert [duration_text(x) for x in (5, 65, 3725)] == ["5 s", "1 min 5 s", "1 h 2 min"]
