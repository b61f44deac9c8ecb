"""Resources servers: tools and verdicts by signature, states of sessions, Gymnasium's words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import pytest

from palestra.gym.agents import GymnasiumAgent
from palestra.gym.errors import GymConfigError, JudgeError, PeerFailed, UnknownSession
from palestra.gym.servers.gymnasium import GymnasiumServer, Step
from palestra.gym.servers.resources import ResourcesServer, ResourcesSettings, Verdict, tool
from palestra.gym.servers.responses import added_usage, output_text, unanswered_calls
from palestra.gym.servers.states import RETIRED, RETIRED_S, Session, SessionStates
from palestra.gym.testing import model_response, opened
from palestra.gym.wire import GymRequest, GymResponse
from tests.gym.servers.conftest import Counter, Guess


class Place(msgspec.Struct):
    city: str
    zip: int = 0


class ShopSettings(ResourcesSettings, frozen=True, kw_only=True):
    discount: float = 0.0
    judge: str = "judge"


class Shop(ResourcesServer[ShopSettings]):
    """With settings of its own, nested arguments, a judge."""

    released: list[Any] = []  # noqa: RUF012

    async def seed_session(self, session: Session, stock: list[str]) -> Mapping[str, Any]:
        session.state = list(stock)
        return {"room": len(stock)}

    @tool
    def buy(
        self,
        session: Session,
        what: Annotated[str, msgspec.Meta(description="a thing of the shop")],
        to: Place,
        count: int = 1,
        gift: bool | None = None,
    ) -> dict[str, Any]:
        """Buy a thing.

        It is sent at once."""
        session.state.append(what)
        return {"what": what, "city": to.city, "count": count, "gift": gift, "discount": self.settings.discount}

    async def verify(self, session: Session, row: dict[str, Any], response: dict[str, Any]) -> Any:
        judged = await self.ask_judge(self.settings.judge, {"input": output_text(response)})
        return row["verdict"] if "verdict" in row else judged["score"]

    def release(self, state: Any) -> None:
        self.released.append(state)

    def compute_metrics(self, tasks: list[list[Mapping[str, Any]]]) -> dict[str, Any]:
        return {"tasks": len(tasks)}

    def key_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return {"tasks": metrics["tasks"]}


def judge(call: GymRequest) -> Any:
    texts = {"busy": GymResponse(status=503, body="busy"), "garbled": GymResponse(body=b"<html>")}
    return texts.get(call.body["input"], {"score": 0.5})


def test_a_tool_is_described_by_its_signature() -> None:
    with opened(Shop) as shop:
        (spec,) = shop.server.tool_specs()
        assert spec.as_param()["name"] == "buy"
        assert spec.description == "Buy a thing.\n\nIt is sent at once."
        properties = spec.parameters["properties"]
        assert properties["what"] == {"type": "string", "description": "a thing of the shop"}
        assert properties["to"] == {"$ref": "#/$defs/Place"}
        assert spec.parameters["$defs"]["Place"]["required"] == ["city"]
        assert spec.parameters["required"] == ["what", "to"]


def test_arguments_are_checked_and_converted() -> None:
    with opened(Shop, discount=0.25) as shop:
        caller = shop.caller()
        assert caller.post("/seed_session", {"stock": ["hat"], "other": 1}).value() == {"room": 1}
        bought = caller.post("/buy", {"what": "hat", "to": {"city": "Rome"}, "count": "3"}).value()
        assert bought == {"what": "hat", "city": "Rome", "count": 3, "gift": None, "discount": 0.25}
        wrong = caller.post("/buy", {"what": 3, "to": {"zip": "x"}, "colour": "red"})
        assert wrong.status == 422
        problems = {one["loc"][-1]: one["msg"] for one in wrong.value()["detail"]}
        assert problems["what"] == "Expected `str`, got `int`"
        assert problems["to"] == "Expected `int`, got `str` - at `to.zip`"
        assert problems["colour"] == "Extra inputs are not permitted"


def test_verdicts_come_in_many_shapes() -> None:
    with opened(Shop, peers={"judge": judge}) as shop:
        caller = shop.caller()
        assert caller.verify(model_response("ok"))["reward"] == 0.5
        assert caller.verify(model_response("ok"), verdict=True)["reward"] == 1.0
        found = caller.verify(model_response("ok"), verdict={"reward": 2, "why": "so"})
        assert (found["reward"], found["why"]) == (2.0, "so")
        for bad in ("much", None, {"why": "so"}):
            with pytest.raises(PeerFailed, match="verify must return a reward"):
                caller.verify(model_response("ok"), verdict=bad)


def test_a_judge_that_fails_is_no_wrong_answer() -> None:
    with opened(Shop, peers={"judge": judge}) as shop:
        caller = shop.caller()
        for text, words in (("busy", "judge/v1/responses answered 503"), ("garbled", "the answer is not JSON: <html>")):
            found = caller.verify(model_response(text), kept=1)
            assert (found["_ng_failure_class"], found["reward"], found["kept"]) == ("judge_failed", 0.0, 1)
            assert words in found["_ng_failure_judge_error"]
    with opened(Shop) as shop:
        assert "unknown server 'judge'" in shop.caller().verify(model_response("ok"))["_ng_failure_judge_error"]
    assert not issubclass(JudgeError, ValueError)


def test_several_rewards_must_add_up() -> None:
    whole = Verdict.of({"form": 0.25, "truth": 0.5}, note="x").fields()
    assert whole == {"reward": 0.75, "reward_components": {"form": 0.25, "truth": 0.5}, "note": "x"}
    with pytest.raises(ValueError, match="not the sum of its components"):
        Verdict(1.0, components={"form": 0.25}).fields()
    with pytest.raises(ValueError, match="finite"):
        Verdict(float("nan")).fields()


def test_metrics_of_a_server_come_beside_the_common_ones() -> None:
    rows = [{"_ng_task_index": n, "reward": 1.0} for n in range(3)]
    with opened(Shop) as shop:
        found = shop.caller().post("/aggregate_metrics", {"verify_responses": rows}).value()
    assert found["key_metrics"] == {"tasks": 3}
    assert found["agent_metrics"]["mean/reward"] == 1.0


@pytest.mark.parametrize(
    "row", [1, None, {"_ng_task_index": "a"}, {"_ng_task_index": [1]}, {"_ng_rollout_index": None}]
)
def test_what_is_no_rollout_is_not_counted(row: Any) -> None:
    with opened(Shop) as shop:
        answer = shop.caller().post("/aggregate_metrics", {"verify_responses": [{}, row]})
    assert answer.status == 422
    assert answer.value()["detail"][0]["loc"] == ["body", "verify_responses", 1]


def test_a_tool_cannot_take_the_name_of_a_route() -> None:
    with pytest.raises(GymConfigError, match="verify is a route"):

        class Bad(ResourcesServer):
            @tool
            async def verify(self) -> None: ...


@pytest.mark.parametrize(
    "given", [{"max_steps": 0}, {"model_server": None}, {"resources_server": None}, {"model_server": {}}]
)
def test_agents_say_which_setting_is_wrong(given: dict[str, Any]) -> None:
    settings = {"resources_server": {"name": "w"}, "model_server": {"name": "m"}} | given
    with pytest.raises(GymConfigError, match=next(iter(given))), opened(GymnasiumAgent, **settings):
        pass


def test_a_signature_that_cannot_be_read_is_told() -> None:
    with pytest.raises(GymConfigError, match=r"verify: name 'Nowhere' is not defined\..*type checkers"):

        class Unknown(ResourcesServer):
            async def verify(self, thing: Nowhere) -> float:  # type: ignore[name-defined]  # noqa: F821
                return 0.0

    with pytest.raises(GymConfigError, match="tally: a parameter cannot be read from JSON"):

        class Odd(ResourcesServer):
            @tool
            def tally(self, by: complex) -> float:
                return 0.0


def test_settings_are_checked_by_name() -> None:
    with (
        pytest.raises(GymConfigError, match=r"tested\.resources_servers\.tested: .*discount"),
        opened(Shop, discount="x"),
    ):
        pass


# States


def test_a_state_leaves_when_its_session_is_closed_or_the_server_ends() -> None:
    Shop.released.clear()
    with opened(Shop) as shop:
        first, second = shop.caller(), shop.caller()
        first.post("/seed_session", {"stock": ["a"]})
        second.post("/seed_session", {"stock": ["b"]})
        first.post("/close_session", {})
        assert Shop.released == [["a"]]
        assert first.post("/buy", {"what": "x", "to": {"city": "y"}}).status == 500
        second.post("/seed_session", {"stock": ["c"]})
        assert Shop.released == [["a"], ["b"]]
    assert Shop.released == [["a"], ["b"], ["c"]]


def test_states_are_bounded_in_number_and_age() -> None:
    now, gone = [0.0], []
    states = SessionStates(gone.append, limit=3, idle_s=10, clock=lambda: now[0])
    for name in "abc":
        states.put(name, name)
    assert states.get("a") == "a"
    states.put("d", "d")
    assert gone == ["b"]  # the longest unused
    now[0] = 11.0
    states.put("e", "e")
    assert gone == ["b", "c", "a", "d"]
    with pytest.raises(UnknownSession, match="Play the rollout again"):
        states.get("a")


def test_judged_sessions_leave_before_others() -> None:
    gone: list[Any] = []
    states = SessionStates(gone.append, limit=10**6)
    states.put("live", "live")
    for n in range(RETIRED + 5):
        states.put(str(n), n)
        states.retire(str(n))
    assert gone == [0, 1, 2, 3, 4]
    assert states.get("live") == "live"
    assert states.get("7") == 7  # may be asked again
    assert len(states) == RETIRED + 1


def test_a_verdict_may_be_asked_for_twice() -> None:
    with opened(Counter) as counter:
        caller = counter.caller()
        caller.post("/seed_session", {"initial_count": 2})
        assert [caller.verify(model_response(""), expected_count=2)["reward"] for _ in range(2)] == [1.0, 1.0]


def test_a_judged_state_stays_for_a_moment_only() -> None:
    now, gone = [0.0], []
    states = SessionStates(gone.append, idle_s=7200, clock=lambda: now[0])
    for name in "ab":
        states.put(name, name)
    states.retire("a")
    now[0] = RETIRED_S
    assert states.get("b") == "b"
    states.put("c", "c")
    assert gone == []
    now[0] += 1
    states.put("d", "d")
    assert gone == ["a"]


def test_only_what_verify_takes_comes_back() -> None:
    with opened(Counter) as counter:
        caller = counter.caller()
        caller.post("/seed_session", {})
        found = caller.verify(model_response(""), expected_count=2, hidden=1)
    assert set(found) == {"responses_create_params", "response", "expected_count", "reward", "count"}


# Gymnasium's words


def step_body(text: str, **more: Any) -> dict[str, Any]:
    return {"responses_create_params": {"input": ""}, "secret": 4, "response": model_response(text), **more}


def test_reset_and_step() -> None:
    with opened(Guess) as guess:
        caller = guess.caller()
        begun = caller.post("/reset", {"secret": 4}).value()
        assert begun["observation"] == "Guess a number."
        assert begun["info"] == {"supports_explicit_close": True, "supports_step_idempotency": True, "tries": 3}
        assert caller.post("/step", step_body("3")).value() == {
            "observation": "No.",
            "reward": -0.25,
            "terminated": False,
            "truncated": False,
            "info": {},
        }
        assert caller.post("/step", step_body("4")).value()["terminated"] is True
        caller.post("/close", {})
        assert caller.post("/step", step_body("4")).status == 500
        assert caller.post("/verify", {}).status == 404


def test_the_same_step_moves_the_world_once() -> None:
    with opened(Guess) as guess:
        caller = guess.caller()
        caller.post("/reset", {"secret": 4})
        twice = [caller.post("/step", step_body("3", _ng_step_request_id="s1")).value() for _ in range(4)]
        assert twice[0] == twice[3]
        assert not twice[3]["truncated"]
        caller.post("/step", step_body("3", _ng_step_request_id="s2"))
        assert caller.post("/step", step_body("3", _ng_step_request_id="s3")).value()["truncated"]
        caller.post("/reset", {"secret": 4})
        fresh = caller.post("/step", step_body("4", _ng_step_request_id="s3")).value()
        assert fresh["terminated"]


def test_a_step_must_be_one() -> None:
    class Bad(GymnasiumServer):
        async def step(self, session: Session, response: dict[str, Any], how: str) -> Any:
            return {"nothing": "much", "infinite": Step(reward=float("inf"))}[how]

    with opened(Bad) as bad:
        caller = bad.caller()
        assert caller.post("/reset", {}).value()["observation"] is None
        assert "step must return a Step" in caller.post("/step", {"response": {}, "how": "nothing"}).value()
        assert "finite" in caller.post("/step", {"response": {}, "how": "infinite"}).value()


# Responses


def test_usage_adds_up_and_what_is_unknown_stays_so() -> None:
    one = {"input_tokens": 1, "details": {"cached": 2, "x": None}}
    assert added_usage(None, one) == one
    assert added_usage(one, None) == one
    assert added_usage(one, one) == {"input_tokens": 2, "details": {"cached": 4, "x": None}}


def test_calls_that_were_answered_are_left_alone() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "x"}
    own = {"type": "function_call", "call_id": "b", "name": "y"}
    assert unanswered_calls([own, call, {"type": "function_call_output", "call_id": "b", "output": "1"}]) == [call]


def test_said_is_a_response() -> None:
    made = model_response("hello", ("add", {"count": 1}))
    assert output_text(made) == "hello"
    assert json.loads(made["output"][0]["arguments"]) == {"count": 1}
