"""The page of a gym: servers that really listen, their calls and failures; a gym that is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from palestra.gym.call_counts import MAX_PATHS, OTHERS, CallCounts
from palestra.gym.errors import GymError
from palestra.gym.head import head_app
from palestra.gym.servers.agents import AgentServer, Rollout
from palestra.types.gym_calls import STATS
from palestra.types.gym_failures import FailureClass, RowFailure
from palestra.util.json_types import JsonObject
from palestra.view.app import create_app
from palestra.view.runs.catalogue import Catalogue
from tests.gym.servers.conftest import serving
from tests.view.browser import opened_browser, opened_page, served, why_not
from tests.view.conftest import OpenClient

ROW = {"responses_create_params": {"input": "guess"}}


class NoModel(GymError):
    failure = RowFailure.of(FailureClass.MODEL_UNREACHABLE, "no connection to <b>the endpoint</b>")


class Player(AgentServer):
    async def run(self, row: JsonObject, rollout: Rollout) -> JsonObject:
        if row.get("is_bad"):
            raise NoModel
        return {**row, "reward": 1.0}


@pytest.fixture
def head() -> Iterator[str]:
    """The head of a gym with an agent that has played three rollouts and failed in one, and a server that is down."""
    with serving({"player": (Player, {})}, is_shared=True) as gym:
        for row in (ROW, ROW, ROW | {"is_bad": True}):
            gym.post("player", "/run", row)
        gym.run(gym.near.post("player", "/run", ROW))
        player = {"config_path": "player", "server_type": "responses_api_agents", "name": "simple", "restarts": 2}
        instances: list[Any] = [
            {**player, "url": gym.url("player"), "state": "healthy", "uptime_seconds": 60.0, "pid": 1},
            {"config_path": "world", "server_type": "resources_servers", "name": "world", "state": "restarting"},
        ]
        with served(head_app(gym.config, None, lambda: instances, lambda: False)) as port:
            yield f"http://127.0.0.1:{port}"


def test_calls_within_the_process_and_over_http_are_counted_with_their_failures(
    open_client: OpenClient, root: Path, head: str
):
    client = open_client(root, gym=head)
    gym = client.get("/api/v1/gym").json()
    assert (gym["problem"], gym["is_ready"]) == ("", False)
    assert (gym["rollouts"], gym["rollouts_failed"], gym["rollouts_running"]) == (4, 1, 0)
    assert gym["rollouts_per_s"] > 0
    player, world = gym["servers"]
    assert player["failures"] == {"model_unreachable": 1}
    assert (player["restarts"], player["calls"]) == (2, 4)
    assert (world["state"], world["calls"]) == ("restarting", None)
    page = client.get("/gym").text
    assert "not all servers are healthy" in page
    assert "model_unreachable" in page
    fragment = client.get("/gym", headers={"hx-request": "true"}).text
    assert "<html" not in fragment


@pytest.mark.parametrize("head", ["http://127.0.0.1:1", "http://[", "nowhere"])
def test_a_gym_that_is_away_is_a_page_with_the_command_to_type(open_client: OpenClient, root: Path, head: str):
    client = open_client(root, gym=head)
    assert client.get("/api/v1/gym").json()["problem"]
    page = client.get("/gym").text
    assert "palestra gym run" in page
    assert "palestra view --gym" in page
    assert "--model-url http://127.0.0.1:8000/v1 " in page


def test_rates_are_those_of_the_last_minute_and_paths_are_bounded():
    now = [1000.0]
    counts = CallCounts(lambda: now[0])
    for second in range(120):
        now[0] = 1000.0 + second
        counts.end(counts.begin("/run"), 0.5, "429" if second % 2 else None)
    (run,) = counts.read().paths
    assert (run.calls, run.failed, run.running, run.mean_s) == (120, 60, 0, 0.5)
    assert (run.per_s, run.failed_per_s) == (1.0, 0.5)
    now[0] += 61
    assert counts.read().paths[0].per_s == 0.0
    for number in range(3 * MAX_PATHS):
        counts.begin(f"/tool{number}")
    assert len(counts.read().paths) == MAX_PATHS + 1
    assert OTHERS in [one.path for one in counts.read().paths]


@pytest.mark.ui
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_page_follows_the_gym(root: Path):
    with serving({"player": (Player, {})}, is_shared=True) as gym:
        player: Any = {"config_path": "player", "server_type": "responses_api_agents", "name": "player"}
        player |= {"url": gym.url("player"), "state": "healthy", "uptime_seconds": 1.0}
        with (
            served(head_app(gym.config, None, lambda: [player], lambda: True)) as head,
            served(create_app(Catalogue(root), gym=f"http://127.0.0.1:{head}")) as port,
            opened_browser() as browser,
            opened_page(browser, f"http://127.0.0.1:{port}") as page,
        ):
            page.goto("/")
            page.get_by_role("link", name="Gym").click()
            row = page.get_by_role("row").filter(has_text="player")
            row.get_by_text("healthy").wait_for()
            assert "none" in row.inner_text()
            gym.post("player", "/run", ROW | {"is_bad": True})
            row.get_by_text("model_unreachable").wait_for()


def test_servers_of_others_are_listed_without_counts(open_client: OpenClient, root: Path):
    async def other(_: Request) -> JSONResponse:
        return JSONResponse({"calls": 40})

    with served(Starlette(routes=[Route(STATS, other)])) as port:
        instance: Any = {"config_path": "theirs", "state": "healthy", "url": f"http://127.0.0.1:{port}", "pid": "?"}
        with served(
            Starlette(routes=[Route("/server_instances", lambda _: JSONResponse([instance, "no server"]))])
        ) as head:
            client = open_client(root, gym=f"http://127.0.0.1:{head}")
            (server,) = client.get("/api/v1/gym").json()["servers"]
            assert (server["name"], server["state"], server["calls"], server["pid"]) == (
                "theirs",
                "healthy",
                None,
                None,
            )
            assert "not counted" in client.get("/gym").text
