"""Run folders: whatever happens to the writer, readers find whole records, and two writers never meet."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from palestra.runs.lock import Holder, RunLocked
from palestra.runs.metric_table import MetricTable
from palestra.runs.reader import Part, RunNotFound, RunReader, RunStatus, find_run, list_runs
from palestra.runs.record_files import LineFile, RunError, read_lines, read_records, write_json, write_records
from palestra.runs.writer import RunFolder
from palestra.training.batches.grpo_batch import build_batch
from tests.training.records import make_config, make_group


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


def create(root, name="first", **sections) -> RunFolder:
    return RunFolder.create(root, name, make_config(**sections), {"tokenizer": "/models/m"})


def test_a_new_run_says_what_it_is_and_where_it_came_from(root):
    with create(root, seed=7, trackers=[{"kind": "wandb", "options": {"api_key": "abcdefgh"}}]) as run:
        about = run.read_about()
        assert (about["name"], about["kind"], about["seed"]) == ("first", "grpo", 7)
        assert about["config"]["rollout"]["group_size"] == 8
        assert about["facts"]["tokenizer"] == "/models/m"
        assert about["facts"]["packages"]["palestra"]
        assert about["facts"]["python"].startswith("3.")
        assert "abcdefgh" not in run.config_file.read_text()
        assert [event["event"] for event in run.read_events()] == ["start"]
        assert (run.path / "logs").is_dir()


def test_the_command_line_is_kept_without_its_secrets(root, monkeypatch):
    keys = ["--api-key=tml-verysecret", "--key", "verysecret"]
    monkeypatch.setattr(sys, "argv", ["palestra", "train", "x.yaml", *keys, "steps=3"])
    with create(root) as run:
        command = run.read_about()["facts"]["command"]
    assert "steps=3" in command
    assert "verysecret" not in command


def test_a_name_that_is_taken_says_what_to_type(root):
    create(root).close()
    with pytest.raises(RunError, match="continue it with --resume first, or give a new run another --name"):
        create(root)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "a b", "-x", "x" * 101, "ü"])
def test_a_name_cannot_leave_its_folder(root, name):
    with pytest.raises(RunError, match="cannot be the name of a run"):
        create(root, name)
    assert not root.exists()


def test_runs_without_a_name_get_different_ones_that_people_can_say(root):
    with create(root, None) as one, create(root, None) as other:
        assert re.fullmatch(r"[a-z]+-[a-z]+", one.name)
        assert one.name != other.name
        about = one.read_about()
        assert (about["kind"], about["created"] > 0) == ("grpo", True)


def test_a_drawn_name_is_free_also_where_many_are_taken(root, monkeypatch):
    monkeypatch.setattr("palestra.runs.names.FIRST", "calm")
    monkeypatch.setattr("palestra.runs.names.SECOND", "otter")
    names = []
    for _ in range(3):
        with create(root, None) as run:
            names.append(run.name)
    assert names[0] == "calm-otter"
    assert len(set(names)) == 3


def test_a_failed_start_leaves_no_lock(root, monkeypatch):
    monkeypatch.setattr("palestra.runs.writer.gather_facts", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        create(root)
    monkeypatch.undo()
    create(root).close()


def test_metrics_are_one_row_for_each_step(root):
    with create(root) as run:
        run.write_metrics(0, {"eval/success": 0.1})
        for step in (1, 2):
            run.write_metrics(step, {"reward/mean": step / 10, "bad": float("nan")})
        run.write_metrics(2, {"eval/success": 0.5})
        rows = run.read_metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[2]["reward/mean"], rows[2]["eval/success"], rows[2]["attempt"]) == (0.2, 0.5, 1)
    assert rows[1]["bad"] is None
    assert abs(rows[0]["time"] - time.time()) < 60


def test_after_a_resume_the_newest_rows_count_and_abandoned_ones_do_not(root):
    with create(root) as run:
        for step in range(1, 6):
            run.write_metrics(step, {"reward/mean": 0.1})
    with RunFolder.open(run.path) as again:  # from the checkpoint of step 2
        again.write_metrics(3, {"reward/mean": 0.9})
        assert again.attempt == 2
    rows = RunReader(run.path).read_metrics()
    assert [(row["step"], row["attempt"], row["reward/mean"]) for row in rows] == [
        (1, 1, 0.1),
        (2, 1, 0.1),
        (3, 2, 0.9),
    ]
    assert [event["event"] for event in again.read_events()] == ["start", "resume"]


def test_a_step_that_was_trained_and_not_evaluated_before_a_kill_keeps_what_it_was_trained_with(root):
    with create(root) as run:
        run.write_metrics(1, {"reward/mean": 0.1})
        run.write_metrics(2, {"reward/mean": 0.2})
        run.write_metrics(3, {"reward/mean": 0.3})
    with RunFolder.open(run.path) as again:  # from the checkpoint of step 2
        again.write_metrics(2, {"eval/success": 0.5, "time/eval_s": 1.0})
        again.write_metrics(3, {"reward/mean": 0.35})
    rows = RunReader(run.path).read_metrics()
    found = [(row["step"], row["reward/mean"], row.get("eval/success")) for row in rows]
    assert found == [(1, 0.1, None), (2, 0.2, 0.5), (3, 0.35, None)]
    table = MetricTable(run.metrics_file).updated()
    assert [table.at(place).get("reward/mean") for place in range(3)] == [0.1, 0.2, 0.35]


def test_a_resume_with_another_config_says_what_changed(root):
    create(root, steps=10).close()
    with RunFolder.open(root / "first") as run:
        run.change_config(make_config(steps=20))
        assert run.read_events()[-1]["changes"] == {"steps": [10, 20]}
        assert run.read_about()["config"]["steps"] == 20
        assert run.read_about()["facts"]["tokenizer"] == "/models/m"


def test_a_line_cut_by_a_kill_is_skipped_and_not_joined_to_the_next(tmp_path):
    file = tmp_path / "m.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    assert read_lines(file) == [{"step": 1}]
    lines = LineFile(file)
    lines.append({"step": 2})
    lines.close()
    assert read_lines(file) == [{"step": 1}, {"step": 2}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_rollouts_and_tokens_are_read_back(root):
    config = make_config()
    groups = [make_group("a", [1.0, 0.0]), make_group("b", [None, 0.5])]
    groups[0].rollouts[0].messages = [{"role": "assistant", "content": "4\x1b[31m ü"}]
    batch = build_batch(groups, config)
    with create(root) as run:
        run.write_rollouts(12, groups, batch.sequences)
        run.write_eval(12, [make_group("eval-x", [1.0])], {"eval/success": 1.0})
        assert sorted(file.name for file in run.path.glob("*/step_*")) == ["step_000012.jsonl.zst"] * 3
        records = run.read_rollouts(12)
        assert [record["id"] for record in records] == ["a-0", "a-1", "b-0", "b-1"]
        assert [record["used"] for record in records] == [True, True, False, False]
        assert records[0]["messages"] == groups[0].rollouts[0].messages
        assert (records[2]["reward"], records[2]["stop"]) == (None, "env_failed")
        tokens = run.read_tokens(12)
        assert tokens[0]["prompt"] == [1, 2]
        assert tokens[0]["turns"][0]["logprobs"] == [-0.5] * 3
        assert (tokens[0]["advantages"], tokens[0]["advantage_divisor"]) == ([0.0, 0.0, 0.5, 0.5, 0.5], 9.0)
        assert tokens[2]["advantages"] is None
        assert [record["id"] for record in run.read_rollouts(12, Part.EVAL)] == ["eval-x-0"]
        assert (run.steps(), run.steps(Part.EVAL)) == ([12], [12])
        found = run.find_rollout("b-1")
        assert found is not None
        assert (found.step, found.part, found.record["reward"]) == (12, Part.ROLLOUTS, 0.5)
        assert [one.record["id"] for one in run.find_rollouts("a-", prefix=True)] == ["a-0", "a-1"]
        assert run.find_rollout("nobody") is None
        assert run.find_tokens("b-1", 12) == tokens[3]
        assert run.find_tokens("b-1", 13) is None


def test_without_tokens_only_the_readable_part_is_written(root):
    with create(root) as run:
        run.write_rollouts(1, [make_group("a", [1.0, 0.0])])
        assert run.read_rollouts(1)[0]["used"] is None
        with pytest.raises(RunNotFound, match="has no tokens of step 1; there are none yet"):
            run.read_tokens(1)
        with pytest.raises(RunNotFound, match="has no rollouts of step 3; there are steps 1 to 1"):
            run.read_rollouts(3)


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "sub" / "x.jsonl.zst"
    write_records(file, [{"a": 1}])

    def broken():
        yield {"a": 2}
        raise KeyError("gone")

    with pytest.raises(KeyError):
        write_records(file, broken())
    assert list(read_records(file)) == [{"a": 1}]
    assert [one.name for one in file.parent.iterdir()] == ["x.jsonl.zst"]


def test_text_that_utf8_cannot_hold_is_mended(tmp_path):
    write_records(tmp_path / "x.zst", [{"text": "a\ud800b", "more": ["\udfff", 1, None]}])
    assert list(read_records(tmp_path / "x.zst")) == [{"text": "a?b", "more": ["?", 1, None]}]


def test_what_json_cannot_say_is_written_as_text(tmp_path):
    class Mute:
        def __str__(self):
            raise RuntimeError

    odd = {"path": tmp_path, "inner": [{"what": Mute()}]}
    plain = {"path": str(tmp_path), "inner": [{"what": "a Mute"}]}
    write_records(tmp_path / "x.zst", [odd, {**odd, "text": "\ud800"}])
    assert list(read_records(tmp_path / "x.zst")) == [plain, {**plain, "text": "?"}]
    lines = LineFile(tmp_path / "x.jsonl")
    lines.append(odd)
    lines.close()
    assert read_lines(tmp_path / "x.jsonl") == [plain]


def test_a_damaged_file_is_named(tmp_path):
    file = tmp_path / "x.zst"
    write_records(file, [{"a": number} for number in range(100)])
    for content in (b"", b"no zstd", file.read_bytes()[:-7]):
        file.write_bytes(content)
        with pytest.raises(RunError, match=r"x\.zst: damaged"):
            list(read_records(file))
    with pytest.raises(RunError, match="No such file"):
        list(read_records(tmp_path / "none"))


def test_a_second_writer_is_told_who_has_the_run(root):
    with create(root) as run:
        with pytest.raises(RunLocked, match=f"is being written by process {os.getpid()} on "):
            RunFolder.open(run.path)
        assert RunReader(run.path).status() is RunStatus.RUNNING
    RunFolder.open(run.path).close()


KILLED = """
import sys, time
from palestra.runs.writer import RunFolder
from tests.training.records import make_config
run = RunFolder.create(sys.argv[1], "first", make_config())
for step in range(10**6):
    run.write_metrics(step, {"reward/mean": 0.5, "padding": 1.0})
    if step == 3:
        print("ready", flush=True)
"""


def test_a_killed_writer_leaves_whole_rows_and_a_lock_for_the_taking(root):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    reader = RunReader(root / "first")
    assert reader.status() is RunStatus.RUNNING
    with pytest.raises(RunLocked, match=f"process {process.pid}"):
        RunFolder.open(root / "first")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert reader.status() is RunStatus.KILLED
    rows = reader.read_metrics()
    assert [row["step"] for row in rows] == list(range(len(rows)))
    with RunFolder.open(root / "first") as again:
        assert (again.attempt, again.status()) == (2, RunStatus.RUNNING)


def test_a_process_number_that_came_round_again_is_not_the_holder():
    me = Holder.me()
    assert me.is_alive
    assert not Holder(me.pid, me.host, me.started - 100).is_alive
    assert Holder(me.pid, "elsewhere", 0.0).is_alive


def test_the_summary_has_first_last_and_best(root):
    with create(root) as run:
        for step, reward in enumerate([0.1, 0.9, 0.4]):
            run.write_metrics(step, {"reward/mean": reward})
        run.finish(RunStatus.DONE, checkpoint="tinker://x")
    summary = RunReader(run.path).read_summary()
    assert (summary["status"], summary["steps"], summary["last_step"], summary["attempts"]) == ("done", 3, 2, 1)
    assert summary["best"]["reward/mean"] == {"value": 0.9, "step": 1}
    assert (summary["first"]["reward/mean"], summary["last"]["reward/mean"]) == (0.1, 0.4)
    assert 0 <= summary["seconds"] < 60
    assert summary["checkpoint"] == "tinker://x"
    assert RunReader(run.path).status() is RunStatus.DONE


def test_a_run_that_ended_before_its_first_step_has_a_summary(root):
    with create(root) as run:
        assert run.finish(RunStatus.FAILED, error="no model")["last_step"] is None
    assert RunReader(run.path).status() is RunStatus.FAILED


def test_runs_are_found_by_name_or_path_and_a_typo_gets_the_nearest(root, tmp_path):
    create(root, "gsm8k-small").close()
    create(root, "other").close()
    assert {run.name for run in list_runs(root)} == {"gsm8k-small", "other"}
    assert find_run("other", root).path == root / "other"
    assert find_run(str(root / "other"), tmp_path).name == "other"
    with pytest.raises(RunNotFound, match=r"no run 'gsm8k-smal' in .* \(did you mean 'gsm8k-small'\?\); to see all"):
        find_run("gsm8k-smal", root)
    assert list_runs(tmp_path / "nothing") == []


def test_a_config_that_is_no_json_is_named(root):
    create(root).close()
    (root / "first" / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json: not valid JSON"):
        RunReader(root / "first").read_about()


def test_small_files_are_written_whole(root, tmp_path):
    with create(root) as run:
        file = run.write_json("checkpoints/step_000050.json", {"step": 50, "status": RunStatus.DONE})
    assert json.loads(file.read_text()) == {"step": 50, "status": "done"}
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert not (tmp_path / "x.json").exists()
