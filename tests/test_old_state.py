"""What older code left behind opens: a server's state folder with its database and journal, run folders, configs.

A folder of tests/fixtures is what the code of that version wrote; make_old_state.py there made it, and noted what it
saw in it. Machines and torch versions differ in the last bits of a float, hence the tolerance.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from palestra.cli import main
from palestra.config.serve import load_serve_config
from palestra.config.train import load_train_config
from palestra.testing.random_model import make_random_model
from palestra.util.renamed import with_new_keys
from tests.server.conftest import NAME, Server
from tests.server.episodes.conftest import Api
from tests.server.raw import Model, Raw, datum, ok

FOLDERS = sorted(folder for folder in (Path(__file__).parent / "fixtures").glob("state-*"))
TOLERANCE = 1e-3
HERE = "/proc/self/cwd"
"""A state folder has its own path in its database and journal: so it is one that leads to wherever a copy lies."""
pytestmark = pytest.mark.skipif(not Path(HERE).exists(), reason="needs Linux's /proc")
MODEL = NAME
FOR_EVER = [f"{name}=1e12" for name in ("keep_results_s", "keep_runs_s", "keep_traces_s", "episodes.keep_ended_s")]
"""A fixture gets old, and what is in it shall not be swept for that."""


@dataclass
class Seen:
    """facts.json: what is in the state folder, and the numbers that the code which made it saw there."""

    key: str
    model_id: str
    checkpoint: str
    sampler: str
    waiting: list[str]
    """A pass and a step that were acknowledged, and that no worker had begun."""
    next_number: int
    episodes: dict[str, str]
    seen: dict[str, Any] = field(default_factory=dict)


@contextmanager
def opened(fixture: Path, folder: Path, key: str) -> Iterator[Server]:
    """A server of today on a copy of the state folder."""
    unpack(fixture / "state.tar.xz", folder)
    with Server(folder, make_random_model(folder / "micro"), f"state={HERE}/state", *FOR_EVER) as server:
        server.key = key
        yield server.start()


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")


def see(server: Server, facts: Seen) -> dict[str, Any]:
    """What a client finds, in numbers that can be compared."""
    api = Raw(server, facts.key)
    waited = [api.result(request_id) for request_id in facts.waiting]
    trained = Model(api, facts.model_id)
    trained.numbers = itertools.count(facts.next_number)
    losses = [trained.loss(trained.send_pass(datum(5)))]
    api.result(trained.step(1e-2))
    losses.append(trained.loss(trained.send_pass(datum(5))))
    loaded = api.model(rank=1, train_unembed=False)
    api.result(loaded.send("load_weights", path=facts.checkpoint, optimizer=True))
    sampled = api.result(api.sample(facts.sampler, max_tokens=1, prompt_logprobs=True))
    return {
        "waiting": waited[0]["metrics"]["loss:sum"],
        "next": losses,
        "checkpoint": loaded.loss(loaded.send_pass(datum(5))),
        "sampler": sampled["prompt_logprobs"][1:],
    }


@pytest.fixture(scope="module", params=FOLDERS, ids=lambda folder: folder.name)
def fixture(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def facts(fixture: Path) -> Seen:
    return Seen(**json.loads((fixture / "facts.json").read_text()))


@pytest.fixture(scope="module")
def server(fixture: Path, facts: Seen, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with opened(fixture, tmp_path_factory.mktemp("old") / "server", facts.key) as server:
        yield server


@pytest.fixture
def project(fixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the model that the runs were of; the current folder."""
    unpack(fixture / "project.tar.xz", tmp_path)
    make_random_model(tmp_path / "project" / "micro")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def test_a_model_goes_on_where_it_was(server: Server, facts: Seen) -> None:
    """With what the journal has beyond the snapshot, requests that nobody had computed included; so do its sampler and
    its checkpoint."""
    seen = see(server, facts)
    assert seen.keys() == facts.seen.keys()
    for name, value in seen.items():
        assert value == pytest.approx(facts.seen[name], rel=TOLERANCE), name


def test_the_state_folder_opens_without_a_doubt(server: Server) -> None:
    assert "WARNING" not in server.said().upper()
    assert "lost" not in server.said()


def test_checkpoints_are_listed_and_read(server: Server, facts: Seen) -> None:
    listed = ok(Raw(server, facts.key).get("checkpoints"))["checkpoints"]
    assert facts.checkpoint in [checkpoint["tinker_path"] for checkpoint in listed]
    assert server.http(key="tml-nobody").get("/api/v1/checkpoints").status_code == 401


def test_episodes_that_were_played_and_queued_are_there(server: Server, facts: Seen) -> None:
    api = Api(server, facts.key, run="fixture")
    finished = api.get(f"episodes/{facts.episodes['finished']}/timeline")
    assert finished["episode"]["result"]["reward"] == 0.5
    assert finished["attempts"][0]["calls"][0]["messages"][0]["content"] == "What is 1 + 1?"
    lease = api.claim_one()
    assert lease["episode_id"] == facts.episodes["queued"]
    assert api.end(lease, 1.0)["status"] == "accepted"
    (group,) = api.played()
    assert [episode["info"]["result"]["reward"] for episode in group["episodes"]] == [0.5, 1.0]


def command(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def steps() -> dict[str, int]:
    return {run["name"]: run["steps"] for run in json.loads(command("run", "list", "--json"))}


def test_runs_are_listed_shown_and_exported(project: Path) -> None:
    assert steps() == {"grpo": 2, "sft": 2}
    for name in steps():
        assert json.loads(command("run", "show", name, "--json"))["name"] == name
    rollouts = json.loads(command("rollout", "list", "grpo", "--json"))
    assert len(rollouts) >= 16
    assert "Say " in command("rollout", "show", rollouts[0]["id"])
    assert "sampled" in command("rollout", "show", rollouts[0]["id"], "--tokens")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "sft"])
def test_a_run_goes_on(name: str, project: Path) -> None:
    arguments = ["train", "--resume", f"{HERE}/runs/{name}", "steps=3"]
    done = subprocess.run(
        [sys.executable, "-m", "palestra.cli", *arguments], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continuing after step 2" in done.stdout
    assert steps()[name] == 3


def flat(data: Any, at: str = "") -> dict[str, Any]:
    """`{"a": [{"b": 1}]}` as `{".a.0.b": 1}`."""
    if not isinstance(data, dict | list):
        return {at: data}
    items = data.items() if isinstance(data, dict) else enumerate(data)
    return {name: value for key, inner in items for name, value in flat(inner, f"{at}.{key}").items()}


@pytest.mark.parametrize("name", ["serve", "grpo", "sft"])
def test_a_config_means_what_it_meant(name: str, fixture: Path, tmp_path: Path) -> None:
    """Every setting of it is known, by its name of today, and has the value that the file gives."""
    given = with_new_keys(yaml.safe_load((fixture / f"{name}.yaml").read_text()))
    (file := tmp_path / "today.yaml").write_text(yaml.safe_dump(given))
    load = load_serve_config if name == "serve" else load_train_config
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # connections of SDK clients whose tests are over
        resolved = flat(load([file], []).model_dump(mode="json"))
    said = flat(given)
    assert said == {name: resolved[name] for name in said}
