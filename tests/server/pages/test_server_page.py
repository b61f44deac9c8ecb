"""The page of the server: what it says is what the server does, and to each only what is theirs."""

from __future__ import annotations

import json

import pytest

from tests.server.raw import Raw
from tests.waiting import until


@pytest.fixture
def her_model(keyed, keys):
    return Raw(keyed, keys["alice"]).model(base_model="ephebe")


def test_tokens_calls_and_models_are_counted(open_browser, her_model):
    her_model.works()
    carol = open_browser("carol")

    def engine() -> dict:
        return carol.get("/api/v1/server").json()["engines"][0]

    until(lambda: engine()["tokens_trained"] > 0)
    state = carol.get("/api/v1/server").json()
    (mine,) = [one for one in state["models"] if one["model_id"] == her_model.model_id]
    assert (mine["owner"], mine["pending"]) == ("alice of pages", 0)
    assert state["engines"][0]["is_up"]
    assert state["troubles"] == []
    until(lambda: "forward_backward" in [one["type"] for one in carol.get("/api/v1/server").json()["calls"]])
    page = carol.get("/server").text
    assert her_model.model_id in page
    assert "forward_backward" in page


def test_an_owner_sees_nothing_of_another(open_browser, her_model):
    bob, prometheus = open_browser("bob"), open_browser("prometheus")
    assert her_model.model_id in open_browser("alice").get("/server").text
    for other in (bob, prometheus):
        assert her_model.model_id not in other.get("/server").text
        assert her_model.model_id not in other.get("/api/v1/server").text
    state = bob.get("/api/v1/server").json()
    assert (state["sees_all"], state["calls"], state["models"]) == (False, [], [])
    assert state["engines"][0]["tokens_trained"] is None
    assert bob.get("/api/v1/server/charts").json() == {}
    assert prometheus.get("/api/v1/server").json()["engines"][0]["tokens_trained"] is not None


def test_charts_go_on_by_events(open_browser):
    carol = open_browser("carol")
    with carol.stream("GET", "/api/v1/server/live") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        first, second = (json.loads(next(lines).removeprefix("data: ")) for _ in range(2))
    assert second["at"] > first["at"]
    charts = carol.get("/api/v1/server/charts").json()["ephebe"]
    names = {line["name"] for chart in charts for line in chart["series"]["lines"]}
    assert names == set(second) - {"at"}
