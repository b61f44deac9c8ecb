"""`palestra train` with `rollouts: agent`: rewards arrive with the tokens, and a kill loses nothing."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from palestra.cli import main
from palestra.config.environment_entries import EnvironmentEntry
from palestra.config.train import GrpoConfig, load_train_config
from palestra.environments.coding import entry_tasks
from palestra.rollouts.agents.setup import trained_branches
from palestra.runs.reader import RunReader, RunStatus
from tests.agents.coding_run import DAWDLES, REFUSES, SHIRKS, CodingRun, agents_alive, write_tasks
from tests.agents.conftest import PuppetServer
from tests.server.conftest import KEY
from tests.training.trainers import finish, kill, start, train, wait_for_steps
from tests.waiting import until

pytestmark = pytest.mark.timeout(400)
BASE: dict[str, Any] = {"environments": [{"name": "coding"}], "rollouts": "agent"}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)


def write_config(folder: Path, server: PuppetServer, *left_out: str, **settings: Any) -> str:
    """A run of two groups of two in each step, one of which is solved."""
    tasks = write_tasks(folder / "tasks")
    for name in (REFUSES, *left_out):
        shutil.rmtree(tasks / name)
    config = {
        "environments": [{"name": "coding", "tasks": str(tasks)}],
        "rollouts": "agent",
        "server": server.url,
        "model": {"name": "puppet", "tokenizer": str(server.model), "rank": 2},
        "rollout": {"group_size": 2, "groups_per_step": 2, "max_tokens": 200},
        "data": {"zero_variance": "keep"},
        "optimizer": {"lr": 1e-6},
        "eval": {"every": 0},
        "checkpoint": {"every": 1},
        "steps": 2,
        **settings,
    }
    (folder / "run.json").write_text(json.dumps(config))
    return "run.json"


def played_once(run: RunReader, steps: int) -> None:
    """No group in two steps, and none in parts."""
    ids = [record["id"] for step in range(1, steps + 1) for record in run.read_rollouts(step)]
    assert len(ids) == len(set(ids))
    groups = Counter(one.rpartition("-")[0] for one in ids)
    assert sorted(groups) == [f"g{position:06d}" for position in range(2 * steps)]
    assert set(groups.values()) == {2}


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_with_an_agent_gets_its_rewards_and_trains_on_what_was_sampled(
    coding_server: PuppetServer, tmp_path: Path, steps: int
) -> None:
    config = write_config(tmp_path, coding_server, DAWDLES, steps=steps)
    with chdir(tmp_path):
        status, said = train(config, "--name", "whole", "--display", "lines")
    assert status == 0, said
    run = RunReader(tmp_path / "runs" / "whole")
    assert run.status() is RunStatus.DONE
    rows = run.read_metrics()
    assert [row["reward/mean"] for row in rows] == [0.5] * steps
    assert all(row["mismatch/logprob_abs_max"] < 1e-5 for row in rows)
    played_once(run, steps)
    rewards = {record["task"]: record["reward"] for record in run.read_rollouts(1)}
    assert rewards[SHIRKS] == 0.0
    assert len(list((tmp_path / "runs" / "whole" / "agent").glob("*/changes.patch"))) == 4 * steps


@pytest.mark.slow
def test_a_killed_trainer_takes_its_sandboxes_along_and_resumes(coding_server: PuppetServer, tmp_path: Path) -> None:
    config = write_config(tmp_path, coding_server, SHIRKS, agent={"timeout_s": 8})
    process = start(tmp_path, config, "--name", "cut")
    wait_for_steps(tmp_path, "cut", 1, process)
    until(lambda: bool(agents_alive()), timeout_s=60)
    kill(process)
    until(lambda: not agents_alive(), timeout_s=10)
    assert "continuing after step 1" in finish(start(tmp_path, "--resume", "cut"))
    run = RunReader(tmp_path / "runs" / "cut")
    assert [row["reward/mean"] for row in run.read_metrics()] == [1.0, 1.0]
    played_once(run, 2)


@pytest.mark.slow
def test_runs_with_agents_are_swept_and_each_has_its_own_episodes(coding_server: PuppetServer, tmp_path: Path) -> None:
    config = write_config(tmp_path, coding_server, DAWDLES, steps=1)
    with chdir(tmp_path):
        done = CliRunner().invoke(main, ["sweep", config, "seed=0..1", "--name", "pop", "--json"])
    assert done.exit_code == 0, done.output
    assert [one["status"] for one in json.loads(done.stdout)["members"]] == ["done", "done"]
    for member in ("pop-0", "pop-1"):
        run = RunReader(tmp_path / "runs" / member)
        assert [row["reward/mean"] for row in run.read_metrics()] == [0.5]
        played_once(run, 1)
        assert len(list((run.path / "agent").glob("*/changes.patch"))) == 4


@pytest.mark.slow
def test_players_elsewhere_are_killed_and_nothing_is_lost(coding_server: PuppetServer, tmp_path: Path) -> None:
    config = write_config(tmp_path, coding_server, SHIRKS, agent={"concurrency": 0}, episodes={"lease_s": 2}, steps=1)
    process = start(tmp_path, config, "--name", "elsewhere")
    elsewhere = CodingRun(coding_server, "elsewhere")
    words = ("shell", "--timeout", "8")
    with elsewhere.playing(tmp_path, tmp_path / "tasks", *words) as player:
        until(lambda: bool(agents_alive()), timeout_s=100)
        player.kill()
    with elsewhere.playing(tmp_path, tmp_path / "tasks", *words):
        finish(process)
    run = RunReader(tmp_path / "runs" / "elsewhere")
    assert [row["reward/mean"] for row in run.read_metrics()] == [1.0]
    played_once(run, 1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rollouts": "local"}, "set rollouts=agent"),
        ({"environments": [{"name": "arithmetic"}]}, "not 'arithmetic'"),
        ({"rollouts": "local", "environments": [{"name": "arithmetic"}], "agent": {"timeout_s": 3}}, "for an agent"),
        ({"agent": {"concurrency": 0}}, "agent.concurrency is 0"),
        ({"agent": {"on_crash": "nan"}}, "agent.on_crash"),
        ({"agent": {"on_crash": "verify"}}, "'verify' is now called 'grade'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_train_config([], [], {**BASE, **changed})


def test_an_agent_is_named_by_a_word_or_by_words() -> None:
    config = load_train_config([], ["agent.command=claude"], BASE)
    assert isinstance(config, GrpoConfig)
    assert config.agent.command == ["claude"]


@pytest.mark.parametrize(
    ("changed", "trained"),
    [
        (BASE, {"", "subagent", "review"}),
        ({**BASE, "agent": {"train_on": []}}, set()),
        ({**BASE, "agent": {"train_on": ["side"]}}, {"side"}),
    ],
)
def test_which_conversations_beside_the_main_one_are_trained_is_a_setting(
    changed: dict[str, Any], trained: set[str]
) -> None:
    config = load_train_config([], [], changed)
    assert isinstance(config, GrpoConfig)
    is_trained = trained_branches(config)
    assert is_trained is not None
    assert {agent for agent in ("", "subagent", "review", "side") if is_trained(agent)} == trained


def test_without_a_folder_the_tasks_are_those_that_come_with_palestra() -> None:
    tasks = entry_tasks(EnvironmentEntry(name="coding"), "train")
    assert len(tasks) == 40
    assert tasks[0].prompt[0]["content"]
    assert entry_tasks(EnvironmentEntry(name="coding"), "eval") == []
