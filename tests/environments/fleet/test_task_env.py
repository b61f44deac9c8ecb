"""The layer of calls: its shapes, its one verdict, and that closing closes."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, ClassVar

import pytest

from palestra.environments.fleet import BackendError, FleetAttempt, FleetGrade, FleetSettings, OpenEnvTask, ToolAnswer
from palestra.environments.fleet.backends.embedded import live_instances
from palestra.environments.fleet.platform_tasks import fleet_task
from palestra.environments.fleet.tool_schemas import openai_tool
from palestra.environments.platform import make_task
from tests.environments.fleet.conftest import LARGEST, PUT, an_env

VALUE = make_task(PUT).params["value"]
RIGHT = {"tool": "put", "params": {"value": VALUE}}


def a_task(task_key: str = PUT, **settings: Any) -> OpenEnvTask:
    return OpenEnvTask(fleet_task(make_task(task_key)), FleetSettings(), **settings)


def test_the_shapes_of_reset_and_step():
    async def main() -> None:
        env = a_task()
        first = await env.reset_async(seed=3)
        assert first.keys() == {"prompt", "observation", "step", "task_key", "modality", "tools"}
        assert (first["step"], first["observation"], first["modality"]) == (0, {}, "tool_use")
        seen, reward, done, info = await env.step_async(RIGHT)
        assert (seen["observation"], seen["step"], reward, done) == ({"put": VALUE}, 1, 0.0, False)
        assert info == {"step": 1, "done_reason": None, "tool_result": {"put": VALUE}}
        *_, info = await env.step_async({"tool": "get", "params": {"name": "zz"}})
        assert info["tool_error"] in env.tool_errors_list
        _, reward, done, info = await env.step_async({"done": True})
        assert (reward, done, info["done_reason"], info["reward_computed"]) == (1.0, True, "agent_done", True)
        with pytest.raises(RuntimeError, match="after the end"):
            await env.step_async(RIGHT)
        await env.close_async()
        with pytest.raises(RuntimeError, match="before reset"):
            await env.step_async(RIGHT)

    asyncio.run(main())


def test_the_last_step_is_graded():
    async def main() -> None:
        env = a_task(max_steps=2)
        await env.reset_async()
        await env.step_async(RIGHT)
        _, reward, done, info = await env.step_async({"tool": "list"})
        assert (reward, done, info["done_reason"]) == (1.0, True, "max_steps")
        await env.close_async()

    asyncio.run(main())


def test_an_answer_is_taken_here_and_ends_it():
    env = a_task(LARGEST)
    tools = env.reset()["tools"]
    assert tools[-1]["function"]["name"] == "submit_final_answer"
    expected = make_task(LARGEST).params["wanted"]
    _, reward, done, info = env.step({"tool": "submit_final_answer", "params": {"answer": expected}})
    assert (reward, done, info["submitted_answer"]) == (1.0, True, expected)
    env.close()
    plain = a_task()
    assert "submit_final_answer" not in [tool["function"]["name"] for tool in plain.reset()["tools"]]
    plain.close()


def test_closing_grades_what_was_begun_and_not_graded():
    env = a_task()
    env.reset()
    env.step(RIGHT)
    env.close()
    env.close()
    assert (env.final_reward, live_instances()) == (1.0, 0)


class Stubborn:
    """A backend that counts, and does what it is told to."""

    def __init__(self, **does: Any) -> None:
        self.does, self.closed, self.verified = does, 0, 0

    async def create(self) -> None:
        if problem := self.does.get("create"):
            raise problem

    async def list_tools(self) -> list[dict[str, Any]]:
        return [openai_tool("go", "Goes.", None)]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        found = self.does.get("call", ToolAnswer(None))
        if isinstance(found, BaseException):
            raise found
        return found if isinstance(found, ToolAnswer) else await found

    async def verify(self, attempt: FleetAttempt) -> FleetGrade:
        self.verified += 1
        if problem := self.does.get("verify"):
            raise problem
        return FleetGrade(score=0.5)

    async def close(self) -> None:
        self.closed += 1


class WithoutTools(Stubborn):
    """As a config names it: made with the task and the settings."""

    made: ClassVar[list[WithoutTools]] = []

    def __init__(self, *_given: Any) -> None:
        super().__init__()
        self.made.append(self)

    async def list_tools(self) -> list[dict[str, Any]]:
        return []


def test_a_backend_of_ones_own_and_one_without_tools():
    env = an_env(config={"backend": f"{__name__}:WithoutTools"})
    with pytest.raises(RuntimeError, match="keys has no tools"):
        env.init([])
    found = sys.modules[__name__].WithoutTools.made[-1]
    assert (found.closed, found.verified) == (1, 0)
    with pytest.raises(RuntimeError, match="there is no backend 'clay'"):
        an_env(config={"backend": "clay"}).init([])


def stubborn(**does: Any) -> tuple[OpenEnvTask, Stubborn]:
    backend = Stubborn(**does)
    settings = FleetSettings(request_timeout_s=0.05)
    return OpenEnvTask(fleet_task(make_task(PUT)), settings, factory=lambda _task, _settings: backend), backend


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (ToolAnswer("Error: no"), "no"),
        (ToolAnswer({"error": "no"}), "no"),
        (ToolAnswer({"error": "no", "hint": "x"}), '{"error":"no","hint":"x"}'),
        (ToolAnswer(None, "no"), "no"),
        (KeyError("no"), "KeyError: 'no'"),
        (asyncio.sleep(5), "go did not answer within 0.05 s"),
    ],
)
def test_what_counts_as_an_error_of_a_tool(call: Any, told: str):
    env, backend = stubborn(call=call)
    env.reset()
    *_, info = env.step({"tool": "go", "params": {}})
    assert info["tool_error"] == told
    env.close()
    assert (backend.closed, backend.verified, env.final_reward) == (1, 1, 0.5)


@pytest.mark.parametrize("result", [{"error": None, "ok": 1}, [], {}, "", 0, "fine"])
def test_what_does_not(result: Any):
    env, _ = stubborn(call=ToolAnswer(result))
    env.reset()
    *_, info = env.step({"tool": "go", "params": {}})
    assert (info.get("tool_error"), info["tool_result"]) == (None, result)
    env.close()


def test_a_lost_instance_is_no_mistake_of_the_models():
    env, backend = stubborn(call=BackendError("gone"))
    env.reset()
    with pytest.raises(BackendError, match="gone"):
        env.step({"tool": "go", "params": {}})
    env.close()
    assert backend.closed == 1


def test_a_verifier_that_breaks_leaves_it_unknown():
    env, backend = stubborn(verify=OSError("no"))
    env.reset()
    _, reward, done, _ = env.step({"done": True})
    assert (reward, done, env.verifier_error) == (None, True, "OSError: no")
    env.close()
    assert (backend.verified, env.final_reward) == (1, None)


def test_one_that_cannot_be_made_is_closed_all_the_same():
    env, backend = stubborn(create=BackendError("full"))
    with pytest.raises(BackendError, match="full"):
        env.reset()
    env.close()
    assert (backend.closed, backend.verified) == (1, 0)
