"""Training on episodes: a real server, real players, kills; and the curve is that of a run that plays alone."""

from __future__ import annotations

import json
import math
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from palestra.config.train import EnvironmentEntry, RolloutConfig
from palestra.environments import EnvironmentSet
from palestra.episodes import EpisodeClient, NewGroup, RunSettings, Task, play
from palestra.rollouts.episodes.player import EnvironmentPlayer
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.sources import RolloutSourceError
from palestra.runs.reader import RunReader, RunStatus
from tests.training.test_resume import servers_of
from tests.training.trainers import FEW, SMALL, finish, kill, merged, start, wait_for_steps
from tests.waiting import until
from tests.warm_start import start_client

SUMS = {"environments": [{"name": "arithmetic"}], "rollouts": "episodes"}
KEY = "tml-local"


def write_config(folder: Path, **settings: Any) -> str:
    (folder / "run.json").write_text(json.dumps(merged(SMALL, settings)))
    return "run.json"


def curve(run: RunReader) -> list[tuple[float, ...]]:
    rows = run.read_metrics()
    return [
        tuple(round(row.get(name, -1.0), 5) for name in ("reward/mean", "loss/sum", "eval/success")) for row in rows
    ]


def rounded(value: Any) -> Any:
    """What was computed in another batch differs in the last digits."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return value if isinstance(value, str | int | None) else [rounded(inner) for inner in value]


def played_once(run: RunReader, steps: int) -> None:
    """In the final lineage: no group in two steps, none in parts, no episode twice."""
    ids = [record["id"] for step in range(1, steps + 1) for record in run.read_rollouts(step)]
    assert len(ids) == len(set(ids))
    groups = Counter(one.rpartition("-")[0] for one in ids)
    assert set(groups.values()) == {4}
    assert sorted(groups) == [f"g{position:06d}" for position in range(len(groups))]  # none left out


@contextmanager
def players(url: str, run: str, names: tuple[str, ...] = ("arithmetic", "stockroom")) -> Iterator[EpisodeClient]:
    """Of another process, as far as the trainer can tell. They outlive it."""
    entries = [EnvironmentEntry(name=name) for name in names]
    with (
        EnvironmentSet(entries, env_threads=2, env_timeout_s=20) as environments,
        EpisodeClient(url, KEY) as client,
    ):
        client.run(run)
        player = EnvironmentPlayer(environments, RolloutSettings.of(RolloutConfig()))
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                play(client, player, run=run, concurrency=8, idle_s=0.2, claim_s=0.2, handle_signals=False)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield client
        finally:
            stop.set()
            thread.join()


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    """The end of a run waits for the last one."""
    monkeypatch.setattr("palestra.rollouts.episodes.log.POLL_S", 0.05)
    monkeypatch.setattr("palestra.rollouts.episodes.run.CLAIM_S", 0.05)


@pytest.mark.slow
def test_a_killed_trainer_resumes_on_the_curve_of_one_that_plays_alone(run_training, ephebe_url, tmp_path):
    """Remote players only; they go on while there is no trainer. Whatever was played when it died counts once."""
    settings = {"steps": 3, "eval": {"every": 3, "tasks": 4}, "checkpoint": {"every": 1}}
    whole = run_training("whole", environments=SUMS["environments"], **settings)
    config = write_config(tmp_path, server=ephebe_url, episodes={"players": 0}, **settings, **SUMS)
    with players(ephebe_url, "cut") as client:
        process = start(tmp_path, config, "--name", "cut")
        wait_for_steps(tmp_path, "cut", 3, process)  # an evaluation, two steps, perhaps the second's checkpoint
        kill(process)
        assert re.search("continuing after step [12]", finish(start(tmp_path, "--resume", "cut")))
        info = client.run_info("cut")
    cut = RunReader(tmp_path / "runs" / "cut")
    assert curve(cut) == curve(whole)
    assert cut.status() is RunStatus.DONE
    played_once(cut, 3)
    assert (info.committed, info.queued, info.leased) == (info.delivered, 0, 0)
    groups = sum(row.get("episodes/groups", 0) for row in cut.read_metrics())
    assert info.delivered == groups + 2 * 4  # with the evaluations: what the killed one had read was not played again


@pytest.mark.slow
def test_records_are_those_of_a_run_that_plays_alone(run_training):
    """Evaluations too: tokens, logprobs, messages, stops."""
    settings = {"environments": [{"name": "stockroom"}], "steps": 1, "eval": {"every": 1, "tasks": 3}}
    one, other = (run_training(kind, rollouts=kind, **settings) for kind in ("local", "episodes"))
    assert rounded(one.read_tokens(1)) == rounded(other.read_tokens(1))
    left_out = ("seconds", "sample_s", "env_s", "turn_times")
    records = [
        [{key: value for key, value in record.items() if key not in left_out} for record in run.read_rollouts(1)]
        for run in (one, other)
    ]
    assert records[0] == records[1]
    evals = [[row["eval/success"] for row in run.read_metrics() if "eval/success" in row] for run in (one, other)]
    assert len(evals[0]) == 2
    assert evals[0] == evals[1]


@pytest.mark.slow
def test_asynchronous_runs_take_groups_of_bounded_age(run_training):
    run = run_training("ahead", steps=3, rollout=FEW, asynchronous={"enabled": True, "in_flight": "drop"}, **SUMS)
    ages = [row["staleness/max"] for row in run.read_metrics()]
    assert max(ages) == 1  # it did play ahead
    assert run.status() is RunStatus.DONE


@pytest.mark.slow
def test_at_another_temperature_the_ratio_still_starts_at_one(run_training):
    run = run_training("hot", steps=1, rollout={"temperature": 1.3}, **SUMS)
    (row,) = run.read_metrics()
    assert row["policy/ratio_min"] == pytest.approx(1, abs=1e-4)
    assert row["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert {record["temperature"] for record in run.read_rollouts(1)} == {1.3}


def test_what_fails_is_a_record_and_the_run_goes_on(run_training, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    good = {"steps": [{"reward": 1.0, "done": True}]}
    bad = [{"init": {"raise": "no door"}}, {"steps": [{"raise": "broke"}]}, {"steps": [{"reward": None, "done": True}]}]
    tasks.write_text("".join(json.dumps({"prompt": "Go.", **row}) + "\n" for row in (good, *bad)))
    entry = {"name": "tests.training.scripted:ScriptedEnv", "tasks": str(tasks)}
    run = run_training("failing", environments=[entry], rollouts="episodes", steps=1, data={"zero_variance": "keep"})
    found = Counter((record["stop"], record["reward"], record["error"]) for record in run.read_rollouts(1))
    stops = {stop: (count, reward, error or "") for (stop, reward, error), count in found.items() if stop != "done"}
    assert stops["env_init_failed"][0] == stops["env_failed"][0] == 4
    assert "no door" in stops["env_init_failed"][2]
    assert "broke" in stops["env_failed"][2]
    graded = [(reward, count) for (stop, reward, _), count in found.items() if stop == "done"]
    assert sorted(graded, key=str) == [(1.0, 4), (None, 4)]


def test_open_groups_of_another_trainer_are_not_touched(run_training, ephebe_url):
    task = Task(id="t", environment="arithmetic", prompt=[{"role": "user", "content": "1 + 1?"}])
    with EpisodeClient(ephebe_url, KEY) as client:
        client.run("taken", model="ephebe").register([NewGroup(group_id="mine", task=task, size=2)])
        with pytest.raises(RolloutSourceError, match=r"open groups of another trainer \(mine\).*episodes\.run=NAME"):
            run_training("mine", episodes={"run": "taken"}, **SUMS)
        assert client.run_info("taken").queued == 2


def test_weights_that_are_gone_are_waited_for(ephebe_url):
    """A player of any kind is asked to come back: the trainer that was killed will publish others."""
    task = Task(id="t", environment="arithmetic", prompt=[{"role": "user", "content": "1 + 1?"}])
    with EpisodeClient(ephebe_url, KEY) as client:
        run = client.run("gone")
        run.publish(0, "0123:sample:7")
        run.register([NewGroup(group_id="g", task=task, size=1)])
        (episode,) = client.claim(1, run="gone", wait_s=10)
        body = {"model": episode.model, "messages": task.prompt, "max_tokens": 4}
        http = httpx.Client(headers={"Authorization": f"Bearer {episode.api_key}"}, timeout=60)
        with http:
            response = http.post(f"{episode.base_url}/chat/completions", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "weights_gone")
            assert float(response.headers["retry-after"]) > 0
            run.publish(1, "ephebe")
            assert http.post(f"{episode.base_url}/chat/completions", json=body).status_code == 200
        episode.end(1.0)


def test_an_episode_that_may_not_say_more_is_worth_what_it_has(ephebe_url):
    name = "tests.training.scripted:ScriptedEnv"
    task = Task(
        id="t", environment=name, prompt=[{"role": "user", "content": "Go."}], extras={"steps": [{"reward": 0.5}]}
    )
    with players(ephebe_url, "quota", (name,)) as client:
        run = client.run("quota", RunSettings(max_calls=2), model="ephebe")
        run.register([NewGroup(group_id="g", task=task, size=1, tags={"temperature": "0"})])
        (episode,) = next(run.groups(0, wait_s=60)).episodes
    result = episode.info.result
    assert result is not None
    assert (result.reward, result.step_rewards, result.error) == (1.0, [0.5, 0.5], None)
    assert result.metadata["stop"] == "context"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"episodes": {"players": 0}}, "give the address of a running server"),
        ({"rollout": {"style": "batched"}}, "episodes cannot be batched"),
        ({"rollouts": "local", "episodes": {"lease_s": 5}}, "set rollouts=episodes"),
        ({"environments": [{"name": "mine"}], "episodes": {"players": 0}, "server": "http://x"}, "JSONL file"),
        ({"environments": [{"name": "mine"}], "server": "http://x"}, "unknown environment 'mine'"),
    ],
)
def test_a_config_that_cannot_work_says_what_to_do(tmp_path, settings, words):
    said = dry_run(tmp_path, 2, **merged({"rollouts": "episodes"}, settings))
    assert words in said


def test_environments_of_players_elsewhere_need_not_be_here(tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "Go."}\n')
    environments = [{"name": "mine", "tasks": "tasks.jsonl"}]
    said = dry_run(
        tmp_path, 0, environments=environments, episodes={"players": 0}, server="http://x", rollouts="episodes"
    )
    assert '"players": 0' in said


def dry_run(folder: Path, code: int, **settings: Any) -> str:
    from click.testing import CliRunner

    from palestra.cli.train import train

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = CliRunner().invoke(train, [write_config(folder, **settings), "--dry-run"])
    assert done.exit_code == code, done.output
    return " ".join(done.output.split())


def test_a_worker_of_another_machine_plays_and_says_what_it_does_not_know(ephebe_url, tmp_path):
    """`palestra episode play` as a child; it is there before its run."""
    command = ("episode", "play", "--server", ephebe_url, "--run", "worker")
    prompt = [{"role": "user", "content": "1 + 1?"}]
    known = Task(id="s", environment="arithmetic", prompt=prompt, extras={"answer": 2})
    unknown = Task(id="u", environment="os:system", prompt=prompt)
    tags = {"max_tokens": "4", "temperature": "0.5", "top_p": "1.0", "top_k": "-1"}
    process = start_client(*command, cwd=tmp_path)
    try:
        until(lambda: "does not exist yet; waiting" in process.said(), details=process.said)
        with EpisodeClient(ephebe_url, KEY) as client:
            run = client.run("worker", model="ephebe")
            run.register([NewGroup(group_id="g", task=known, size=2, tags=tags)])
            group = next(run.groups(0, wait_s=60))
            run.register([NewGroup(group_id="h", task=unknown, size=1)])
            said, _ = process.communicate(timeout=60)
            assert client.run_info("worker").queued == 1  # given back, for a player that has it
    finally:
        process.kill()
    assert process.returncode == 3
    assert "'os:system' is not played here; name the environment with --env" in said
    for episode in group.episodes:
        (trajectory,) = episode.trajectories
        assert 0 < sum(trajectory.loss_mask) <= 4
        assert {t for t, m in zip(trajectory.temperatures, trajectory.loss_mask, strict=True) if m} == {0.5}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_with_its_own_server_and_players_survives_kills_at_any_moment(tmp_path, seed):
    """Trainer, players and server go together, again and again; the curve is that of a run nobody disturbed."""
    rng = random.Random(seed)
    config = write_config(tmp_path, steps=6, seed=seed, eval={"every": 3, "tasks": 4}, **SUMS)
    finish(start(tmp_path, config, "--name", "whole", "rollouts=local"))
    process = start(tmp_path, config, "--name", "cut")
    for _ in range(3):
        wait_for_steps(tmp_path, "cut", 1, process)
        time.sleep(rng.uniform(0, 6))
        kill(process)
        assert not servers_of(tmp_path / "runs" / "cut")
        process = start(tmp_path, "--resume", "cut")
    finish(process)
    cut, whole = RunReader(tmp_path / "runs" / "cut"), RunReader(tmp_path / "runs" / "whole")
    assert curve(cut) == curve(whole)
    played_once(cut, 6)


@pytest.mark.slow
@pytest.mark.parametrize("in_flight", ["finish", "drop", "continue"])
def test_an_asynchronous_run_that_is_killed_uses_every_group_once(ephebe_url, tmp_path, in_flight):
    rng, name = random.Random(in_flight), f"ahead-{in_flight}"
    ahead = {"enabled": True, "max_staleness": 2, "in_flight": in_flight}
    config = write_config(tmp_path, server=ephebe_url, steps=8, asynchronous=ahead, **SUMS)
    with players(ephebe_url, name):
        process = start(tmp_path, config, "--name", name)
        for steps in (3, 5):
            wait_for_steps(tmp_path, name, steps, process)
            time.sleep(rng.uniform(0, 2))
            kill(process)
            process = start(tmp_path, "--resume", name)
        finish(process)
    run = RunReader(tmp_path / "runs" / name)
    assert len(run.read_metrics()) == 8
    ids = [record["id"] for step in range(1, 9) for record in run.read_rollouts(step)]
    assert len(ids) == len(set(ids))
    assert set(Counter(one.rpartition("-")[0] for one in ids).values()) == {4}
    state = json.loads((run.path / "checkpoints" / "step_000008.json").read_text())
    used = {int(one[1:7]) for one in ids}
    assert used == set(range(state["position"])) - set(state["pending"])  # none is lost


@pytest.mark.slow
@pytest.mark.parametrize("environment", ["arithmetic", "stockroom"])
def test_reward_rises_with_players_here_and_elsewhere(run_training, ephebe_url, environment):
    settings = {"rollout": {"group_size": 8, "groups_per_step": 8}, "eval": {"every": 8, "tasks": 96}, "steps": 8}
    name = f"learns-{environment}"
    with players(ephebe_url, name):
        run = run_training(
            name, environments=[{"name": environment}], rollouts="episodes", episodes={"players": 4}, **settings
        )
    rows = run.read_metrics()
    first, last = [row["eval/success"] for row in rows if "eval/success" in row]
    assert last > first + 2 * math.sqrt(0.25 / 96)  # two standard errors of an evaluation
    assert max(row.get("episodes/players", 0) for row in rows) == 2
