"""Environments of verifiers give the same rewards here as by verifiers' own runner, row by row."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.verifiers.tasks import verifiers_tasks
from palestra.net.chat_apis import ModelEndpoint, OpenAIChat
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.sources import blank_rollout
from palestra.rollouts.verifiers.evaluation_player import open_verifiers_evaluation
from palestra.types.rollouts import GroupRequest, Rollout, Task
from tests.scripted_endpoint import Policy, scripted_endpoint, tool_call

ROOT = Path(__file__).parents[3]
PACKAGES = Path(__file__).parent / "packages"
V1 = Path(os.environ.get("PALESTRA_VERIFIERS_PYTHON") or ROOT / ".venv-verifiers" / "bin" / "python")
V0 = Path(os.environ.get("PALESTRA_VERIFIERS_V0_PYTHON") or ROOT / ".venv-verifiers-v0" / "bin" / "python")
NULL = {"agent": {"harness": {"id": "null"}}}
DIRECT = {"agent": {"harness": {"id": "direct"}}}

needs_verifiers = pytest.mark.skipif(
    not V1.exists() or not V0.exists(), reason="needs venvs with verifiers of both interfaces: make clients"
)
pytestmark = [pytest.mark.e2e, needs_verifiers]


def sums(messages: list[dict[str, Any]]) -> str:
    """Right for even questions; a long wrong answer for the others."""
    words = messages[-1]["content"].strip("?").split()
    a, b = int(words[2]), int(words[4])
    return str(a + b) if a % 2 == 0 else f"I believe that it is {a * b + 1000}"


def guesses(messages: list[dict[str, Any]]) -> str:
    return str(sum(one["role"] == "assistant" for one in messages) + 1)


def judge_or_sums(messages: list[dict[str, Any]]) -> str:
    text = messages[-1]["content"]
    return ("yes" if "believe" not in text else "no") if text.startswith("JUDGE") else sums(messages)


def user_or_sums(messages: list[dict[str, Any]]) -> str:
    """The user states its question, and is content with any answer."""
    if "role-playing a USER" in messages[0]["content"]:
        said = sum(one["role"] == "assistant" for one in messages)
        return "###DONE###" if said else messages[0]["content"].split("do for you:")[1].split("\n\n")[1]
    return sums(messages)


def adds(messages: list[dict[str, Any]]) -> Any:
    """Adds 2, then 1; never more than 3 in all."""
    calls = sum(one["role"] == "tool" for one in messages)
    return tool_call("add", number=2 - calls) if calls < 2 else "done"


def adds_once(messages: list[dict[str, Any]]) -> Any:
    last = messages[-1]
    if last["role"] == "tool":
        return f"It is {last['content']}"
    words = last["content"].strip("?").split()
    return tool_call("add", a=int(words[2]), b=min(int(words[4]), 4))


def counts(messages: list[dict[str, Any]]) -> Any:
    return tool_call("count", word="cup") if sum(one["role"] == "tool" for one in messages) < 2 else "two"


V1_KINDS = [
    pytest.param("v1_sums", {}, DIRECT, sums, 12, id="weights"),
    pytest.param("v1_sums", {}, NULL, sums, 2, id="harness in a process"),
    pytest.param("v1_guess", {}, {}, guesses, 6, id="several turns"),
    pytest.param("v1_judged", {}, DIRECT, judge_or_sums, 6, id="judge"),
    pytest.param(
        "v1_sums",
        {},
        {"id": "user-sim", **{name: {"harness": {"id": "direct"}} for name in ("assistant", "user")}},
        user_or_sums,
        4,
        id="user played by a model",
    ),
    pytest.param("v1_sums", {}, {"id": "best-of-n", "n": 2, **DIRECT}, sums, 4, id="several attempts"),
    pytest.param("v1_tools", {}, NULL, adds, 4, id="tools by MCP with a state"),
    pytest.param("v1_failing", {}, DIRECT, sums, 6, id="failures"),
]
V0_KINDS = [
    pytest.param("v0_sums", {}, sums, 1, 8, id="weights"),
    pytest.param("v0_sums", {"is_grouped": True}, sums, 2, 8, id="group rewards"),
    pytest.param("v0_turns", {}, guesses, 1, 6, id="several turns"),
    pytest.param("v0_tools", {}, adds_once, 1, 6, id="tools"),
    pytest.param("v0_tools", {"is_stateful": True}, counts, 1, 6, id="tools with a state"),
]


@pytest.fixture(autouse=True)
def in_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes find the packages and the harness; their programs find uv."""
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    monkeypatch.setenv("PATH", f"{V1.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("ANY_KEY", "x")
    monkeypatch.setenv("JUDGE_KEY", "x")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def every_task(entry: EnvironmentEntry) -> list[Task]:
    tasks = [*verifiers_tasks(entry, "train"), *verifiers_tasks(entry, "eval")]
    return sorted(tasks, key=lambda task: task.extras["index"])


async def played(entry: EnvironmentEntry, tasks: list[Task], url: str, logs: Path, samples: int) -> list[Rollout]:
    endpoint = ModelEndpoint(base_url=url, api_key="x", model="scripted", api=OpenAIChat())
    settings = RolloutSettings(max_tokens=64, max_context=1024)
    seeds = tuple(range(samples))
    requests = [GroupRequest(id=task.id, task=task, step=0, seeds=seeds) for task in tasks]
    async with open_verifiers_evaluation([entry], endpoint, settings, logs) as players:
        play = players[entry.name].play
        both = [(request, blank_rollout(request, index, index)) for request in requests for index in range(samples)]
        return await asyncio.gather(*(play(request, rollout) for request, rollout in both))


def own_v1(name: str, url: str, env: dict[str, Any], count: int, folder: Path) -> dict[int, list[float | None]]:
    """Rewards of the traces that are trained, by the task's place; None: the episode is not complete."""
    seats = {name: one for name, one in env.items() if isinstance(one, dict)} or {"player": {}}
    own = {
        "taskset": {"id": name},
        **env,
        **{seat: {**one, "runtime": {"type": "subprocess"}} for seat, one in seats.items()},
    }
    config = {"model": "scripted", "env": own, "rich": None, "select": {"limit": count}}
    config["client"] = {"base_url": url, "api_key_var": "ANY_KEY"}
    (folder / "eval.json").write_text(json.dumps(config))
    run = [V1, "-c", RUN_V1, str(folder / "eval.json")]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("outputs/*/traces.jsonl")
    rewards: dict[int, list[float | None]] = {}
    for episode in map(json.loads, found.read_text().splitlines()):
        trained = [one for one in episode["traces"] if one["agent"]["trainable"]]
        values = [sum(r["score"] * r["weight"] for r in one["rewards"].values() if r) for one in trained]
        rewards[episode["task"]["data"]["idx"]] = sorted(values) if episode["ok"] else [None]
    return rewards


RUN_V1 = """
import asyncio, json, sys
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.cli.eval.runner import run_eval
asyncio.run(run_eval(EvalConfig.model_validate(json.load(open(sys.argv[1])))))
"""


@pytest.mark.parametrize(("name", "args", "env", "policy", "count"), V1_KINDS)
def test_v1_rewards_are_those_of_verifiers_own_runner(
    name: str,
    args: dict[str, Any],
    env: dict[str, Any],
    policy: Policy,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    entry = EnvironmentEntry.model_validate(
        {"verifiers": name, "args": args, "config": {"env": env, "python": str(V1)}}
    )
    with scripted_endpoint(policy) as url:
        monkeypatch.setenv("JUDGE_URL", url)
        tasks = every_task(entry)[:count]
        rollouts = asyncio.run(played(entry, tasks, url, tmp_path / "logs", 1))
        theirs = own_v1(name, url, env, count, tmp_path)
    ours = {
        task.extras["index"]: sorted(one.agent_rewards.values()) if one.agent_rewards else [one.reward]
        for task, one in zip(tasks, rollouts, strict=True)
    }
    assert ours == theirs
    assert len({str(one) for one in ours.values()}) > 1, "a policy for which all are equal shows nothing"


@pytest.mark.parametrize(("name", "args", "policy", "samples", "count"), V0_KINDS)
def test_v0_rewards_are_those_of_verifiers_own_runner(
    name: str, args: dict[str, Any], policy: Policy, samples: int, count: int, tmp_path: Path
):
    entry = EnvironmentEntry.model_validate({"verifiers": name, "args": args, "config": {"python": str(V0)}})
    with scripted_endpoint(policy) as url:
        tasks = every_task(entry)
        rollouts = asyncio.run(played(entry, tasks, url, tmp_path / "logs", samples))
        runner = [V0, Path(__file__).with_name("v0_runner.py"), name, json.dumps(args), url, str(count), str(samples)]
        done = subprocess.run(runner, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    theirs = defaultdict(list)
    for example, reward, has_failed in json.loads(done.stdout.split("REWARDS ")[1].splitlines()[0]):
        theirs[example].append(None if has_failed else reward)
    ours = defaultdict(list)
    for rollout in rollouts:
        ours[int(rollout.task)].append(rollout.reward)
    assert {name: sorted(map(str, one)) for name, one in ours.items()} == {
        name: sorted(map(str, one)) for name, one in theirs.items()
    }
    assert len(ours) == count
