"""What anybody sees of a server over a socket: contract, section 4."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from palestra.gym.errors import GymConfigError
from palestra.gym.http_app import GymHttpApp
from palestra.gym.peers import GymPeers
from palestra.gym.sessions import SessionSigner
from tests.gym.servers.conftest import SECRET, Counter, Gym, gym_of, listening

COOKIE = "Counter___counter"


def send(gym: Gym, name: str, method: str, path: str, body: bytes | None = None, cookie: str | None = None) -> Any:
    """Status, headers and body as they came."""
    parts = urlsplit(gym.url(name))
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    try:
        connection.request(method, path, body, {} if cookie is None else {"Cookie": cookie})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def cookie_of(headers: Any) -> str:
    return headers["set-cookie"].partition(";")[0]


@pytest.mark.parametrize("path", ["/", "/health", "/healthz", "/livez", "/readyz"])
def test_health_says_whose_it_is(gym: Gym, path: str) -> None:
    status, headers, body = send(gym, "counter", "GET", path)
    assert (status, json.loads(body)) == (200, {"status": "ok"})
    assert headers["x-gym-server"] == "counter"
    assert send(gym, "counter", "HEAD", path)[::2] == (200, b"")


def test_a_session_is_a_cookie_that_comes_with_every_answer(gym: Gym) -> None:
    _, headers, _ = send(gym, "counter", "POST", "/seed_session", b'{"initial_count": 5}')
    given = headers["set-cookie"]
    assert given.startswith(f"{COOKIE}=")
    assert given.partition("; ")[2] == "path=/; Max-Age=1209600; httponly; samesite=lax"
    cookie = cookie_of(headers)
    for path, body, status in [
        ("/show", b"{}", 200),
        ("/add", b'{"count": "x"}', 422),
        ("/nothing", b"{}", 404),
        ("/divide", b'{"by": 0}', 500),
        ("/unspeakable", b"{}", 500),
    ]:
        answer = send(gym, "counter", "POST", path, body, f"other=1; {cookie}")
        assert (answer[0], cookie_of(answer[1])) == (status, cookie)
    assert send(gym, "counter", "POST", "/show", b"", cookie)[2] == b"it is 5"


def test_a_cookie_that_was_not_signed_here_begins_a_new_session(gym: Gym) -> None:
    mine = cookie_of(send(gym, "counter", "POST", "/seed_session", b"{}")[1])
    session_id = mine.partition("=")[2].rpartition(".")[0]
    forged = [
        f"{COOKIE}={session_id}.x",
        f"{COOKIE}={SessionSigner(COOKIE, COOKIE).signed(session_id)}",
        f"{COOKIE}={SessionSigner('Counter___shown', SECRET).signed(session_id)}",
        f"{COOKIE}={SessionSigner(COOKIE, SECRET, 'mcp').signed(session_id)}",
        f"{COOKIE}=ü.ü",
    ]
    for cookie in forged:
        status, headers, body = send(gym, "counter", "POST", "/show", b"{}", cookie)
        assert status == 500
        assert b"session_lost" in body
        assert session_id not in headers["set-cookie"]
    assert send(gym, "counter", "POST", "/show", b"{}", mine)[0] == 200


def test_errors_have_the_words_of_nemo_gym(gym: Gym) -> None:
    broken = send(gym, "counter", "POST", "/divide", b'{"by": 0}')
    assert json.loads(broken[2]) == "ZeroDivisionError('division by zero')"
    wrong = json.loads(send(gym, "counter", "POST", "/add", b'{"count": "x"}')[2])
    assert set(wrong["detail"][0]) == {"type", "loc", "msg", "input"}
    missing = json.loads(send(gym, "counter", "POST", "/verify", b"{}")[2])
    assert [one["loc"][-1] for one in missing["detail"]] == ["response", "expected_count"]
    assert b"not JSON serializable" in send(gym, "counter", "POST", "/unspeakable", b"{}")[2]


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 5000, b"nul"])
def test_what_is_not_json_is_refused(gym: Gym, body: bytes) -> None:
    status, _, response = send(gym, "counter", "POST", "/verify", body)
    assert status == 400
    assert json.loads(response)["detail"].startswith("the body is not JSON")


@pytest.mark.parametrize("body", [b"3", b"[]", b"null", b'"x"'])
@pytest.mark.parametrize("path", ["/seed_session", "/verify", "/aggregate_metrics", "/add"])
def test_a_body_that_is_no_object_is_refused(gym: Gym, path: str, body: bytes) -> None:
    assert send(gym, "counter", "POST", path, body)[0] == 422


def test_what_there_is_not(gym: Gym) -> None:
    assert send(gym, "counter", "GET", "/nowhere")[0] == 404
    assert send(gym, "counter", "GET", "/verify")[0] == 405
    assert send(gym, "counter", "PUT", "/verify", b"{}")[0] == 405
    assert send(gym, "counter", "POST", "/ng-rollout/..%2F/verify", b"{}")[0] == 404


def test_the_rollout_prefix_is_taken_off(gym: Gym) -> None:
    body = json.dumps({"input": [{"content": '["hi"]'}]}).encode()
    for prefix in ("/ng-rollout/7-1", "/ng-rollout/7-1/training-token-capture"):
        answer = json.loads(send(gym, "model", "POST", f"{prefix}/v1/responses", body)[2])
        assert answer["rollout"] == "7-1"


def test_openapi_lists_tools_with_their_arguments(gym: Gym) -> None:
    paths = json.loads(send(gym, "counter", "GET", "/openapi.json")[2])["paths"]
    schema = paths["/add"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"] == {"count": {"type": "integer"}}
    assert "/verify" in paths


def test_reverify_mode_is_told(gym: Gym) -> None:
    assert json.loads(send(gym, "counter", "GET", "/reverify_mode")[2]) == "unsupported"


def test_a_body_may_not_be_endless(gym: Gym) -> None:
    small = gym_of({"counter": (Counter, {})})
    server = Counter(small.servers["counter"], GymPeers(small))
    stop = gym.run(listening(server, SECRET, max_body_bytes=100))
    try:
        status, _, body = send(Gym(small, gym.near, gym.far, gym._loop), "counter", "POST", "/add", b" " * 101)
        assert status == 413
        assert b"larger than 100 bytes" in body
    finally:
        gym.run(stop())


def test_a_name_that_cannot_be_a_cookie_is_refused() -> None:
    config = gym_of({"two words": (Counter, {})})
    server = Counter(config.servers["two words"], GymPeers(config))
    with pytest.raises(GymConfigError, match="two words"):
        GymHttpApp(server, SECRET)
