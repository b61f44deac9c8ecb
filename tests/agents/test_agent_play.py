"""`palestra agent play`: tasks in sandboxes, rewards, endings; kills and Ctrl-C with real processes."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from palestra.cli import main
from tests.agents.coding_run import (
    DAWDLES,
    REFUSES,
    SHIRKS,
    SOLVES,
    CodingRun,
    agents_alive,
    write_tasks,
)
from tests.agents.conftest import PuppetServer
from tests.waiting import until


@pytest.fixture
def run(coding_server: PuppetServer) -> CodingRun:
    return CodingRun(coding_server)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "tasks")


def test_the_shell_agent_solves_a_task_and_its_tokens_arrive_with_the_reward(
    run: CodingRun, tasks: Path, tmp_path: Path
) -> None:
    said = run.register(SOLVES).play(tmp_path, tasks, "shell")
    assert "ended 1 (mean reward 1.000)" in said
    (episode,) = run.played()
    result = episode["info"]["result"]
    assert (result["reward"], result["metadata"]["ending"]) == (1.0, "done")
    assert result["metrics"]["tests"] == 1.0
    assert result["metrics"]["model_calls"] == 2
    (trajectory,) = episode["trajectories"]
    assert sum(trajectory["loss_mask"]) > 10
    kept = run.records(tmp_path)
    assert "+42" in kept["changes.patch"]
    assert "$ echo 42 > answer.txt" in kept["agent.log"]
    assert json.loads(kept["result.json"])["reward"] == 1.0
    (tool,) = json.loads(kept["transcript.json"])["tools"]
    assert tool["name"] == "bash"
    assert "tests: 1" in kept["verifier.log"]


@pytest.mark.parametrize(
    ("task", "words", "reward", "ending"),
    [
        (SHIRKS, ("shell",), 0.0, "empty_patch"),
        pytest.param(SHIRKS, ("shell", "--on-empty-patch", "-0.5"), -0.5, "empty_patch", marks=pytest.mark.slow),
        (REFUSES, ("shell", "--on-refusal", "-1"), -1.0, "refusal"),
        pytest.param(DAWDLES, ("shell", "--timeout", "4"), 1.0, "timeout", marks=pytest.mark.slow),
        pytest.param(
            DAWDLES, ("shell", "--timeout", "4", "--on-timeout", "error"), None, "timeout", marks=pytest.mark.slow
        ),
        (SOLVES, ('python3 "$HOME/x"; exit 3',), None, "silent"),
    ],
)
def test_an_ending_is_worth_what_the_settings_say(
    run: CodingRun, tasks: Path, tmp_path: Path, task: str, words: tuple[str, ...], reward: float | None, ending: str
) -> None:
    run.register(task).play(tmp_path, tasks, *words)
    (episode,) = run.played()
    result = episode["info"]["result"]
    assert (result["reward"], result["metadata"]["ending"]) == (reward, ending)
    assert (result["error"] is None) == (reward is not None)


CALL = "import json,os,urllib.request as u;u.urlopen(u.Request(os.environ['OPENAI_BASE_URL']+'/chat/completions',"
CALL += (
    "json.dumps({'model':os.environ['MODEL'],'messages':[{'role':'user','content':os.environ['PROMPT']}]}).encode(),"
)
CALL += "{'Authorization':'Bearer '+os.environ['OPENAI_API_KEY'],'Content-Type':'application/json'})).read()"


def test_any_command_is_an_agent_and_its_crash_is_judged_by_its_work(
    run: CodingRun, tasks: Path, tmp_path: Path
) -> None:
    run.register(SOLVES).play(tmp_path, tasks, f'python3 -c "{CALL}" && echo 42 > answer.txt; exit 3')
    (episode,) = run.played()
    result = episode["info"]["result"]
    assert (result["reward"], result["metadata"]["ending"], result["metadata"]["status"]) == (1.0, "crash", 3)


def test_an_agent_whose_files_cannot_be_read_has_crashed_and_earns_nothing(
    run: CodingRun, tasks: Path, tmp_path: Path
) -> None:
    run.register(SOLVES).play(tmp_path, tasks, f'python3 -c "{CALL}" && echo 42 > answer.txt; mkdir x; chmod 000 x')
    (episode,) = run.played()
    result = episode["info"]["result"]
    assert (result["reward"], result["metadata"]["ending"]) == (0.0, "crash")


@pytest.mark.slow
def test_a_killed_player_leaves_no_sandbox_and_another_plays_its_episode_once(
    run: CodingRun, tasks: Path, tmp_path: Path
) -> None:
    run.register(SOLVES, DAWDLES, lease_s=2)
    words = ("shell", "--timeout", "10", "--concurrency", "2")
    assert not agents_alive()
    with run.playing(tmp_path, tasks, *words) as process:
        until(lambda: bool(agents_alive()), timeout_s=60)
        process.kill()
    until(lambda: not agents_alive(), timeout_s=10)
    run.play(tmp_path, tasks, *words, "--idle", "6")
    played = {one["info"]["group_id"].removeprefix("g/"): one["info"] for one in run.played()}
    assert played.keys() == {SOLVES, DAWDLES}
    assert played[DAWDLES]["attempt"] == 2
    assert [one["result"]["reward"] for one in played.values()] == [1.0, 1.0]
    assert run.info()["delivered"] == 2


def test_ctrl_c_twice_gives_episodes_back_and_removes_the_sandboxes(
    run: CodingRun, tasks: Path, tmp_path: Path
) -> None:
    run.register(DAWDLES)
    with run.playing(tmp_path, tasks, "shell") as process:
        until(lambda: bool(agents_alive()), timeout_s=60)
        process.send_signal(signal.SIGINT)
        time.sleep(2)  # two that come together are one
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=20)
    assert "released 1" in said
    assert not agents_alive()
    assert (run.info()["queued"], run.info()["leased"]) == (1, 0)


def test_a_cancelled_episode_ends_its_agent(run: CodingRun, tasks: Path, tmp_path: Path) -> None:
    run.register(DAWDLES, lease_s=3)
    with run.playing(tmp_path, tasks, "shell") as process:
        until(lambda: bool(agents_alive()), timeout_s=60)
        body = {"run": run.name, "group_ids": [f"g/{DAWDLES}"]}
        run.server.http().post("/episodes/v1/cancel", json=body).raise_for_status()
        until(lambda: not agents_alive(), timeout_s=20)
        assert process.poll() is None


def test_a_task_that_is_not_in_the_folder_stops_the_player_with_a_line(
    run: CodingRun, tasks: Path, tmp_path: Path
) -> None:
    run.register("another")
    with run.playing(tmp_path, tasks, "shell") as process:
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "there is no task 'another'" in said


def test_an_agent_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    words = ["agent", "play", "cloude", "--tasks", str(tmp_path), "--run", "r"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 3
    assert "did you mean claude?" in result.output
