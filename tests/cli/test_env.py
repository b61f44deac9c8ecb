from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from palestra.cli.env import env
from palestra.environments.bundled import stockroom_tasks


def run(*args, said=()):
    return CliRunner().invoke(env, args, input="".join(line + "\n" for line in said), catch_exceptions=False)


def test_the_list_says_what_there_is():
    result = run("list")
    assert result.exit_code == 0
    assert "stockroom   Up to six turns" in result.stdout
    assert "(20000 tasks, 512 held out)" in result.stdout
    found = {one["name"]: one for one in json.loads(run("list", "--json").stdout)}
    assert found["arithmetic"]["eval_tasks"] >= 256
    assert found["arithmetic"]["problem"] is None


def test_a_person_plays_a_task_to_its_reward():
    task = stockroom_tasks.tasks("eval")[0]
    result = run("play", "stockroom", "--task", task.id, said=stockroom_tasks.solve(task))
    assert result.exit_code == 0, result.output
    assert "user: How many cards and pencils are there together?" in result.stdout
    assert "user: Tool result: 35" in result.stdout
    assert "reward 1\n" in result.stdout
    assert "tool_calls 3\n" in result.stdout
    lost = run("play", "stockroom", "--max-turns", "1", said=["what?"])
    assert "reward 0\n" in lost.stdout


def test_tasks_come_from_a_file_too(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"prompt": "What is 1 + 1?", "answer": 2}\n')
    result = run("play", "arithmetic", "--tasks", str(tmp_path / "t.jsonl"), said=["2"])
    assert "user: What is 1 + 1?" in result.stdout
    assert "reward 1\n" in result.stdout


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["play", "stockrom"], 3, "did you mean: stockroom?"),
        (["play", "stockroom", "--task", "nine"], 3, "stockroom has no task 'nine'; its first task is 'eval-0'"),
        (["play", "stockroom", "--tasks", __file__], 1, "test_env.py, line 1"),
    ],
)
def test_what_cannot_be_played_is_said_without_a_traceback(args, code, message):
    result = run(*args)
    assert result.exit_code == code
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_the_end_of_the_input_is_the_end_of_the_task_with_its_verdict():
    result = run("play", "stockroom", "--max-turns", "3", said=["what?"])
    assert result.exit_code == 0, result.output
    assert "the input has ended after 1 of 3 turns" in result.stderr
    assert "reward 0\n" in result.stdout
    assert "tool_calls 0\n" in result.stdout
    assert "Aborted" not in result.output
