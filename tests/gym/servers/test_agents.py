"""The agents play as NeMo Gym's do, whether the servers share a process or not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from palestra.gym.agents import GymnasiumAgent, RemoteAgent, SimpleAgent
from palestra.gym.agents.gymnasium import GymnasiumAgentSettings
from palestra.gym.agents.remote import RemoteAgentSettings
from palestra.gym.agents.simple import SimpleAgentSettings
from palestra.gym.errors import GymConfigError
from palestra.gym.servers.agents import AgentServer, Reply, Rollout
from palestra.gym.servers.responses import output_text
from palestra.gym.testing import model_response, opened
from palestra.gym.wire import GymRequest
from palestra.types.gym import PARAMS, TURN_TIMES
from tests.properties import examples

FAILED_BEFORE = {"_ng_failure_class": "model_timeout", "failure_reason": 'it "hung"'}
NAMES = [
    PARAMS,
    "input",
    "tools",
    "response",
    "verify_responses",
    "_ng_task_index",
    "_ng_rollout_index",
    "reward",
    "secret",
]


@pytest.fixture(params=["gym", "shared_gym"])
def any_gym(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def row(*turns: Any, **fields: Any) -> dict[str, Any]:
    return {PARAMS: {"input": [{"role": "user", "content": json.dumps(turns)}]}, "expected_count": 0, **fields}


def outputs(found: dict[str, Any]) -> list[str]:
    return [item["output"] for item in found["response"]["output"] if item["type"] == "function_call_output"]


def test_an_environment_server_answers_as_its_agent_does(any_gym: Any) -> None:
    given = row({"add": {"count": 2}}, "done", expected_count=2)
    own, relayed = (any_gym.post(name, "/run", given) for name in ("agent", "front"))
    assert (relayed.status, relayed.value()["reward"]) == (200, 1.0)
    assert outputs(relayed.value()) == outputs(own.value())
    refused = [any_gym.post(name, "/run", {PARAMS: 3}) for name in ("agent", "front")]
    assert (refused[1].status, refused[1].value()) == (refused[0].status, refused[0].value())
    rollouts = {"verify_responses": [{"reward": 1.0, "_ng_task_index": 0, "_ng_rollout_index": 0}]}
    counted = [any_gym.post(name, "/aggregate_metrics", rollouts).value() for name in ("agent", "front")]
    assert counted[1] == counted[0]
    assert any_gym.post("front", "/v1/responses", {}).status == 404


def test_a_rollout_keeps_its_session_from_seed_to_verdict(any_gym: Any) -> None:
    turns = [{"add": {"count": 2}}, {"add": {"count": 3}, "show": {}}, "done"]
    found = any_gym.post("agent", "/run", row(*turns, initial_count=1, expected_count=6)).value()
    assert (found["reward"], found["count"]) == (1.0, 6)
    assert outputs(found) == ['{"count":3}', '{"count":6}', "it is 6"]
    assert [min(seconds) >= 0 for seconds in found[TURN_TIMES]] == [True] * 3
    kinds = [item["type"] for item in found["response"]["output"]]
    assert kinds == [
        *("function_call", "function_call_output"),
        *2 * ["function_call"],
        *2 * ["function_call_output"],
        "message",
    ]
    assert found["response"]["usage"] == {
        "input_tokens": 6,
        "output_tokens": 3,
        "total_tokens": 9,
        "input_tokens_details": {"cached_tokens": None},
    }


def test_the_row_comes_back_with_every_request_field(any_gym: Any) -> None:
    found = any_gym.post("agent", "/run", row("hello", expected_count=0)).value()
    params = found[PARAMS]
    assert params["tool_choice"] == "auto"
    assert params["temperature"] is None
    assert params["tools"] == []
    assert len(params) == 23


def test_what_a_tool_says_reaches_the_model_whatever_its_status(any_gym: Any) -> None:
    turns = [{"divide": {"by": 0}}, {"nothing": {}}, {"add": {"count": "x"}}, {"add": "{not json"}, "done"]
    found = any_gym.post("agent", "/run", row(*turns)).value()
    broken, unknown, wrong, bad = outputs(found)
    assert broken == "\"ZeroDivisionError('division by zero')\""
    assert unknown == '{"detail":"Not Found"}'
    assert json.loads(wrong)["detail"][0]["loc"] == ["body", "count"]
    assert json.loads(bad)["error"].startswith("Invalid tool call arguments: JSONDecodeError(")
    assert found["reward"] == 1.0


@pytest.mark.parametrize(
    "name", ["verify", "seed_session", "close_session", "ng-rollout/x/verify", "aggregate_metrics"]
)
def test_a_model_cannot_call_the_servers_own_routes(any_gym: Any, name: str) -> None:
    turns = [{name: {"initial_count": 7}}, "done"]
    found = any_gym.post("agent", "/run", row(*turns, expected_count=0)).value()
    assert outputs(found) == ['{"detail":"Not Found"}']
    assert found["count"] == 0


def test_it_stops_when_it_should(any_gym: Any) -> None:
    cut = any_gym.post("agent", "/run", row("cut", "never said")).value()
    assert [item["type"] for item in cut["response"]["output"]] == ["message"]
    thought = any_gym.post("agent", "/run", row({"think": 0}, "said")).value()
    assert [item["type"] for item in thought["response"]["output"]] == ["reasoning", "message"]
    endless = any_gym.post("agent", "/run", row(*20 * [{"add": {"count": 1}}])).value()
    assert len(outputs(endless)) == 6


def test_model_calls_carry_rollout_and_session(any_gym: Any) -> None:
    named = row({"add": {"count": 1}}, "done", _ng_task_index=4, _ng_rollout_index=2, _ng_attempt_index=1)
    response = any_gym.post("agent", "/run", named).value()["response"]
    assert (response["rollout"], response["captured"]) == ("4-2-a1", False)
    kept = any_gym.post("kept", "/run", named).value()["response"]
    assert (kept["rollout"], kept["captured"]) == ("4-2-a1", True)
    again = any_gym.post("agent", "/ng-rollout/mine/v1/responses", row("hi")[PARAMS]).value()
    assert again["rollout"] == "mine"
    for bad in ({"_ng_rollout_id": "../x"}, {"_ng_rollout_id": "x", "_ng_attempt_index": "1/../../verify"}):
        assert any_gym.post("agent", "/run", row("hi", **bad)).status == 422


@pytest.mark.parametrize(
    ("turn", "status", "failure", "words"),
    [
        ({"status": 503, "body": {"error": "busy"}}, 500, "model_error", "model/v1/responses answered 503: busy"),
        ({"status": 500, "body": FAILED_BEFORE}, 500, "model_timeout", 'it "hung"'),
        ({"status": 404, "body": {"detail": "no such model"}}, 500, "model_error", "answered 404: no such model"),
        ({"status": 422, "body": {"detail": "no images"}}, 422, "row_refused", "answered 422: no images"),
        ({"status": 200, "body": {"output": "none"}}, 500, "bad_answer", "model returned no Responses object"),
    ],
)
def test_a_model_that_fails_fails_the_rollout_in_its_words(
    any_gym: Any, turn: dict[str, Any], status: int, failure: str, words: str
) -> None:
    answer = any_gym.post("agent", "/run", row(turn))
    response = answer.value()
    assert (answer.status, response["_ng_failure_class"]) == (status, failure)
    assert words in response["failure_reason"]
    assert response.get("_ng_failure_terminal", False) is (status == 422)


def test_a_verifier_that_refuses_is_told_from_one_that_breaks(any_gym: Any) -> None:
    refused = any_gym.post("agent", "/run", row("hello", expected_count="many"))
    assert (refused.status, refused.value()["_ng_failure_class"]) == (422, "verifier_refused")
    assert refused.value()["failure_reason"].startswith("counter/verify answered 422: body.expected_count: Expected")
    broken = any_gym.post("agent", "/run", row("break"))
    assert (broken.status, broken.value()["_ng_failure_class"]) == (500, "verifier_error")
    assert broken.value()["failure_reason"] == "counter/verify answered 500: ZeroDivisionError('division by zero')"
    unseeded = any_gym.post("agent", "/run", row("hello", initial_count="many"))
    assert (unseeded.status, unseeded.value()["_ng_failure_class"]) == (422, "row_refused")


def test_a_failed_judge_is_a_row_for_the_failures(any_gym: Any) -> None:
    found = any_gym.post("agent", "/run", row("judge me")).value()
    assert found["_ng_failure_class"] == "judge_failed"
    assert found["_ng_failure_judge_error"] == found["failure_reason"] == "the judge sleeps"
    assert found["reward"] == 0.0


def test_verification_can_be_skipped(any_gym: Any) -> None:
    found = any_gym.post("unjudged", "/run", row("hello", extra="kept")).value()
    assert (found["reward"], found["verification_skipped"], found["extra"]) == (0.5, True, "kept")


def test_a_rollout_has_a_time_limit(any_gym: Any) -> None:
    answer = any_gym.post("hasty", "/run", row("hello"))
    assert answer.status == 500
    assert answer.value()["_ng_failure_class"] == "timeout_exceeded"
    assert "rollout_timeout_s = 0" in answer.value()["failure_reason"]


@pytest.mark.parametrize(
    ("params", "loc"),
    [
        ({"input": "x", "max_tokens": 3}, [PARAMS, "max_tokens"]),
        ({}, [PARAMS, "input"]),
        (None, [PARAMS]),
        ({"input": "x", "stream": True}, [PARAMS, "stream"]),
    ],
)
def test_bad_params_are_refused(any_gym: Any, params: Any, loc: list[str]) -> None:
    answer = any_gym.post("agent", "/run", {PARAMS: params})
    assert answer.status == 422
    assert answer.value()["detail"][0]["loc"] == ["body", *loc]


def test_metrics_are_the_resources_servers(any_gym: Any) -> None:
    rows = [{"_ng_task_index": 0, "_ng_rollout_index": n, "reward": float(n)} for n in range(2)]
    found = any_gym.post("agent", "/aggregate_metrics", {"verify_responses": rows}).value()
    assert found["key_metrics"]["mean/reward"] == 0.5
    assert any_gym.post("agent", "/aggregate_metrics", {}).status == 422


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)


@examples(150)
@given(path=st.sampled_from(["/run", "/v1/responses", "/aggregate_metrics", "/ng-rollout/x/run", "/"]), body=JSON)
def test_any_body_gets_an_answer_that_is_meant(shared_gym: Any, path: str, body: Any) -> None:
    for name in ("agent", "player", "counter"):
        answer = shared_gym.run(shared_gym.near.post(name, path, body))
        assert answer.status in (200, 404, 422, 500)
        if answer.status == 500:  # another server's no, as it said it
            assert answer.value()["failure_reason"]


class PoliteSettings(SimpleAgentSettings, frozen=True, kw_only=True):
    greeting: str = "Hello."


class Polite(SimpleAgent[PoliteSettings]):
    """An agent of somebody's own, on top of ours."""

    async def respond(self, params: dict[str, Any], rollout: Rollout) -> Reply:
        greeted = {**params, "instructions": f"{self.settings.greeting} {self.settings.max_steps}"}
        return await super().respond(greeted, rollout)


class Politer(Polite):
    """One on top of that, with nothing more to set."""


class Careless(Struct, frozen=True, kw_only=True):
    greeting: str = "Hello."


def instructed(call: GymRequest) -> dict[str, Any]:
    return model_response(call.body["instructions"]) if call.path == "/v1/responses" else {"reward": 1.0, **call.body}


@pytest.mark.parametrize("kind", [Polite, Politer])
def test_an_agent_of_ours_can_be_derived_from_with_settings_of_ones_own(kind: type[Polite]) -> None:
    references = {"resources_server": {"name": "world"}, "model_server": {"name": "model"}}
    peers = {"world": instructed, "model": instructed}
    with opened(kind, peers=peers, greeting="Good morning.", max_steps="3", **references) as agent:
        played = agent.caller().post("/run", {PARAMS: {"input": "x"}})
    assert played.status == 200, played.value()
    assert output_text(played.value()["response"]) == "Good morning. 3"
    with pytest.raises(GymConfigError, match="did you mean: greeting"), opened(kind, greting="", **references):
        pass


def test_every_agent_of_ours_takes_settings_and_they_must_derive_from_its_own() -> None:
    assert SimpleAgent[PoliteSettings]
    assert GymnasiumAgent[GymnasiumAgentSettings]
    assert RemoteAgent[RemoteAgentSettings]

    class Wrong(SimpleAgent[Careless]):  # pyright: ignore[reportInvalidTypeArguments]
        pass

    with (
        pytest.raises(GymConfigError, match=r"class Careless\(SimpleAgentSettings, frozen=True, kw_only=True\)"),
        opened(Wrong),
    ):
        pass


class Alone(AgentServer):
    """Its own world."""

    async def run(self, row: dict[str, Any], rollout: Rollout) -> dict[str, Any]:
        return {**row, "reward": len(row)}


def test_an_agent_may_be_its_own_world() -> None:
    with opened(Alone) as alone:
        caller = alone.caller()
        played = caller.post("/run", {PARAMS: {"input": "x"}}).value()
        assert played["reward"] == 1
        metrics = caller.post("/aggregate_metrics", {"verify_responses": [played]}).value()
        assert metrics["key_metrics"] == {"mean/reward": 1.0}
        assert caller.post("/aggregate_metrics", {"verify_responses": 3}).status == 422


def test_the_gymnasium_agent_plays_until_the_world_ends(any_gym: Any) -> None:
    turns = [{"hint": {}}, "3", "4"]
    found = any_gym.post("player", "/run", row(*turns, secret=4)).value()
    assert (found["reward"], found["terminated"], found["truncated"]) == (0.75, True, False)
    assert found["info"] == {"tries": 3}
    assert outputs(found) == ["even"]
    texts = [item["content"] for item in found["response"]["output"] if item.get("role") == "user"]
    assert texts == ["No."]
    assert found[PARAMS]["input"][-1]["content"] == "Guess a number."


def test_the_gymnasium_agent_stops_at_its_limit(any_gym: Any) -> None:
    found = any_gym.post("player", "/run", row(*10 * [{"hint": {}}], secret=4)).value()
    assert (found["reward"], found["terminated"], found["truncated"]) == (0.0, False, True)
    assert len(outputs(found)) == 4
