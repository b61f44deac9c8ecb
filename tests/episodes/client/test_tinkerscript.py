"""The class with AgentJet's names: what it sends, field by field, and what it makes of the answers."""

from __future__ import annotations

from types import SimpleNamespace

import pydantic
import pytest
import yaml

from palestra.episodes import EpisodeApiError, EpisodeClientError, TinkerScriptClient
from palestra.episodes.client import tinkerscript
from palestra.episodes.client.tinkerscript import EngineError, WorkflowOutput
from tests.episodes.client.faults import Answer, Drop, FaultServer, Seen

CLAIMED = Answer(
    200,
    {
        "success": True,
        "client_uuid": "c",
        "episode_uuid": "e1",
        "openai_base_url": "http://127.0.0.1:1/v1",
        "openai_api_key": "ep-x",
        "fail_cause": "",
        "lease_id": "e1#2",
        "task": {"id": "t"},
    },
)
NONE_YET = Answer(200, {"success": False, "fail_cause": "No available episodes to claim"})
DONE = Answer(200, {"success": True})


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(tinkerscript, "POLL_S", 0.0)


def engine(*states: str) -> list[Answer]:
    return [Answer(200, {"engine_status": f"ENGINE.{state}"}) for state in states]


def paths(server: FaultServer) -> list[str]:
    return [seen.path for seen in server.requests]


def test_an_episode_from_begin_to_end():
    with FaultServer(NONE_YET, Drop(), CLAIMED, Answer(200, {"can_continue": True}), DONE) as server:
        client = TinkerScriptClient(server.url + "/", key="tml-x")
        uuid, access = client.begin_episode(allow_discard_timeout=90, episode_type="eval")
        assert client.can_continue_episode(uuid)
        client.end_episode(uuid, WorkflowOutput(reward=1.0, is_success=True, log_metrics={"turns": 2.0}))
        assert (uuid, access.base_url, access.api_key) == ("e1", "http://127.0.0.1:1/v1", "ep-x")
        assert (access.model, access.episode_uuid, access.task) == ("reserved_field", "e1", {"id": "t"})
        request = [seen.body for seen in server.requests]
        claim_ids = [body.pop("claim_id") for body in request[:3]]
        assert claim_ids[0] != claim_ids[1] == claim_ids[2]
        assert request[0] == {
            "client_uuid": client.client_uuid,
            "episode_type": "eval",
            "allow_discard_timeout": 90.0,
        }
        output = {"reward": 1.0, "is_success": True, "metadata": {}, "log_metrics": {"turns": 2.0}}
        names = {"client_uuid": client.client_uuid, "episode_uuid": "e1", "lease_id": "e1#2"}
        assert request[3:] == [names, {**names, "workflow_output": output}]
        assert server.requests[0].headers["x-api-key"] == "tml-x"


def test_outputs_of_other_makes_are_taken_and_a_lease_is_not_needed():
    class Theirs(pydantic.BaseModel):
        reward: float
        is_success: bool | None = None

    with FaultServer(DONE) as server:
        client = TinkerScriptClient(server.url)
        client.end_episode("e9", Theirs(reward=0.25))
        client.end_episode("e9", {"reward": 0.5})
        assert [seen.body["workflow_output"] for seen in server.requests] == [
            {"reward": 0.25, "is_success": None},
            {"reward": 0.5},
        ]
        assert "lease_id" not in server.requests[0].body
        with pytest.raises(EpisodeClientError, match="a WorkflowOutput is needed, found float"):
            client.end_episode("e9", 0.5)


def test_an_end_that_is_refused_is_not_swallowed():
    with FaultServer(Answer(200, {"success": False, "error": "lease_lost"}), Answer(400, {"detail": "gone"})) as server:
        client = TinkerScriptClient(server.url)
        with pytest.raises(EpisodeClientError, match="episode e1 was not ended: lease_lost"):
            client.end_episode("e1", WorkflowOutput(reward=1.0))
        with pytest.raises(EpisodeApiError, match="gone"):
            client.end_episode("e1", WorkflowOutput(reward=1.0))


def test_an_engine_is_given_its_config_started_and_stopped():
    job = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: {"ajet": {"backbone": "verl"}}))
    acts = [*engine("OFFLINE", "OFFLINE"), DONE, *engine("OFFLINE"), DONE, *engine("BOOTING", "ROLLING")]
    acts += [*engine("ROLLING"), *engine("ROLLING"), DONE, *engine("OFFLINE"), *engine("OFFLINE")]
    with FaultServer(*acts) as server:
        client = TinkerScriptClient(server.url)
        client.auto_sync_train_config_and_start_engine(job)
        client.auto_sync_train_config_and_start_engine(job)  # plays already
        client.stop_engine()
        client.stop_engine()  # is off already
        sent = next(seen for seen in server.requests if seen.path == "/sync_train_config")
        assert yaml.safe_load(sent.body["yaml_as_string"]) == {"ajet": {"backbone": "verl"}}
        assert [path for path in paths(server) if path != "/get_engine_status"] == [
            "/sync_train_config",
            "/start_engine",
            "/stop_engine",
        ]


def test_an_engine_that_is_busy_is_waited_for_or_told():
    with FaultServer(*engine("WEIGHT_SYNCING", "WEIGHT_SYNCING", "ROLLING")) as server:
        TinkerScriptClient(server.url).auto_sync_train_config_and_start_engine("ajet: {}")
        assert set(paths(server)) == {"/get_engine_status"}
    with FaultServer(*engine("ROLLING")) as server:
        client = TinkerScriptClient(server.url)
        for call in (client.start_engine, lambda: client.sync_train_config({"ajet": {}})):
            with pytest.raises(EngineError, match=r"needs ENGINE.OFFLINE, but .* is ENGINE.ROLLING"):
                call()
    with FaultServer(*engine("WEIGHT_EXPORTING")) as server, pytest.raises(EngineError, match="WEIGHT_EXPORTING"):
        TinkerScriptClient(server.url).auto_sync_train_config_and_start_engine("ajet: {}")


@pytest.mark.parametrize(
    ("acts", "said"),
    [
        ([Answer(200, {"success": False, "error": "no config"})], "/start_engine: no config"),
        ([DONE, *engine("BOOTING", "OFFLINE")], "the engine did not start"),
    ],
)
def test_an_engine_that_does_not_start_is_told(acts, said):
    with FaultServer(*engine("OFFLINE"), *acts) as server, pytest.raises(EngineError, match=said):
        TinkerScriptClient(server.url).start_engine()


def test_status_and_buffer():
    def response(seen: Seen) -> Answer:
        if seen.path == "/get_engine_status":
            return engine("ROLLING")[0]
        return Answer(200, {"buffer": [{"episode_uuid": "e1", "episode_status": "claimed", "openai_api_key": "ep-…"}]})

    with FaultServer(response) as server:
        client = TinkerScriptClient(server.url)
        assert client.get_engine_status() == "ENGINE.ROLLING"
        (one,) = client.get_episode_buffer()
        assert (one.episode_uuid, one.episode_status) == ("e1", "claimed")
        url = server.url
    assert TinkerScriptClient(url).get_engine_status() == "unknown"
