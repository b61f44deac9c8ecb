"""A rollout that the servers of a gym play: what they are asked, and every way in which they fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from palestra.config.environment_entries import GymEntry
from palestra.environments.gym.directory import ServerDirectory
from palestra.net.http_client import HttpClient
from palestra.rollouts.gym.player import GymPlayer, GymRows
from palestra.rollouts.gym.row_calls import RowCalls
from palestra.rollouts.gym.servers import PolicyAddress
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.types.rollouts import GroupRequest, Rollout, RolloutStop, Task
from tests.gym.collect.scripted import ScriptedGym
from tests.rollouts.gym.test_results import answer, item
from tests.training.scripted import ScriptedSampler, chat_tokenizer

SETTINGS = RolloutSettings(max_tokens=64, max_context=512, temperature=0.7, top_p=0.9, top_k=20, timeout_s=20)
RIGHT = answer(item([5], [6]))
TIMED_OUT = {"_ng_failure_class": "model_timeout", "failure_reason": "nothing came"}
Reply = Callable[[dict[str, Any], int], Awaitable[web.StreamResponse]]


def always(told: Any, status: int = 200) -> Reply:
    async def reply(row: dict[str, Any], attempt: int) -> web.StreamResponse:
        return web.json_response(told, status=status)

    return reply


def play(
    reply: Reply,
    row: dict[str, Any] | None = None,
    settings: RolloutSettings = SETTINGS,
    agent: str = "player",
    **entry: Any,
) -> tuple[Rollout, ScriptedGym]:
    gym = ScriptedGym()
    gym.reply = reply
    row = {"responses_create_params": {"input": "2 + 2?"}, "agent_ref": {"name": agent}, **(row or {})}
    task = Task(id="t", environment="gym", prompt=[{"role": "user", "content": "2 + 2?"}], extras={"row": row})
    request = GroupRequest(id="g000003", task=task, step=2, seeds=(11, 12), position=3)

    async def main() -> Rollout:
        async with gym.serving(), HttpClient() as client:
            calls = RowCalls(client, await ServerDirectory.of_head(client, gym.url))
            policy = PolicyAddress("http://here:1", "policy", "ephebe")
            given = GymEntry(head=gym.url, **entry)
            player = GymPlayer(GymRows(calls, given, {"added": 1}), policy, chat_tokenizer())
            return await player.play(request, 1, ScriptedSampler("x", version=2), settings)

    return asyncio.run(asyncio.wait_for(main(), 60)), gym


def test_a_row_is_posted_with_this_runs_way_to_sample() -> None:
    given = {
        "input": "2 + 2?",
        "temperature": 0.1,
        "max_output_tokens": 500,
        "metadata": {"extra_body": '{"a": 1, "seed": 3}'},
    }
    rollout, gym = play(always(RIGHT), {"responses_create_params": given, "expected_answer": "4"})
    assert (rollout.reward, rollout.stop, rollout.temperature) == (1.0, RolloutStop.DONE, 0.7)
    assert rollout.messages[0] == {"role": "user", "content": "2 + 2?"}
    (row,) = gym.rows
    params, metadata = row["responses_create_params"], row["responses_create_params"]["metadata"]
    assert (params["temperature"], params["top_p"], params["max_output_tokens"]) == (0.7, 0.9, 64)
    assert metadata["policy_model_name"] == "session-4"
    assert metadata["rollout_seed"] == "12"
    assert json.loads(metadata["extra_body"]) == {"a": 1, "top_k": 20}, "a row's own seed would be that of all"
    assert (row["expected_answer"], row["added"]) == ("4", 1)
    assert (row["_ng_task_index"], row["_ng_rollout_index"]) == (3, 1)


def test_what_may_pass_is_asked_again() -> None:
    async def reply(row: dict[str, Any], attempt: int) -> web.StreamResponse:
        if attempt == 0:
            raise ConnectionResetError  # the connection breaks without an answer
        if attempt == 1:
            return web.json_response({"_ng_failure_class": "judge_failed", "failure_reason": "busy"})
        return web.json_response(RIGHT)

    rollout, gym = play(reply)
    assert rollout.is_graded
    assert [row.get("_ng_attempt_index") for row in gym.rows] == [None, 1, 2]


@pytest.mark.parametrize(
    ("reply", "asked", "error"),
    [
        (always({"detail": "no"}, 500), 2, "agent_error: player answered 500: no"),
        (always({"detail": "what is this"}, 422), 1, "row_refused: player answered 422: what is this"),
        (always(TIMED_OUT, 500), 2, "model_timeout: nothing came"),
        (always({**TIMED_OUT, "_ng_failure_terminal": True}, 500), 1, "model_timeout: nothing came"),
        (always(["no object"]), 2, "bad_answer: its answer is not a JSON object"),
        (always({**RIGHT, "reward": None}), 1, "its reward is not a number"),
        (always({"_ng_failure_class": "gone"}), 2, "gone: no reason given"),
        (always({"_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "sleeps"}), 2, "judge_failed: sleeps"),
        (always({"_ng_failure_class": "gone", "_ng_failure_terminal": True}), 1, "gone"),
        (always({**RIGHT, "_ng_no_persist": True}), 1, "not_kept: its agent asks not to store it"),
    ],
)
def test_a_failure_is_a_record_after_as_many_attempts_as_make_sense(reply: Reply, asked: int, error: str) -> None:
    rollout, gym = play(reply, attempts=2)
    assert (rollout.stop, rollout.reward) == (RolloutStop.ENV_FAILED, None)
    assert error in (rollout.error or "")
    assert rollout.failure == (error.partition(":")[0] if "reward" not in error else "bad_answer")
    assert len(gym.rows) == asked


def test_a_rollout_that_does_not_end_is_given_up() -> None:
    async def reply(row: dict[str, Any], attempt: int) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    short = RolloutSettings(max_tokens=8, max_context=64, timeout_s=0.2)
    rollout, _ = play(reply, settings=short)
    assert (rollout.stop, rollout.failure) == (RolloutStop.TIMEOUT, "timeout_exceeded")
    assert "rollout.timeout_s" in (rollout.error or "")


def test_answers_of_other_weights_are_not_learned_from() -> None:
    def of(model: str) -> Rollout:
        return play(always({**RIGHT, "response": {**RIGHT["response"], "model": model}}), attempts=1)[0]

    assert of("session-4").is_graded
    assert of("policy").is_graded
    assert "model 'gpt' has answered instead of this run's weights" in (of("gpt").error or "")


def test_an_agent_that_the_gym_has_not_is_told_with_the_nearest() -> None:
    rollout, _ = play(always(RIGHT), agent="payer")
    assert "has no agent 'payer'; did you mean player?" in (rollout.error or "")
    assert rollout.failure == "unknown_agent"
