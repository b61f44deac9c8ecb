"""The calls of players, and what they are told when something is wrong, beside a proxy or behind one."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from palestra.server.broker.attempt_keys import EpisodeKeys
from palestra.server.core.owners.callers import AttemptRef
from tests.server.episodes.conftest import Api, group, ref

BEHIND_A_PROXY = {"x-forwarded-for": "127.0.0.1", "x-forwarded-proto": "http"}
WAYS = pytest.mark.parametrize("headers", [{}, BEHIND_A_PROXY], ids=["direct", "proxy"])


def told(api: Api, path: str, body: Any, headers: dict[str, str]) -> tuple[int, Any, str | None]:
    answer = api.send("POST", path, body, headers=headers)
    assert answer.headers["content-type"] == "application/json"
    return answer.status_code, answer.json(), answer.headers.get("retry-after")


@WAYS
def test_a_cycle_with_or_without_a_proxy(alice: Api, worker: Api, headers: dict[str, str]) -> None:
    alice.put_run()
    status, registered, _ = told(alice, f"runs/{alice.run}/groups", {"groups": [group("g", 2)]}, headers)
    assert (status, registered["groups"][0]["is_new"]) == (200, True)
    request = {"client_id": "laptop", "claim_id": f"of-{alice.run}", "run": alice.run, "max_n": 2}
    _, claimed, _ = told(worker, "claim", request, headers)
    first, second = claimed["leases"]
    assert first["base_url"] == f"{alice.server.url}/v1"
    assert told(worker, "claim", request, headers)[1]["leases"][0]["api_key"] == first["api_key"]
    mine = {"client_id": "laptop", "leases": [ref(first)]}
    assert told(worker, "heartbeat", mine, headers)[1]["beats"][0]["can_continue"]
    ended = told(worker, "end", {"client_id": "laptop", "ends": [ref(first) | {"result": {"reward": 1}}]}, headers)
    assert ended[1]["ended"][0]["status"] == "accepted"
    own = Api(alice.server, second["api_key"], alice.run)
    assert told(own, "heartbeat", {"leases": [ref(second)]}, headers)[0] == 200
    assert not told(own, "release", {"leases": [ref(second)]}, headers)[1]["beats"][0]["can_continue"]


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("claim", {"client_id": "c", "claim_id": "c", "wait_s": -1}, "wait_s: 0 seconds or more"),
        ("claim", {"client_id": "c", "claim_id": "c", "max_n": 0}, "max_n:"),
        ("claim", {"client_id": "c", "claim_id": "c", "kind": "exam"}, "kind: 'exam' is unknown; send one of"),
        ("claim", {"client_id": 7, "claim_id": "c"}, "client_id: expected str"),
        ("claim", {"claim_id": "c"}, "client_id is missing"),
        ("claim", {"client_id": "", "claim_id": "c"}, "client_id is missing"),
        ("claim", ["no", "object"], "the body must be a JSON object"),
        ("heartbeat", {"client_id": "c", "leases": [{"episode_id": "e"}]}, "leases[0].attempt is missing"),
        (
            "heartbeat",
            {"client_id": "c", "leases": [{"episode_id": "e", "attempt": 1, "extra": 1}]},
            "leases[0].extra: unknown field",
        ),
        (
            "end",
            {"client_id": "c", "ends": [{"episode_id": "e", "attempt": 1, "result": {"rewards": 1}}]},
            "ends[0].result.rewards: unknown field; did you mean reward?",
        ),
        (
            "end",
            {"client_id": "c", "ends": [{"episode_id": "e", "attempt": 2**70, "result": {}}]},
            "a number in the body does not fit",
        ),
        ("release", {"client_id": "c", "leases": [], "because": "x"}, "because: unknown field"),
        (
            "runs/of-nobody/groups",
            {"groups": [group("g") | {"on_loss": "cry"}]},
            "groups[0].on_loss: 'cry' is unknown; send one of",
        ),
        ("runs/of-nobody/groups", {"groups": [group("g") | {"size": 1.5}]}, "groups[0].size:"),
    ],
)
def test_what_is_wrong_is_refused_in_plain_words(alice: Api, path: str, body: Any, said: str) -> None:
    status, answer, _ = told(alice, path, body, {})
    assert (status, said in answer["detail"]) == (400, True), answer


@WAYS
def test_who_comes_too_often_is_told_when_to_come_again(alice: Api, headers: dict[str, str]) -> None:
    alice.put_run(max_queued=1)
    alice.register("first")
    status, body, retry_after = told(alice, f"runs/{alice.run}/groups", {"groups": [group("second")]}, headers)
    assert (status, "at most 1" in body["detail"]) == (429, True)
    assert float(retry_after or 0) > 0


def test_a_run_named_with_what_ends_a_path_is_another_path(alice: Api) -> None:
    alice.put_run()
    raw = f"POST /episodes/v1/runs/{alice.run}#x/groups HTTP/1.1\r\nhost: localhost\r\nx-api-key: {alice.key}\r\n"
    assert ask_raw(alice, f"{raw}content-length: 2\r\n\r\n{{}}").split()[1] == "405"


def ask_raw(api: Api, request: str) -> str:
    url = urlsplit(api.server.url)
    with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
        connection.sendall(request.encode())
        return connection.recv(1 << 16).decode()


def test_keys_of_attempts_stay_what_they_were_in_earlier_versions() -> None:
    """A server that was updated meanwhile is shown keys that were made before."""
    secret = hashlib.sha256(b"episode keys\0a secret").digest()
    mark = hmac.digest(secret, b"alice\0e-1\x003", "sha256")
    expected = "ep-" + base64.urlsafe_b64encode(mark).decode().rstrip("=")
    assert EpisodeKeys("a secret").make(AttemptRef("alice", "e-1", 3)) == expected


def requests_counted(api: Api, route: str, status: int) -> float:
    lines = api.metrics().splitlines()
    expected = f'palestra_requests_total{{route="{route}",status="{status}"}} '
    return sum(float(line.removeprefix(expected)) for line in lines if line.startswith(expected))


@pytest.mark.parametrize(
    ("path", "route"),
    [
        *((name, name) for name in ("claim", "heartbeat", "end", "release")),
        ("runs/of-nobody/a/b/groups", "runs/{run:path}/groups"),
    ],
)
def test_what_is_wrong_is_told_and_counted_under_the_routes_name(alice: Api, path: str, route: str) -> None:
    route = f"/episodes/v1/{route}"
    before = requests_counted(alice, route, 400)
    answer = alice.send("POST", path, {"client": "laptop"})
    assert (answer.status_code, "client: unknown field" in answer.json()["detail"]) == (400, True), answer.text
    assert requests_counted(alice, route, 400) == before + 1


@pytest.mark.parametrize("body", [b"[" * 1000, b"\xff", b'{"client_id": 1e999}', b'{"max_n": 99999999999999999999}'])
def test_a_body_that_cannot_be_read_is_refused(alice: Api, body: bytes) -> None:
    answer = alice.server.http(key=alice.key).post("/episodes/v1/claim", content=body)
    assert answer.status_code == 400, answer.text


def test_a_body_that_is_too_long_is_refused_whatever_its_headers_say(alice: Api) -> None:
    def parts() -> Any:
        yield from [b" " * (1 << 20)] * 17

    answer = alice.server.http(key=alice.key).post("/episodes/v1/claim", content=parts())
    assert (answer.status_code, "longer than" in answer.json()["detail"]) == (413, True)


def test_other_methods_and_names_get_the_answers_of_everything_else(alice: Api) -> None:
    assert alice.send("GET", "claim").status_code == 405
    assert alice.send("POST", "claim/").status_code == 307
    assert alice.send("POST", "claims").status_code == 404
    assert alice.send("POST", "runs/a%20b/groups", {"groups": []}).status_code == 400
    assert alice.send("POST", "runs//groups", {"groups": []}).status_code == 400


def test_who_may_not_call_is_refused_before_the_body_is_looked_at(alice: Api, worker: Api, keyed: Any) -> None:
    assert worker.send("POST", f"runs/{alice.run}/groups", {"no": "field"}).status_code == 403
    nobody = Api(keyed, "tml-nobody")
    assert {nobody.send("POST", path, {"no": "field"}).status_code for path in ("claim", "heartbeat", "end")} == {401}


def test_names_of_runs_may_look_like_paths(alice: Api) -> None:
    nested = Api(alice.server, alice.key, f"{alice.run}/v1:a#b/c")
    nested.run = nested.run.replace("#", "%23")
    nested.put_run()
    answer = nested.of_run("groups", groups=[group("g/1")])
    assert answer["groups"][0]["is_new"]
