"""From rows to metrics with commands alone, through a gym that lives as long as the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from palestra.gym.collect.files import read_lines
from palestra.gym.collect.rows import key_of
from tests.gym.collect.conftest import MCQA, palestra, policy, write_rows


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory, upstream: str) -> Path:
    """20 rows, twice each, collected by the command."""
    folder = tmp_path_factory.mktemp("collected")
    rows = write_rows(folder / "in.jsonl", 20)
    response = palestra(
        "collect", *MCQA, "--agent", "mcqa_simple_agent", "-i", rows, "-o", "out.jsonl", "--repeats", "2", "--json",
        *policy(upstream), cwd=folder,
    )  # fmt: skip
    summary = json.loads(response)
    assert (summary["done"], summary["failed"], summary["reward"]) == (40, 0, 0.5)
    assert summary["key_metrics"]["mcqa_simple_agent"]["pass@2/accuracy"] == 50.0
    return folder


def test_results_and_metrics_are_in_files(collected: Path) -> None:
    keys = sorted(key_of(one) for one in read_lines(collected / "out.jsonl"))
    assert keys == [(task, rollout) for task in range(20) for rollout in range(2)]
    (entry,) = orjson.loads((collected / "out_aggregate_metrics.json").read_bytes())
    assert entry["agent_ref"] == {"name": "mcqa_simple_agent"}
    assert len(entry["group_level_metrics"]) == 20


def test_a_profile_and_a_comparison_need_no_gym(collected: Path) -> None:
    assert "20 tasks" in palestra("profile", "--rollouts", "out.jsonl", cwd=collected)
    same = json.loads(palestra("compare", "out.jsonl", "out.jsonl", "--json", cwd=collected))
    assert (same["tasks"], same["difference"], same["is_clear"]) == (20, 0.0, False)
    response = palestra("aggregate", "-i", "out.js*nl", "--offline", "-o", "m.json", cwd=collected)
    assert "40 rollouts" in response


def test_stored_rollouts_are_graded_again_by_a_gym_without_a_model(collected: Path) -> None:
    response = json.loads(
        palestra("reverify", *MCQA[:2], "--rollouts", "out.jsonl", "-o", "again.jsonl", "--json",
                 "~mcqa_simple_agent", cwd=collected)
    )  # fmt: skip
    assert (response["done"], response["changed"]) == (40, 0)


def test_what_is_there_is_neither_overwritten_nor_played_again(collected: Path, upstream: str) -> None:
    arguments = ["collect", *MCQA, "--agent", "mcqa_simple_agent", "-i", "in.jsonl", "-o", "out.jsonl"]
    error = palestra(*arguments, "--repeats", "2", *policy(upstream), cwd=collected, code=1)
    assert error.splitlines()[-1].startswith("error: out.jsonl exists; continue it with --resume")
    response = palestra(*arguments, "--repeats", "2", "--resume", *policy(upstream), cwd=collected)
    assert "40 of 40 rollouts" in response


def test_rows_are_played_through_an_environment_server(tmp_path: Path, upstream: str) -> None:
    """NeMo Gym 0.7 calls agents by the environment servers before them."""
    reference = "agent_server: {type: responses_api_agents, name: mcqa_simple_agent}"
    front = f"front: {{environment_servers: {{legacy_agent: {{entrypoint: app.py, {reference}}}}}}}"
    (tmp_path / "front.yaml").write_text(front)
    rows = write_rows(tmp_path / "in.jsonl", 4)
    arguments = ["-c", "front.yaml", "--agent", "front", "-i", rows, "-o", "out.jsonl", "--json"]
    summary = json.loads(palestra("collect", *MCQA, *arguments, *policy(upstream), cwd=tmp_path))
    assert (summary["done"], summary["failed"], summary["reward"]) == (4, 0, 0.5)
    assert "pass@1/accuracy" in summary["key_metrics"]["front"]


def test_without_a_gym_the_command_says_how_to_start_one(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "in.jsonl", 1)
    error = palestra("collect", "--server", "http://127.0.0.1:1", "-i", rows, "-o", "o.jsonl", cwd=tmp_path, code=4)
    assert "palestra gym run -c FILE" in error
    error = palestra("collect", "x=1", "-i", rows, "-o", "o.jsonl", cwd=tmp_path, code=2)
    assert "for a gym that this command starts (-c FILE)" in " ".join(error.replace("│", " ").split())


def test_rows_are_looked_for_where_configs_are(tmp_path: Path) -> None:
    shipped, nowhere = "resources_servers/mcqa/data/example.jsonl", ["--server", "http://127.0.0.1:1", "-o", "o.jsonl"]
    assert "no gym answers" in palestra("collect", "-i", shipped, *nowhere, cwd=tmp_path, code=4)
    assert "there is no file mcqa.jsonl" in palestra("collect", "-i", "mcqa.jsonl", *nowhere, cwd=tmp_path, code=2)


def test_datasets_of_a_config_are_joined(tmp_path: Path) -> None:
    write_rows(tmp_path / "mine.jsonl", 6)
    dataset = "[{name: mine, type: train, jsonl_fpath: mine.jsonl, license: MIT, num_repeats: 2}]"
    change = f"mcqa_simple_agent.responses_api_agents.simple_agent.datasets={dataset}"
    response = palestra("datasets", *MCQA, *policy("http://127.0.0.1:1"), "-o", "all", change, cwd=tmp_path)
    assert "train  12" in response
    assert len(list(read_lines(tmp_path / "all/train.jsonl"))) == 12


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_played_and_leaves_nothing_behind(
    tmp_path: Path, start_upstream: Callable[[float], str]
) -> None:
    rows = write_rows(tmp_path / "in.jsonl", 300)
    command = [sys.executable, "-m", "palestra.cli", "gym", "collect", *MCQA, "--agent", "mcqa_simple_agent"]
    command += ["-i", str(rows), "-o", "out.jsonl", "--concurrency", "4", *policy(start_upstream(0.05))]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out.jsonl").exists() or len(list(read_lines(tmp_path / "out.jsonl"))) < 10:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "continue with --resume" in error
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    before = len(list(read_lines(tmp_path / "out.jsonl")))
    assert 10 <= before < 300
    subprocess.run([*command, "--resume"], cwd=tmp_path, check=True, timeout=100, capture_output=True)
    assert sorted(key_of(one)[0] for one in read_lines(tmp_path / "out.jsonl")) == list(range(300))


def test_what_the_model_was_asked_is_folded_into_the_rows(tmp_path: Path, upstream: str) -> None:
    rows = write_rows(tmp_path / "in.jsonl", 3)
    captures = ["++observability_enabled=true", f"++model_call_capture_dir={tmp_path / 'captures'}"]
    palestra(
        *("collect", *MCQA, "--agent", "mcqa_simple_agent", "-i", rows, "-o", "out.jsonl", *policy(upstream)),
        *captures,
        cwd=tmp_path,
    )
    for result in read_lines(tmp_path / "out.jsonl"):
        capture = result["ng_model_call_capture"]
        assert capture["rollout_id"] == f"{result['_ng_task_index']}-0"
        assert (capture["metrics"]["num_calls"], capture["metrics"]["tokens_out"]) == (1, 3)
        assert len(result["ng_trajectory"]["turns"]) == 1
    (entry,) = orjson.loads((tmp_path / "out_aggregate_metrics.json").read_bytes())
    assert "mean/reward" in entry["agent_metrics"]
