"""`fleet_task` on the local platform: construction, episodes, rewards, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from palestra.environments import make
from palestra.environments.fleet import FleetTaskEnv
from palestra.environments.fleet.backends.embedded import EmbeddedBackend, live_instances
from palestra.environments.platform import APPS, make_task
from tests.environments.fleet.conftest import LARGEST, PUT, Script, an_env, call, put_call

KEYS = [
    pytest.param(
        f"{app.key}-{template.name}-{template.difficulty}-{number}",
        marks=() if app.key == "keys" and not number else pytest.mark.slow,
    )
    for app in APPS.values()
    for template in app.templates
    for number in range(3)
]


async def played(env: FleetTaskEnv, policy: Script) -> list[Any]:
    await env.init_async([])
    steps: list[Any] = []
    observation = None
    try:
        while not steps or not steps[-1]["done"]:
            steps.append(await env.step_async(policy(observation)))
            observation = steps[-1]["observations"][0]["content"] if steps[-1]["observations"] else None
    finally:
        await env.close_async()
    return steps


# Construction


@pytest.mark.parametrize(
    ("config", "extras", "error", "words"),
    [
        ({}, {}, ValueError, "task_key"),
        ({}, {"task_key": "a"}, ValueError, "tasks_file"),
        ({"tasks_file": "~/nowhere.json"}, {"task_key": "a"}, FileNotFoundError, "nowhere.json"),
        ({"tasks_file": "FILE"}, {"task_key": "a"}, ValueError, "a list of tasks"),
        ({"tasks_file": "EMPTY"}, {"task_key": "a"}, ValueError, "no tasks"),
        ({"tasks_file": "BROKEN"}, {"task_key": "a"}, ValueError, "not valid JSON"),
        ({"tasks_file": "UNNAMED"}, {"task_key": "a"}, ValueError, "task 0 has no 'key' or 'task_key'"),
        ({"tasks_file": "TASKS"}, {"task_key": "z"}, ValueError, "it has t0, t1, t2, t3, t4 and 1 more"),
        ({"tasks_file": "TASKS"}, {"task_key": "t0"}, ValueError, "API key"),
        ({"tasks_file": "platform:keys"}, {"task_key": "keys-nope-0-1"}, ValueError, "no task template 'nope'"),
        ({"tasks_file": "platform:keyz"}, {"task_key": PUT}, ValueError, "did you mean keys"),
        ({"tasks_file": "platform:keys?x=1"}, {"task_key": PUT}, ValueError, "unknown setting 'x'"),
        ({"tasks_file": "platform:keys?difficulty=9"}, {"task_key": PUT}, ValueError, "no template matches"),
        ({"tasks_file": "platform:keys", "grammar": "loose"}, {"task_key": PUT}, ValueError, "grammar"),
    ],
)
def test_what_is_missing_or_wrong_is_said(tmp_path, monkeypatch, config, extras, error, words):
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    row = {"prompt": "x", "env_id": "booking"}
    files = {
        "FILE": {"rows": []},
        "EMPTY": {"tasks": []},
        "UNNAMED": [row],
        "TASKS": [{"key": f"t{n}", **row} for n in range(6)],
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "BROKEN").write_text("{")
    if (file := config.get("tasks_file", "")) in {*files, "BROKEN"}:
        config = {"tasks_file": str(tmp_path / file)}
    with pytest.raises(error, match=words):
        FleetTaskEnv(config, extras)


def test_both_spellings_and_the_seed_data_arrive(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_API_KEY", "k")
    export = {
        "key": "a",
        "prompt": "p",
        "env_id": "booking",
        "version": "v1",
        "data_id": "kinesis",
        "verifier_func": "f",
    }
    other = {"task_key": "b", "prompt": "p", "env_key": "booking", "env_version": "v1", "data_key": "kinesis"}
    (tmp_path / "a.json").write_text(json.dumps({"tasks": [export]}))
    (tmp_path / "b.json").write_text(json.dumps([{**other, "verifier_code": "f"}]))
    found = [FleetTaskEnv({"tasks_file": str(tmp_path / f"{key}.json")}, {"task_key": key}).task for key in "ab"]
    for task in found:
        assert (task.env_key, task.env_version, task.data_key) == ("booking", "v1", "kinesis")
        assert (task.verifier_code, task.task_modality) == ("f", "tool_use")


def test_it_is_registered_and_tasks_file_may_be_the_tasks_own():
    env = make("fleet_task", env_config={}, extras={"task_key": PUT, "tasks_file": "platform:keys", "max_turns": 7})
    assert (env.chat_history, env.tools, env.openenv_task_env) == ([], [], None)
    assert (env.turns, env.tool_calls, env.tool_errors, env.max_turns) == (0, 0, 0, 7)


# Episodes


@pytest.mark.parametrize("task_key", KEYS)
def test_a_scripted_policy_plays_every_template_to_reward_one(task_key: str):
    task = make_task(task_key)
    steps = asyncio.run(played(an_env(task_key, {"tasks_file": "platform:"}, max_turns=50), Script(task)))
    assert [step["reward"] for step in steps[:-1]] == [0.0] * (len(steps) - 1)
    assert steps[-1]["reward"] == 1.0
    assert steps[-1]["metadata"]["done_reason"] == "agent_done"


def test_the_conversation_begins_with_the_sections_in_order():
    env = an_env(LARGEST)
    history, facts = env.init([{"role": "user", "content": "not looked at"}])
    env.close()
    system, user = history
    assert user == {"role": "user", "content": make_task(LARGEST).prompt}
    headings = [line for line in system["content"].splitlines() if line.startswith("## ")]
    assert headings == [
        "## Current Date",
        "## Environment Context",
        "## Available Tools",
        "## Tool Call Format",
        "## Error Handling",
        "## Response Format",
    ]
    assert "2026-03-02" in system["content"]
    assert "CURRENT_DATE" not in system["content"]
    assert json.dumps(facts["tools"], indent=2) in system["content"]
    assert [tool["function"]["name"] for tool in facts["tools"]][-1] == "submit_final_answer"
    assert (facts["task_key"], facts["env_key"], facts["modality"]) == (LARGEST, "keys", "tool_use")
    history.clear()
    assert len(env.chat_history) == 2


def test_the_compact_prompt_has_a_line_for_each_tool():
    env = an_env(config={"prompt_style": "compact"})
    system = env.init([])[0][0]["content"]
    env.close()
    assert "set(name: string, value: integer) Give an item a value; a new name makes a new item." in system
    assert len(system) < 500


async def said(*actions: str, config: dict[str, Any] | None = None, task_key: str = PUT, **extras: Any) -> list[Any]:
    env = an_env(task_key, config, **{"max_turns": 50, **extras})
    await env.init_async([])
    try:
        return [await env.step_async(action) for action in actions]
    finally:
        await env.close_async()


def told(step: Any) -> str:
    return step["observations"][0]["content"]


def test_what_the_model_is_told():
    steps = asyncio.run(
        said(
            call("list"),
            call("get", name="zz"),
            call("nope"),
            "hm",
            "<tool_call>{oops}</tool_call>",
            call("list") + call("list"),
            "<done>",
        )
    )
    words = [told(step) for step in steps]
    assert words[0].startswith('Tool result:\n{\n  "')
    assert words[1].startswith('Error: {"error":"not_found"')
    assert words[2].startswith('Error: {"error":"unknown_tool"')
    assert words[3] == 'No tool call found. Use <tool_call>{"name": "...", "arguments": {...}}</tool_call> format.'
    assert "is not valid JSON" in words[4]
    assert words[5].endswith("\nOnly the first of 2 tool calls was run.")
    assert words[6] == "Task marked as complete."
    keys = {"task_key", "turn", "tool_call", "tool_result", "error", "done_reason", "step_time", "mcp_time"}
    keys |= {"tool_calls", "parse_failed"}
    assert all(step["metadata"].keys() == keys for step in steps)
    assert steps[1]["metadata"]["tool_call"] == {"name": "get", "arguments": {"name": "zz"}}


def test_a_call_and_done_in_one_message_is_run_then_graded():
    (step,) = asyncio.run(said(put_call() + "<done>"))
    assert (step["reward"], step["done"], told(step).startswith("Tool result:")) == (1.0, True, True)


def test_a_chatty_turn_costs_a_turn_and_not_the_reward():
    """The reference counts turns and calls apart, and then never asks the verifier."""
    steps = asyncio.run(said("let me see", put_call(), max_turns=2))
    assert [step["reward"] for step in steps] == [0.0, 1.0]
    assert steps[1]["metadata"] == {"done_reason": "max_turns", "task_key": PUT}
    assert steps[1]["observations"] == []


def test_at_the_last_turn_words_alone_are_graded_too():
    steps = asyncio.run(said(put_call(), "so it is", max_turns=2))
    assert [(step["reward"], step["done"]) for step in steps] == [(0.0, False), (1.0, True)]


def test_after_the_end_it_is_over_and_worth_nothing_more():
    steps = asyncio.run(said(put_call() + "<done>", put_call(), "<done>"))
    assert [(step["reward"], step["done"]) for step in steps] == [(1.0, True), (0.0, True), (0.0, True)]


def test_an_answer_ends_the_episode():
    expected = make_task(LARGEST).params["wanted"]
    (right,) = asyncio.run(said(call("submit_final_answer", answer=expected), task_key=LARGEST))
    (wrong,) = asyncio.run(said(call("submit_final_answer", answer="zz"), task_key=LARGEST))
    (none,) = asyncio.run(said(f"It is {expected}. <done>", task_key=LARGEST))
    assert [(step["reward"], step["done"]) for step in (right, wrong, none)] == [(1.0, True), (0.0, True), (0.0, True)]
    assert told(right) == "Task marked as complete."


def test_partial_rewards_are_earned_and_never_whole():
    expected = make_task(LARGEST).params["wanted"]
    partial = {"partial_reward": True, "hints": True}
    stray, answer = call("put", value=1), call("submit_final_answer", answer=expected)
    idle = asyncio.run(said("<done>", task_key=LARGEST, config=partial))[-1]
    assert idle["reward"] == 0.0
    assert "answer: None is not" in idle["metadata"]["verifier_stdout"]
    assert asyncio.run(said(stray, answer, task_key=LARGEST, config=partial))[-1]["reward"] == 0.5
    assert asyncio.run(said(stray, answer, task_key=LARGEST))[-1]["reward"] == 0.0
    assert asyncio.run(said(answer, task_key=LARGEST, config=partial))[-1]["reward"] == 1.0


def test_metrics_count_turns_calls_and_errors():
    env = an_env(max_turns=9)
    env.init([])
    for action in (call("list"), call("nope"), "hm", "<done>"):
        env.step(action)
    metrics = env.get_metrics()
    env.close()
    assert metrics == {
        "task_key": PUT,
        "env_key": "keys",
        "turns": 4,
        "tool_calls": 2,
        "tool_errors": 1,
        "parse_error": 1.0,
        "unknown_reward": 0.0,
    }
    failed = {"env_init_failed": 1, "env_init_failed/mail": 1}
    found = FleetTaskEnv.aggregate_metrics([metrics, {**metrics, "turns": 2}, failed])
    assert (found["keys/avg_turns"], found["keys/min_turns"], found["keys/max_turns"]) == (3.0, 2, 4)
    assert (found["tool_error_rate"], found["tool_calls_per_turn"]) == (0.5, 4 / 6)
    assert (found["keys/num_episodes"], found["total_episodes"], found["total_tool_errors"]) == (2, 2, 2)
    assert (found["mail/env_init_failed"], found["total_env_init_failed"]) == (1, 1)
    assert FleetTaskEnv.aggregate_metrics([]) == {}


def test_init_again_is_another_episode():
    env = an_env()
    env.init([])
    env.step(put_call())
    env.init([])
    assert (live_instances(), env.turns, len(env.chat_history)) == (1, 0, 2)
    assert env.step("<done>")["reward"] == 0.0
    env.close()
    env.close()


def test_sync_methods_work_inside_a_running_loop():
    async def main() -> float | None:
        env = an_env()
        env.init([])
        reward = env.step(put_call() + "<done>")["reward"]
        env.close()
        return reward

    assert asyncio.run(main()) == 1.0


def test_who_ends_the_episode_otherwise_gets_the_verdict_once():
    async def main() -> list[float | None]:
        env = an_env(max_turns=9)
        await env.init_async([])
        await env.step_async(put_call())
        found = [await env.grade_async(), await env.grade_async()]
        assert (await env.step_async("hm"))["done"]
        await env.close_async()
        return found

    assert asyncio.run(main()) == [1.0, 0.0]


def test_an_instance_that_cannot_be_made_is_an_error_of_its_own(tmp_path):
    row = {"key": "x", "prompt": "p", "env_id": "keys", "data_id": "huge-1"}
    (tmp_path / "tasks.json").write_text(json.dumps([row]))
    env = FleetTaskEnv({"tasks_file": str(tmp_path / "tasks.json")}, {"task_key": "x"})
    with pytest.raises(RuntimeError, match=r"Failed to create OpenEnv FleetTaskEnv: .*huge-1"):
        env.init([])
    with pytest.raises(RuntimeError, match="step was called before init"):
        an_env().step("x")


# Nothing is left behind


async def one_that_may_fail(env: FleetTaskEnv, rng: random.Random) -> None:
    try:
        async with asyncio.timeout(rng.choice((0.0, 0.001, None, None))):
            await env.init_async([])
            for _ in range(rng.randrange(5)):
                await env.step_async(rng.choice((call("list"), "hm", "<done>", call("put", value=1))))
                await asyncio.sleep(0)
            if rng.random() < 0.2:
                raise KeyError("the loop above broke")
    finally:
        await env.close_async()


async def many(envs: list[FleetTaskEnv]) -> None:
    rng = random.Random(len(envs))
    tasks = [asyncio.create_task(one_that_may_fail(env, rng)) for env in envs]
    await asyncio.sleep(0.01)
    for task in rng.sample(tasks, len(tasks) // 4):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(100):  # closings that outlived their callers
        await asyncio.sleep(0)


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_failures_and_cancellations_leave_no_instance(count: int):
    envs = [an_env(f"keys-put_number-0b-{number}", max_turns=4) for number in range(count)]
    asyncio.run(many(envs))
    assert live_instances() == 0
    assert any(env.turns for env in envs)  # some have played


def test_cancelled_while_the_instance_is_made(monkeypatch):
    """It comes into being after nobody waits for it any more, and is closed all the same."""
    create, gate = EmbeddedBackend.create, asyncio.Event()

    async def slow(self: EmbeddedBackend) -> None:
        await gate.wait()
        await create(self)

    async def main() -> None:
        env = an_env()
        starting = asyncio.create_task(env.init_async([]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        starting.cancel()
        asyncio.get_running_loop().call_later(0.01, gate.set)
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert live_instances() == 0

    monkeypatch.setattr(EmbeddedBackend, "create", slow)
    asyncio.run(main())
