"""Training on Fleet tasks: rows of the platform and of files, both ways of playing, and grades that nobody knows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from palestra.config.environment_entries import EnvironmentEntry
from palestra.data.conversations import ConversationFile, conversation_of
from palestra.environments import EnvironmentSet, TaskFileError, spec
from palestra.environments.fleet import fleet_row, gold
from palestra.environments.fleet.gold import gold_lines
from palestra.environments.fleet.prompts import PromptStyle
from palestra.environments.fleet.records import FleetTask
from palestra.environments.fleet.splits import split_tasks
from palestra.environments.platform import make_task
from palestra.rollouts.group_metrics import environment_metrics, label_metrics
from palestra.rollouts.local.lockstep import BatchedRollouts
from palestra.rollouts.local.player import PlayerContext, play_rollout
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.training.batches.grpo_batch import DropReason, build_batch
from palestra.types.rollouts import Group, GroupRequest, Rollout, RolloutStop
from tests.environments.fleet.conftest import PUT, call
from tests.training.records import make_config
from tests.training.scripted import Asked, ScriptedSampler, chat_tokenizer

PLAYED = "platform:keys?difficulty=0b&count=40"
COMPACT = {"tasks_file": PLAYED, "prompt_style": "compact"}


@contextlib.contextmanager
def a_table(
    config: dict[str, Any], max_context: int = 4000, max_tokens: int = 200, **entry: Any
) -> Iterator[PlayerContext]:
    known = EnvironmentEntry(name="fleet_task", config=config, **entry)
    settings = RolloutSettings(
        max_tokens=max_tokens, max_context=max_context, temperature=1, top_p=1, top_k=-1, timeout_s=60
    )
    with EnvironmentSet([known], env_threads=1, env_timeout_s=30) as environments:
        yield PlayerContext(chat_tokenizer(), environments, settings)


def requests(table: PlayerContext, count: int, size: int = 4) -> list[GroupRequest]:
    ((_, tasks),) = table.environments.tasks("train")
    return [GroupRequest(id=f"g{n}", task=tasks[n], seeds=tuple(range(size)), step=1) for n in range(count)]


def group_of(request: GroupRequest, rollouts: list[Rollout]) -> Group:
    return Group(id=request.id, task=request.task, step=1, rollouts=rollouts)


def says(asked: Asked) -> str:
    """Every second time the number that the task names, else another."""
    text = chat_tokenizer().decode(asked.prompt)
    expected = int(re.findall(r"(\d+)\.", text)[-1])
    return call("put", value=expected if asked.params.seed % 2 else expected + 1) + "<done>"


def test_tasks_come_from_the_config_and_say_where_they_are_from():
    with a_table(COMPACT) as table:
        ((_, train),), ((_, held_out),) = table.environments.tasks("train"), table.environments.tasks("eval")
    assert (len(train), train[3].id) == (40, "keys-put_number-0b-3")
    assert held_out[3].id == f"keys-put_number-0b-{2**31 + 3}"
    assert train[3].prompt[0]["content"] == make_task(train[3].id).prompt
    response = {"task_key": train[3].id, "data_source": "keys", "level": "keys-0b", "tasks_file": PLAYED}
    assert train[3].extras == response
    with pytest.raises(TaskFileError, match="did you mean keys"), a_table({"tasks_file": "platform:key"}) as table:
        table.environments.tasks("train")


def test_rows_of_a_skyrl_dataset_play_as_they_are(tmp_path: Path):
    row = {
        "prompt": [{"role": "user", "content": "x"}],
        "env_class": "fleet_task",
        "task_key": PUT,
        "data_source": "keys",
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    with a_table({"tasks_file": "platform:keys"}, tasks=tmp_path / "train.jsonl") as table:
        (request,) = requests(table, 1, 1)
        rollout = asyncio.run(play_rollout(table, request, 0, ScriptedSampler(says)))
    assert rollout.messages[1]["content"] == make_task(PUT).prompt
    assert rollout.stop is RolloutStop.DONE


def test_both_styles_play_and_what_they_play_is_learned_from():
    with a_table(COMPACT) as table:
        requested = requests(table, 4)

        async def one_by_one() -> list[Group]:
            sampler = ScriptedSampler(says)
            return [
                group_of(request, [await play_rollout(table, request, n, sampler) for n in range(4)])
                for request in requested
            ]

        async def together() -> list[Group]:
            return [group async for group in BatchedRollouts(table).play(requested, ScriptedSampler(says))]

        one, other = asyncio.run(one_by_one()), asyncio.run(together())
    assert rewards(one) == rewards(other)
    assert {reward for group in one for reward in rewards([group])[group.id]} == {0.0, 1.0}
    assert build_batch(one, make_config()).sequences


def rewards(groups: list[Group]) -> dict[str, list[float | None]]:
    return {group.id: [rollout.reward for rollout in group.rollouts] for group in groups}


def test_a_grade_that_nobody_knows_leaves_the_group_and_is_counted(tmp_path: Path):
    broken = {**fleet_row(make_task(PUT)), "key": "broken", "verifier_func": "def v(env):\n    1 / 0"}
    (tmp_path / "tasks.json").write_text(json.dumps([broken]))
    with a_table({"tasks_file": str(tmp_path / "tasks.json")}) as table:
        (request,) = requests(table, 1, 2)
        rollouts = [asyncio.run(play_rollout(table, request, n, ScriptedSampler("<done>"))) for n in range(2)]
    assert [(one.reward, one.stop, one.metrics["unknown_reward"]) for one in rollouts] == [(None, "done", 1.0)] * 2
    batch = build_batch([group_of(request, rollouts)], make_config())
    assert batch.dropped == {DropReason.UNGRADED: 2}


def test_a_step_tells_apps_apart(tmp_path: Path):
    keys = [PUT, "mail-move_only-0-3"]
    (tmp_path / "tasks.json").write_text(json.dumps([fleet_row(make_task(key)) for key in keys]))
    put = call("put", value=make_task(PUT).params["value"]) + "<done>"

    def knows_keys(asked: Asked) -> str:
        return put if make_task(PUT).prompt in chat_tokenizer().decode(asked.prompt) else "hm <done>"

    with a_table({"tasks_file": str(tmp_path / "tasks.json")}, max_context=20_000) as table:
        groups = [
            group_of(request, [asyncio.run(play_rollout(table, request, 0, ScriptedSampler(knows_keys)))])
            for request in requests(table, 2, 1)
        ]
        found = environment_metrics(groups, table.environments.aggregate)
    found |= label_metrics(groups, "env", "reward", lambda one: one.reward or 0.0)
    assert [(group.task.id, group.rollouts[0].reward) for group in groups] == [(PUT, 1.0), (keys[1], 0.0)]
    area = "env/fleet_task"
    assert (found[f"{area}/keys/reward"], found[f"{area}/mail/reward"], found[f"{area}/reward"]) == (1.0, 0.0, 0.5)
    assert (found[f"{area}/keys/avg_tool_calls"], found[f"{area}/mail/avg_tool_calls"]) == (1.0, 0.0)
    assert (found[f"{area}/keys/num_episodes"], found[f"{area}/total_episodes"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("then", "limits", "stop"),
    [("hm", {"max_context": 1500}, "context"), ("so, " * 200, {"max_tokens": 45}, "length")],
    ids=["context", "length"],
)
def test_an_episode_that_we_end_is_graded_as_it_stands(then: str, limits: dict[str, int], stop: str):
    """It has done what it should, and never comes to say so."""
    done = call("put", value=make_task("keys-put_number-0b-0").params["value"])

    def chatty(asked: Asked) -> str:
        return then if "Tool result" in chat_tokenizer().decode(asked.prompt) else done

    with a_table(COMPACT, max_turns=30, **limits) as table:
        (request,) = requests(table, 1, 1)
        rollout = asyncio.run(play_rollout(table, request, 0, ScriptedSampler(chatty)))
    assert (rollout.stop, rollout.reward) == (stop, 1.0)


def test_a_context_that_was_tended_is_what_the_policy_sees():
    task = make_task("keys-put_number-0b-0")
    says = [
        "apple",
        "pear",
        call("manage_context", keep_recent_turns=1),
        call("put", value=task.params["value"]),
        "<done>",
    ]
    said = iter(says)
    sampler = ScriptedSampler(lambda _: next(said))
    with a_table({**COMPACT, "enable_context_tools": True}, max_turns=9) as table:
        (request,) = requests(table, 1, 1)
        rollout = asyncio.run(play_rollout(table, request, 0, sampler))
    assert (rollout.reward, rollout.stop, len(rollout.turns)) == (1.0, "done", 2)
    (before,) = rollout.branches
    assert [turn.text for turn in before.turns] == says[:3]
    seen = [chat_tokenizer().decode(requested.prompt) for requested in sampler.asked]
    assert ["apple" in text for text in seen] == [False, True, True, False, False]
    assert all(task.prompt in text for text in seen)
    assert sampler.asked[3].prompt == rollout.prompt
    assert sampler.asked[4].prompt == [*rollout.prompt, *rollout.turns[0].tokens, *rollout.turns[1].observation]


def test_a_wrong_name_of_tasks_or_file_of_gold_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    for given, said in (
        (["tasks.json", str(tmp_path / "gold.jsonl")], "there is no app 'tasks.json'"),
        (["platform:keys?count=1", str(tmp_path / "file" / "gold.jsonl")], "a part of this path is a file"),
    ):
        monkeypatch.setattr(sys, "argv", ["gold.py", *given])
        with pytest.raises(SystemExit, match="2"):
            gold.main()
        assert said in capsys.readouterr().err.splitlines()[-1]


def test_gold_conversations_are_files_to_train_on(tmp_path: Path):
    (file := tmp_path / "gold.jsonl").write_text("\n".join(gold_lines("platform:keys?count=12", PromptStyle.COMPACT)))
    rows = ConversationFile(file, conversation_of)
    assert len(rows) == 12
    for row in (rows[n] for n in range(12)):
        assert [message["role"] for message in row.messages[:3]] == ["system", "user", "assistant"]
        assert row.messages[-1]["role"] == "assistant"
        assert row.messages[-1]["content"] == "<done>" or "submit_final_answer" in row.messages[-1]["content"]


def test_a_files_tasks_are_split_by_their_hash():
    tasks = [FleetTask(task_key=f"t{n}", prompt="p", env_key="booking" if n < 100 else "mail") for n in range(110)]
    train, held_out = ({task.task_key for task in split_tasks(tasks, split)} for split in ("train", "eval"))
    assert not train & held_out
    assert len(train | held_out) == 110
    assert 8 <= len(held_out) <= 32
    assert all(int(key[1:]) < 100 for key in held_out)  # of ten tasks none is kept back
    more = [*tasks, *(FleetTask(task_key=f"x{n}", prompt="p", env_key="stay") for n in range(50))]
    assert {t.task_key for t in split_tasks(more, "eval") if t.env_key == "booking"} == held_out
    many = [FleetTask(task_key=f"{app}{n}", prompt="p", env_key=app) for app in "abcdefgh" for n in range(100)]
    evaluated = split_tasks(many, "eval")
    assert len(evaluated) == 60
    assert all(sum(task.env_key == app for task in evaluated) >= 4 for app in "abcdefgh")


def test_a_config_may_say_fleet_for_short() -> None:
    assert spec("fleet").load() is spec("fleet_task").load()
