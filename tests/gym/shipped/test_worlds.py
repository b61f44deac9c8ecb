"""Worlds with a state: the platform's apps, and a game."""

from __future__ import annotations

import json
from typing import Any

import pytest

from palestra.environments.platform import Instance, make_task
from palestra.environments.platform.golden import ANSWER_TOOL, play_golden
from palestra.gym.errors import PeerFailed
from palestra.gym.shipped.resources_servers.guess_number.app import GuessNumber
from palestra.gym.shipped.resources_servers.platform_world.app import PlatformWorld, row_of
from palestra.gym.testing import OpenedServer, model_response, opened


def played(world: OpenedServer, key: str, *, golden: bool) -> dict[str, Any]:
    caller = world.caller()
    row = row_of(key)
    caller.post("/seed_session", row)
    if golden:
        task = make_task(key)
        solution = play_golden(task, Instance(task.seed, variables=task.variables))
        for call, result in solution.steps:
            assert caller.post(f"/{call.tool}", call.arguments).raw().decode() == result.text
        if solution.answer is not None:
            caller.post(f"/{ANSWER_TOOL}", {"answer": solution.answer})
    return caller.verify(model_response("done"), task_key=key)


@pytest.mark.parametrize(
    "key", ["keys-put_and_drop-0d-1", "keys-largest-2-0", "mail-outages_10-4-0", "flights-hand_over-3-0"]
)
def test_the_solution_of_a_task_is_right_and_doing_nothing_is_not(key: str) -> None:
    with opened(PlatformWorld) as world:
        assert played(world, key, golden=True)["reward"] == 1.0
        assert played(world, key, golden=False)["reward"] == 0.0


def test_every_session_has_its_own_world_and_mistakes_are_told_to_the_model() -> None:
    with opened(PlatformWorld) as world:
        one, other = world.caller(), world.caller()
        for caller in (one, other):
            caller.post("/seed_session", row_of("keys-put_number-0b-0"))
        one.post("/drop", {"name": "a"})
        assert json.loads(one.post("/list", {}).raw()) != json.loads(other.post("/list", {}).raw())
        assert json.loads(one.post("/nothing", {}).raw())["error"] == "unknown_tool"
        assert json.loads(one.post(f"/{ANSWER_TOOL}", {"answer": 3}).raw())["error"] == "bad_arguments"


def test_a_task_that_is_none_is_refused() -> None:
    with opened(PlatformWorld) as world:
        answer = world.caller().post("/seed_session", {"task_key": "nothing"})
        assert answer.status == 422
        assert b"not a task key" in answer.raw()
        with pytest.raises(PeerFailed, match="session"):
            world.caller().verify(model_response("x"), task_key="keys-put_number-0b-0")


def test_the_app_and_level_of_a_task_are_in_the_metrics() -> None:
    with opened(PlatformWorld) as world:
        rows = [played(world, "keys-put_number-0b-0", golden=right) for right in (True, False)]
        response = world.caller().post("/aggregate_metrics", {"verify_responses": rows}).value()
        assert response["agent_metrics"]["mean/reward/keys/0b"] == 0.5


def test_a_game_goes_on_until_the_number_is_found() -> None:
    with opened(GuessNumber) as game:
        caller = game.caller()
        row = {"responses_create_params": {"input": []}, "secret": 42, "guesses": 4}
        assert "from 1 to 100" in caller.post("/reset", row).value()["observation"]
        steps = [
            caller.post("/step", {**row, "response": model_response(text)}).value()
            for text in ("50?", "none", "40", "42!")
        ]
        assert [one["observation"] for one in steps] == ["Lower.", "Say a number.", "Higher.", None]
        assert [one["terminated"] for one in steps] == [False, False, False, True]
        assert steps[-1]["reward"] == 0.5


def test_a_guess_is_a_number_however_it_is_written() -> None:
    with opened(GuessNumber) as server:
        caller = server.caller()
        caller.post("/reset", {"secret": 42, "guesses": 4})
        assert caller.post("/step", {"response": model_response("many")}).value()["observation"] == "Say a number."
        assert caller.post("/step", {"response": model_response("42.5")}).value()["observation"] == "Lower."
        assert caller.post("/step", {"response": model_response("So 42.0.")}).value()["terminated"]


def test_a_game_ends_with_the_last_guess() -> None:
    with opened(GuessNumber) as game:
        caller = game.caller()
        row = {"responses_create_params": {"input": []}, "secret": 42, "guesses": 1}
        caller.post("/reset", row)
        step = caller.post("/step", {**row, "response": model_response("7")}).value()
        assert (step["terminated"], step["reward"], step["observation"]) == (True, 0.0, "No. It was 42.")
