"""The calls that go past FastAPI's routing: to whoever calls there is no difference."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.episodes.conftest import Api, group


def requests_counted(api: Api, route: str, status: int) -> float:
    lines = api.server.http(key=api.key).get("/metrics").text.splitlines()
    wanted = f'palestra_requests_total{{route="{route}",status="{status}"}} '
    return sum(float(line.removeprefix(wanted)) for line in lines if line.startswith(wanted))


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
