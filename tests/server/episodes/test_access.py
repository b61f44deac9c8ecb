"""Who may do what, and how a wrong request is told what is wrong."""

from __future__ import annotations

import socket
from typing import Any

import openai
import pytest

from tests.server.episodes.conftest import Api, group, player, ref, say

TRAINER_ONLY = [
    ("PUT", "runs/{run}", {}),
    ("GET", "runs", None),
    ("GET", "runs/{run}", None),
    ("POST", "runs/{run}/groups", {"groups": []}),
    ("GET", "runs/{run}/groups", None),
    ("POST", "runs/{run}/commit", {"cursor": 0}),
    ("POST", "runs/{run}/weights", {"version": 1, "model": "ephebe"}),
    ("POST", "runs/{run}/pause", {}),
    ("POST", "runs/{run}/resume", {}),
    ("POST", "cancel", {"run": "{run}"}),
    ("POST", "requeue", {"episode_ids": []}),
    ("GET", "episodes", None),
    ("GET", "episodes/x", None),
]


def test_a_worker_plays_and_does_nothing_else(alice: Api, worker: Api) -> None:
    alice.register()
    for method, path, body in TRAINER_ONLY:
        answer = worker.send(method, path.format(run=alice.run), body)
        assert answer.status_code == 403, path
        assert "worker" in answer.json()["detail"]
    assert alice.server.http(key=worker.key).get("/v1/models").status_code == 403
    lease = worker.claim_one()
    with player(lease) as client:
        say(client, lease["task"]["prompt"])
    assert worker.beat(lease)[0]["can_continue"]
    assert worker.end(lease)["status"] == "accepted"


def test_a_worker_speaks_only_for_what_it_claimed(alice: Api, worker: Api, keys: dict[str, str]) -> None:
    """Another key is another player, whatever it calls itself."""
    alice.register()
    lease = worker.claim_one()
    for other in (Api(alice.server, keys["other worker"], alice.run), alice):
        (beat,) = other.beat(lease)
        assert (beat["can_continue"], beat["reason"].partition(":")[0]) == (False, "lease_lost")
        assert other.end(lease)["status"] == "lease_lost"
        (beat,) = other.post("release", client_id="player", leases=[ref(lease)])["beats"]
        assert not beat["can_continue"]
    assert worker.beat(lease)[0]["can_continue"]
    named = "x" * 128
    alice.register("long")
    (long,) = worker.claim(client_id=named)
    assert worker.post("heartbeat", client_id=named, leases=[ref(long)])["beats"][0]["can_continue"]


def test_what_is_anothers_does_not_exist(alice: Api, bob: Api) -> None:
    alice.register()
    theirs = Api(bob.server, bob.key, alice.run)
    for method, path, body in TRAINER_ONLY:
        if method == "PUT" or path in ("runs", "requeue", "episodes"):
            continue
        assert theirs.send(method, path.format(run=alice.run), _filled(body, alice.run)).status_code == 404, path
    lease = alice.claim_one()
    assert theirs.beat(lease)[0]["reason"].startswith("unknown")
    assert theirs.end(lease)["status"] == "unknown"
    assert theirs.send("POST", "claim", {"client_id": "x", "claim_id": "y", "run": alice.run}).status_code == 404
    assert theirs.claim(run=None) == []
    assert theirs.put_run()["queued"] == 0  # a run of the same name, and his own
    assert theirs.register() != [lease["episode_id"]]
    assert theirs.send("GET", f"episodes/{lease['episode_id']}").status_code == 404
    assert [run["run"] for run in theirs.get("runs")["runs"]] == [alice.run]
    assert theirs.claim(run=None)[0]["run"] == alice.run
    assert alice.info()["leased"] == 1


def test_without_a_key_there_is_nothing(alice: Api) -> None:
    for key in ("", "tml-wrong", "ep-wrong"):
        assert Api(alice.server, key).send("POST", "claim", {"client_id": "a", "claim_id": "b"}).status_code == 401


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("claim", {"claim_id": "x"}, "client_id is missing"),
    ("claim", {"client_id": "a", "claim_id": "b", "max": 2}, "max: unknown field; did you mean max_n?"),
    ("claim", {"client_id": "a", "claim_id": "b", "max_n": "2"}, "max_n: expected int, got str"),
    ("claim", {"client_id": "a", "claim_id": "b", "max_n": 1000}, "max_n: 1 to 256 is allowed, found 1000"),
    ("claim", {"client_id": "a b", "claim_id": "b"}, "client_id: 1 to 128 of"),
    ("claim", {"client_id": "", "claim_id": "b"}, "client_id is missing; send any name"),
    ("claim", {"client_id": "a", "claim_id": "b", "wait_s": -1}, "wait_s: 0 seconds or more, found -1.0"),
    ("claim", {"client_id": "a", "claim_id": "b", "kind": "tain"}, "kind: 'tain' is unknown; send one of train, eval"),
    ("claim", {"client_id": "a", "claim_id": "b", "max_n": 2**70}, "a number in the body does not fit into 64 bits"),
    ("end", {"client_id": "a", "ends": [{"episode_id": "e", "result": {}}]}, "ends[0].attempt is missing"),
    ("end", {"ends": []}, "client_id is missing"),
    ("heartbeat", {"client_id": "a", "leases": [{}] * 5000}, "leases[0].episode_id is missing"),
    ("requeue", {"episode_id": []}, "episode_id: unknown field; did you mean episode_ids?"),
]


@pytest.mark.parametrize(("path", "body", "detail"), WRONG)
def test_a_wrong_body_is_told_what_is_wrong(alice: Api, path: str, body: dict[str, Any], detail: str) -> None:
    answer = alice.send("POST", path, body)
    assert answer.status_code == 400, answer.text
    assert detail in answer.json()["detail"]


def test_a_wrong_group_is_told_what_is_wrong(alice: Api) -> None:
    path = f"runs/{alice.run}/groups"
    for wrong, detail in (
        (group(size=0), "size: 1 or more"),
        (group(count=0), "count must be at least size"),
        (group(on_los="drop"), "groups[0].on_los: unknown field; did you mean on_loss?"),
        (group() | {"task": {"id": "x"}}, "task.environment is missing"),
        (group(seeds=[1, 2]), "seeds: at most"),
        (group(tags={"a": 1}), "expected str, got int"),
    ):
        answer = alice.send("POST", path, {"groups": [wrong]})
        assert (answer.status_code, detail in answer.json()["detail"]) == (400, True), answer.text
    huge = group() | {"task": group()["task"] | {"extras": {"a": "x" * (1 << 20)}}}
    assert alice.send("POST", path, {"groups": [huge]}).status_code == 413
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    answer = alice.send("POST", path, {"groups": [group() | {"task": group()["task"] | {"extras": {"a": deep}}}]})
    assert (answer.status_code, "nested" in answer.json()["detail"]) == (400, True)
    alice.register()
    assert alice.send("POST", path, {"groups": [group(size=2)]}).status_code == 409
    assert alice.of_run("groups", groups=[group()])["groups"][0]["is_new"] is False
    assert alice.info()["queued"] == 1


def test_results_that_are_no_results_are_refused_one_by_one(alice: Api) -> None:
    alice.register(size=2)
    good, bad = alice.claim(max_n=2)
    ends = [ref(good) | {"result": {"reward": 1.0}}, ref(bad) | {"result": {}}]
    response = alice.post("end", client_id="player", ends=ends)["ended"]
    assert [one["status"] for one in response] == ["accepted", "invalid"]
    assert "it has no reward" in response[1]["detail"]
    assert alice.episode(bad["episode_id"])["state"] == "leased"
    http = alice.server.http(key=alice.key)
    answer = http.post("/episodes/v1/end", content=b'{"client_id": "player", "ends": [{"reward": NaN}]}')
    assert answer.status_code == 400


def test_a_run_may_have_slashes_in_its_name(alice: Api) -> None:
    api = Api(alice.server, alice.key, "team%2Fmath%2Fgroups-1")
    name = "team/math/groups-1"
    assert api.put_run()["run"] == name
    api.register()
    assert api.end(api.claim_one(run=name))["status"] == "accepted"
    assert api.played()[0]["number"] == 1
    assert api.info()["delivered"] == 1
    answer = alice.send("PUT", "runs/a/groups", {})
    assert (answer.status_code, "choose another" in answer.json()["detail"]) == (400, True)


def test_a_full_queue_asks_to_come_back(alice: Api) -> None:
    alice.put_run(max_queued=2)
    alice.register("a", size=2)
    answer = alice.send("POST", f"runs/{alice.run}/groups", {"groups": [group("b")]})
    assert (answer.status_code, float(answer.headers["retry-after"]) > 0) == (429, True)


def test_no_key_is_ever_in_the_log(alice: Api) -> None:
    alice.register()
    lease = alice.claim_one()
    with player(lease) as client:
        say(client, lease["task"]["prompt"])
    alice.end(lease)
    log = alice.server.log.read_text()
    assert lease["api_key"] not in log
    for event, name in (
        ("group registered", alice.run),
        ("episode claimed", lease["episode_id"]),
        ("episode ended", lease["episode_id"]),
        ("group ready", alice.run),
    ):
        assert any(event in line and name in line for line in log.splitlines()), event


def test_episodes_are_listed_and_counted(alice: Api) -> None:
    alice.register("a", size=2, kind="eval", priority=3)
    alice.register("b", size=1)
    lease = alice.claim_one()
    assert lease["kind"] == "eval"
    page = alice.get("episodes", run=alice.run, limit=2)
    assert (page["total"], [one["state"] for one in page["episodes"]]) == (3, ["leased", "queued"])
    assert alice.get("episodes", run=alice.run, state="leased")["total"] == 1
    assert alice.get("episodes", run=alice.run, offset=2)["episodes"][0]["group_id"] == "b"
    assert alice.get("episodes", run=alice.run, offset=2**63 - 1)["episodes"] == []
    metrics = alice.metrics()
    of = f'owner="alice",run="{alice.run}"'
    for line in (
        f'queued{{kind="eval",{of}}} 1.0',
        f'queued{{kind="train",{of}}} 1.0',
        f'leased{{kind="eval",{of}}} 1',
    ):
        assert f"palestra_episodes_{line}" in metrics, line


def _filled(body: dict[str, Any] | None, run: str) -> dict[str, Any] | None:
    return {name: run if value == "{run}" else value for name, value in body.items()} if body else body


@pytest.mark.parametrize(
    "path",
    [
        "/episodes/v1/claim",
        "/api/v1/create_session",
        "/api/v1/forward_backward",
        "/v1/chat/completions",
        "/end_episode",
    ],
)
@pytest.mark.parametrize("key", ["", "x-api-key: tml-nobody\r\n", "authorization: Bearer ep-nobody\r\n"])
def test_of_somebody_without_a_key_no_body_is_read(keyed: Any, path: str, key: str) -> None:
    """The answer comes although the body never does."""
    for length in ("content-length: 10000000", "transfer-encoding: chunked"):
        with socket.create_connection(("127.0.0.1", keyed.port), timeout=60) as line:
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{key}{length}\r\n\r\n"
            line.sendall(head.encode())
            assert line.recv(1 << 16).startswith(b"HTTP/1.1 401 ")


def test_responses_are_their_owners(alice: Api, bob: Api) -> None:
    """Another owner finds neither a response by its id nor the conversation behind it."""
    url = f"{alice.server.url}/v1"
    with openai.OpenAI(base_url=url, api_key=alice.key) as mine, openai.OpenAI(base_url=url, api_key=bob.key) as other:
        saved = mine.responses.create(model="ephebe", input="Hi", max_output_tokens=3)
        assert mine.responses.retrieve(saved.id).output == saved.output
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            other.responses.retrieve(saved.id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            other.responses.delete(saved.id)
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            other.responses.create(model="ephebe", input="And?", previous_response_id=saved.id, max_output_tokens=3)
        assert mine.responses.create(model="ephebe", input="And?", previous_response_id=saved.id, max_output_tokens=3)
