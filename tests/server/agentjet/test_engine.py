"""The engine over HTTP: who may do what, a training process that is started, dies and is stopped, the second port."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from palestra.episodes import TinkerScriptClient
from palestra.episodes.client.tinkerscript import EngineError, WorkflowOutput
from tests.server.model_api.conftest import Ephebe, ephebe_in

OFFLINE, BOOTING, ROLLING = "ENGINE.OFFLINE", "ENGINE.BOOTING", "ENGINE.ROLLING"
SECOND = "; TinkerScript at "
BEARABLE_S = 60.0


def job(name: str, *, steps: int = 3, path: str = "/models/ephebe", **rollout: Any) -> dict[str, Any]:
    """As AgentJetJob would have it, for a model as small as ours."""
    return {
        "ajet": {
            "experiment_name": name,
            "backbone": "verl",
            "model": {"path": path},
            "data": {"train_batch_size": 2},
            "rollout": {"num_repeat": 2, "max_response_length_in_one_turn": 8, "max_model_len": 256} | rollout,
            "task_reader": {"type": "random_dummy"},
            "trainer_common": {"total_training_steps": steps, "save_freq": 1, "optim": {"lr": 1e-4}},
        }
    }


@dataclass
class Job:
    config: dict[str, Any]


class Caller:
    """One key at TinkerScript's endpoints."""

    def __init__(self, server: Ephebe, key: str | None):
        self.server, self.key = server, key

    def get(self, path: str) -> httpx.Response:
        return self.server.http(key=self.key).get(path)

    def send(self, path: str, **body: Any) -> httpx.Response:
        return self.server.http(key=self.key).post(path, json=body)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.send(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def sync(self, config: dict[str, Any]) -> Any:
        return self.post("/sync_train_config", yaml_as_string=json.dumps(config))

    def state(self) -> Any:
        return self.get("/get_engine_status").json()

    def wait(self, status: str) -> Any:
        self.server.until(lambda: self.state()["engine_status"] == status, timeout_s=BEARABLE_S)
        return self.state()

    def client(self) -> TinkerScriptClient:
        return TinkerScriptClient(self.server.url, self.key)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ephebe]:
    """One for all tests here that kill nothing of it but its engines."""
    flags, folder = ("--agentjet",), tmp_path_factory.mktemp("engine")
    server = ephebe_in(folder, "tinkerscript.port=0", flags=flags, require_key="always")
    with server:
        server.start()
        yield server


@pytest.fixture(scope="module")
def callers(served: Ephebe) -> dict[str, Caller]:
    made = {"admin": ("alice", "admin"), "trainer": ("alice", "trainer"), "worker": ("alice", "worker")}
    made |= {"bob": ("bob", "admin"), "carol": ("carol", "admin")}
    return {
        name: Caller(served, served.make_key(name, owner=owner, right=right)) for name, (owner, right) in made.items()
    }


@pytest.fixture
def admin(callers: dict[str, Caller]) -> Caller:
    return callers["admin"]


# Who may do what, and what is no request


def test_rights(served: Ephebe, callers: dict[str, Caller]) -> None:
    admin_only = ("/sync_train_config", "/start_engine", "/stop_engine")
    assert Caller(served, None).get("/get_engine_status").status_code == 401
    for name in ("worker", "trainer"):
        assert callers[name].get("/get_engine_status").status_code == 200
        for path in admin_only:
            refused = callers[name].send(path, yaml_as_string="ajet: {}")
            assert (refused.status_code, "needs admin" in refused.json()["detail"]) == (403, True)
    assert callers["worker"].send("/update_engine_status", engine_status=ROLLING).status_code == 403


def test_a_trainers_word_is_its_owners_alone(callers: dict[str, Caller]) -> None:
    carol, bob = callers["carol"], callers["bob"]
    assert carol.post("/update_engine_status", engine_status=ROLLING) == {"success": True, "failure_reason": ""}
    assert (carol.state()["engine_status"], bob.state()["engine_status"]) == (ROLLING, OFFLINE)
    refused = carol.post("/update_engine_status", engine_status=BOOTING)
    assert (refused["success"], "not ENGINE.BOOTING" in refused["failure_reason"]) == (False, True)
    started = carol.post("/start_engine")
    assert (started["success"], "another trainer has reported" in started["error"]) == (False, True)
    assert carol.post("/update_engine_status", engine_status=OFFLINE)["success"]
    assert carol.state() == {"engine_status": OFFLINE, "detail": "reported by its trainer"}


def test_a_status_that_nobody_knows_is_refused_with_those_there_are(callers: dict[str, Caller]) -> None:
    response = callers["carol"].post("/update_engine_status", engine_status="ENGINE.OFF")
    assert not response["success"]
    assert "'ENGINE.OFF' is unknown; use one of ENGINE.OFFLINE, ENGINE.BOOTING" in response["failure_reason"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_engine_status", {}),
        ("/update_engine_status", {"engine_status": 1}),
        ("/sync_train_config", {"yaml_as_string": None}),
        ("/start_engine", [1]),
    ],
)
def test_what_is_no_request_is_400(admin: Caller, path: str, body: Any) -> None:
    answer = admin.server.http(key=admin.key).post(path, json=body)
    assert answer.status_code == 400, answer.text


def test_a_config_is_taken_or_refused_in_words(callers: dict[str, Caller]) -> None:
    bob = callers["bob"]
    assert "send one first: /sync_train_config" in bob.post("/start_engine")["error"]
    refused = bob.sync(job("x", path="/models/Qwen3-8B"))
    assert refused["error"] == "ajet.model.path: '/models/Qwen3-8B' is not served here; this server has: ephebe"
    assert "'many'" in bob.sync(job("x", num_repeat="many"))["error"]
    assert "not valid YAML" in bob.post("/sync_train_config", yaml_as_string="ajet: [")["error"]
    taken = bob.sync(job("x", max_env_worker=64))
    assert (taken["success"], "error" in taken) == (True, False)
    assert taken["mapped"] == taken["mapped"] | {"name": "x", "rollout.group_size": 2, "model.name": "ephebe"}
    assert taken["unknown"] == ["ajet.backbone", "ajet.rollout.max_env_worker"]
    assert bob.state()["engine_status"] == OFFLINE


# The second port


def test_whoever_came_by_the_second_port_plays_by_it(served: Ephebe, callers: dict[str, Caller]) -> None:
    second = served.said().partition(SECOND)[2].split()[0]
    assert second != served.url
    http = served.http(key=callers["carol"].key)
    http.put("/episodes/v1/runs/ports", json={}).raise_for_status()
    task = {"id": "t", "environment": "e", "prompt": []}
    groups = [{"group_id": f"g{number}", "size": 1, "task": task} for number in range(2)]
    http.post("/episodes/v1/runs/ports/groups", json={"groups": groups}).raise_for_status()
    request = {"client_uuid": "c", "episode_type": "train", "allow_discard_timeout": 60}
    for url in (served.url, second):
        claimed = http.post(f"{url}/claim_episode", json=request).json()
        assert claimed["openai_base_url"] == f"{url}/v1", claimed
        with openai.OpenAI(base_url=claimed["openai_base_url"], api_key=claimed["openai_api_key"]) as client:
            assert _ask(client).choices
    assert httpx.get(f"{second}/healthz", verify=False).json() == {"status": "ok"}


def test_a_second_port_that_is_taken_is_told_at_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ephebe_in(tmp_path, f"tinkerscript.port={port}", flags=("--tinkerscript",)) as server:
            server.launch()
            assert server.process is not None
            assert server.process.wait(BEARABLE_S) == 1
            response = (
                f"cannot listen on 127.0.0.1:{port} (Address already in use); choose another tinkerscript.port=PORT"
            )
            assert server.said() == f"error: {response}\n"


# A training process


@pytest.mark.slow
def test_an_engine_is_started_dies_goes_on_and_is_stopped(served: Ephebe, admin: Caller, callers: Any) -> None:
    config = job("phoenix")
    assert admin.sync(config)["success"]
    first = psutil.Process(admin.post("/start_engine")["pid"])
    assert "runs already" in admin.post("/start_engine")["error"]
    assert "the engine keeps" in admin.sync(config)["error"]
    assert "/stop_engine" in admin.post("/update_engine_status", engine_status=OFFLINE)["failure_reason"]
    key = first.environ()["TINKER_API_KEY"]
    assert key not in " ".join(first.cmdline()) + served.said()
    admin.wait(ROLLING)
    assert callers["bob"].state()["engine_status"] == OFFLINE
    played = _play_one(callers["worker"].client())

    os.kill(first.pid, signal.SIGKILL)
    detail = admin.wait(OFFLINE)["detail"]
    assert "'phoenix': its training process ended with code -9" in detail
    request = {"client_uuid": "c", "episode_type": "train", "allow_discard_timeout": 60}
    assert OFFLINE in callers["worker"].post("/claim_episode", **request)["fail_cause"]

    assert "continues run 'phoenix'" in admin.sync(config)["notes"][-1]
    again = admin.post("/start_engine")["pid"]
    assert admin.state()["engine_status"] == BOOTING  # what the first one left to be played does not count
    admin.wait(ROLLING)
    stopped = admin.post("/stop_engine")
    assert (stopped["success"], stopped["killed_pids"]) == (True, [again])
    assert stopped["episodes_removed"] >= 1
    assert admin.state() == {"engine_status": OFFLINE, "detail": "it was stopped by /stop_engine"}
    assert not psutil.pid_exists(again)
    run = admin.get("/episodes/v1/runs/phoenix").json()
    assert (run["queued"], run["leased"]) == (0, 0)
    assert played not in {
        one["episode_id"] for one in admin.get("/episodes/v1/episodes?state=cancelled").json()["episodes"]
    }
    admin.server.until(lambda: Caller(served, key).get("/get_engine_status").status_code == 401)
    assert admin.post("/stop_engine") == {"success": True, "killed_pids": [], "episodes_removed": 0}


@pytest.mark.slow
def test_agentjets_cycle_from_a_config_to_trained_steps(make_ephebe: Any) -> None:
    """On loopback without keys, as AgentJet's clients come."""
    caller = Caller(make_ephebe(), None)
    client = caller.client()
    client.auto_sync_train_config_and_start_engine(Job(job("cycle", steps=2)))
    with ThreadPoolExecutor(4) as pool:
        players = [pool.submit(_play_until_offline, caller) for _ in range(4)]
        detail = caller.wait(OFFLINE)["detail"]
        counts = [player.result() for player in players]
    assert detail == "run 'cycle': it finished its last step"
    assert sum(counts) >= 2 * 2 * 2  # steps, groups, members
    (run_folder,) = (caller.server.state / "engines").glob("*/runs/cycle")
    steps = [json.loads(line)["step"] for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 2

    assert client.get_engine_status() == OFFLINE
    client.start_engine()  # the same again is another run
    assert "'cycle-2'" in caller.state()["detail"]
    client.stop_engine()
    with pytest.raises(EngineError, match="is not served here"):
        client.sync_train_config(job("x", path="nothing"))


@pytest.mark.slow
def test_an_engine_that_does_not_listen_is_killed_and_holds_up_nobody(admin: Caller, callers: Any) -> None:
    assert admin.sync(job("deaf"))["success"]
    process = psutil.Process(admin.post("/start_engine")["pid"])
    process.suspend()
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(admin.client().stop_engine)
        admin.wait(OFFLINE)
        assert callers["bob"].state()["engine_status"] == OFFLINE
        assert not stopping.done(), "it was to wait for a process that cannot hear"
        stopping.result(BEARABLE_S)
    assert not process.is_running()
    assert admin.state()["detail"] == "it was stopped by /stop_engine"


@pytest.mark.slow
def test_an_engine_ends_with_its_server_and_goes_on_with_the_next(make_ephebe: Any) -> None:
    caller = Caller(make_ephebe(), None)
    client = caller.client()
    client.auto_sync_train_config_and_start_engine(job("phoenix"))
    process = psutil.Process(_pid_of(caller))
    caller.server.kill()
    caller.server.start()
    assert not process.is_running()  # it was taking leave of a server that is gone
    state = caller.state()
    assert (state["engine_status"], "the server was restarted" in state["detail"]) == (OFFLINE, True)
    client.start_engine()
    assert "'phoenix'" in caller.state()["detail"]
    process = psutil.Process(_pid_of(caller))
    assert caller.server.stop() == 0
    assert not process.is_running()


def _pid_of(caller: Caller) -> int:
    return int(caller.state()["detail"].partition("process ")[2].partition(";")[0])


def _ask(client: openai.OpenAI) -> Any:
    messages: Any = [{"role": "user", "content": "What is 1 + 1?"}]
    return client.chat.completions.create(model="policy", messages=messages, max_tokens=4)


def _play_one(client: TinkerScriptClient) -> str:
    episode, access = client.begin_episode()
    with openai.OpenAI(base_url=access.base_url, api_key=access.api_key) as player:
        text = _ask(player).choices[0].message.content or ""
    client.end_episode(episode, WorkflowOutput(reward=float(len(text) % 3)))
    return episode


def _play_until_offline(caller: Caller) -> int:
    """As AgentJet's client does: claims until there is nobody, and minds no refusal."""
    request = {"client_uuid": f"c{id(caller)}", "episode_type": "train", "allow_discard_timeout": 60, "wait_s": 1}
    ended = 0
    while caller.state()["engine_status"] != OFFLINE:
        claimed = caller.post("/claim_episode", **request)
        if not claimed["success"]:
            continue
        with openai.OpenAI(base_url=claimed["openai_base_url"], api_key=claimed["openai_api_key"]) as player:
            text = _ask(player).choices[0].message.content or ""
        output = {"reward": float(len(text) % 3 + ended % 2)}
        response = {"client_uuid": request["client_uuid"], "episode_uuid": claimed["episode_uuid"]}
        ended += caller.send("/end_episode", **response, workflow_output=output).json().get("success", False)
    return ended
