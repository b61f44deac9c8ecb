"""Servers that were written for NeMo Gym play in a gym of ours, unchanged."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from palestra.environments.gym.directory import ServerDirectory
from palestra.gym.collect.aggregating import aggregated
from palestra.gym.collect.collection import CollectionStatus, delivered
from palestra.gym.collect.files import read_lines
from palestra.net.http_client import HttpClient
from palestra.rollouts.gym import row_calls
from palestra.util.backoff import Backoff
from tests.gym.stock.conftest import StockGym, adding, row_of


def test_each_session_of_a_tool_server_has_its_own_state(gym: StockGym, tmp_path: Path) -> None:
    rows = [adding([at, at + 1], expected=10 + 2 * at + 1 + at % 2, bonus=at % 2) for at in range(12)]
    rows.append(adding([5], expected=0))
    standing = gym.collected(tmp_path, "tally_agent", rows)
    results = delivered(tmp_path / "out.jsonl")
    assert (standing.done, standing.failed) == (13, 0)
    assert [one["reward"] for one in results] == [1.0] * 12 + [0.0]
    assert [one["total"] for one in results] == [10 + 2 * at + 1 + at % 2 for at in range(12)] + [15]
    kinds = [item["type"] for item in results[0]["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * 2 + ["message"]
    assert results[0]["response"]["usage"]["total_tokens"] == 24


def test_its_own_metrics_are_asked_of_it(gym: StockGym, tmp_path: Path) -> None:
    rows = [adding([1], expected=11), adding([1], expected=12)]
    gym.collected(tmp_path, "tally_agent", rows, repeats=2)

    async def request() -> list[dict]:
        async with HttpClient() as client:
            directory = await ServerDirectory.of_head(client, gym.supervisor.head_url)
            return await aggregated(delivered(tmp_path / "out.jsonl"), directory, client)

    (response,) = gym.run(request())
    assert response["key_metrics"] == {"pass@2/accuracy": 50.0}
    assert response["agent_metrics"]["majority@2/accuracy"] == 50.0
    assert [one["mean/reward"] for one in response["group_level_metrics"]] == [1.0, 0.0]


def test_a_gymnasium_server_is_stepped_by_our_agent(gym: StockGym, tmp_path: Path) -> None:
    gym.collected(tmp_path, "climb_agent", [row_of("climb", height=height) for height in (1, 3)])
    assert [one["reward"] for one in delivered(tmp_path / "out.jsonl")] == [0.5, 1.5]


def test_a_stock_agent_and_a_judge(gym: StockGym, tmp_path: Path) -> None:
    standing = gym.collected(tmp_path, "essay_agent", [row_of("write", author="me")])
    (result,) = delivered(tmp_path / "out.jsonl")
    assert standing.done == 1
    assert result["reward"] == 1.0
    assert result["response"]["output"][0]["content"][0]["text"] == "UP"


def test_a_judge_that_is_absent_makes_a_failure_and_no_zero(
    gym: StockGym, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_calls, "BACKOFF", Backoff(0.0, 0.0))
    standing = gym.collected(tmp_path, "essay_agent", [row_of("write", is_judge_there=False)])
    assert (standing.done, standing.failed) == (0, 1)
    failures = list(read_lines(tmp_path / "out_failures.jsonl"))
    assert {one["_ng_failure_class"] for one in failures} == {"judge_failed"}
    assert "there is no such model" in failures[0]["_ng_failure_judge_error"]


def test_what_fails_behind_a_stock_agent_is_told_once_and_by_its_class(
    gym: StockGym, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_calls, "BACKOFF", Backoff(0.0, 0.0))
    gym.collected(tmp_path, "essay_agent", [row_of("refuse"), row_of("write", is_judge_there="perhaps")])
    failures = list(read_lines(tmp_path / "out_failures.jsonl"))
    found = {one["_ng_task_index"]: one for one in failures}
    assert [(found[at]["_ng_failure_class"], found[at]["status"]) for at in (0, 1)] == [
        ("model_error", 403),
        ("verifier_refused", 422),
    ]
    assert found[0]["failure_reason"].endswith('/v1/chat/completions answered 403: not "you"')
    assert found[1]["failure_reason"].startswith("/verify answered 422: body.is_judge_there: Input should be a valid")
    assert [one["_ng_task_index"] for one in failures].count(1) == 1, "a verifier that refuses is not asked again"


def test_every_row_comes_once_though_the_server_is_killed(
    gym: StockGym, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_calls, "BACKOFF", Backoff(0.05, 0.05))
    first = gym.pid_of("tally")
    rows = [adding([at] * 4, expected=10 + 4 * at) for at in range(40)]

    killed: list[int] = []

    def response(standing: CollectionStatus) -> None:
        if standing.done >= 5 and not killed:
            killed.append(first)
            os.kill(first, signal.SIGKILL)

    standing = gym.collected(tmp_path, "tally_agent", rows, response)
    results = delivered(tmp_path / "out.jsonl")
    assert gym.pid_of("tally") != first
    assert (standing.done, standing.failed) == (40, 0)
    assert [one["_ng_task_index"] for one in results] == list(range(40))
    assert {one["reward"] for one in results} == {1.0}, "a rollout was judged by a server that had not seen it"
