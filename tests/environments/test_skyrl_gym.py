"""With the real skyrl-gym, where it is installed: its environments as they are, and with only their imports changed."""

from __future__ import annotations

import asyncio
import inspect
import json
import sqlite3
import types

import pytest

from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments import EnvironmentFailure, EnvironmentSet, UnknownEnvironment, deregister, register

pytest.importorskip("skyrl_gym", reason="needs skyrl-gym: pip install skyrl-gym==0.4.0")

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 40 + 2?"}],
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "42"},
    "extra_info": {"split": "train", "max_turns": 3},
}


def play(tmp_path, entry, row, *actions):
    """The task through file, set and session; the steps, metrics and their aggregate."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    config = EnvironmentEntry(**entry, tasks=tmp_path / "tasks.jsonl")

    async def episode(envs):
        ((_, (task,)),) = envs.tasks("train")
        session = envs.open(task)
        try:
            assert (await session.init(task.prompt))[-1]["role"] == "user"
            return [await session.step(action) for action in actions], session, await session.metrics()
        finally:
            await session.close()

    with EnvironmentSet([config], env_threads=2, env_timeout_s=20) as envs:
        steps, session, metrics = asyncio.run(episode(envs))
        return steps, session, envs.aggregate(config.name, [metrics])


def test_gsm8k(tmp_path):
    steps, session, _ = play(tmp_path, {"name": "skyrl_gym:gsm8k"}, ROW, "40 + 2\n#### 42")
    assert (steps[0].reward, steps[0].done, session.max_turns) == (1.0, True, 1)
    steps, _, _ = play(tmp_path, {"name": "skyrl_gym:gsm8k"}, ROW, "#### 43")
    assert steps[0].reward == 0.0


def test_gsm8k_multi_turn_with_its_own_aggregate(tmp_path):
    steps, session, aggregate = play(tmp_path, {"name": "skyrl_gym:gsm8k_multi_turn"}, ROW, "#### 41", "hm", "#### 42")
    assert [step.reward for step in steps] == [pytest.approx(0.2 / 3), 0.0, 1.0]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[0].observations[0]["content"].startswith("Please provide")
    assert session.max_turns == 3
    assert aggregate == {"avg_steps": 3.0}


def test_max_turns_of_the_config_reach_it(tmp_path):
    entry = {"name": "skyrl_gym:gsm8k_multi_turn", "max_turns": 1}
    steps, session, _ = play(tmp_path, entry, ROW, "no")
    assert (steps[0].done, session.max_turns) == (True, 1)


def test_aime(tmp_path):
    row = {**ROW, "env_class": "aime", "reward_model": {"ground_truth": "42"}}
    steps, _, _ = play(tmp_path, {"name": "skyrl_gym:aime"}, row, "So Answer: 42")
    assert (steps[0].reward, steps[0].metadata["acc"]) == (1.0, True)


def test_text2sql_reads_its_config_by_attribute(tmp_path):
    folder = tmp_path / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as db:
        db.execute("create table cups (n int)")
        db.execute("insert into cups values (42)")
    row = {
        "prompt": ROW["prompt"],
        "env_class": "text2sql",
        "db_id": "shop",
        "data": "spider",
        "reward_spec": {"ground_truth": "select n from cups"},
    }
    entry = {"name": "skyrl_gym:text2sql", "config": {"db_path": str(tmp_path)}}
    thought = "<think>look</think>"
    final = f"{thought}<solution>select n from cups</solution>"
    steps, session, _ = play(tmp_path, entry, row, f"{thought}<sql>select 1</sql>", final)
    assert [step.done for step in steps] == [False, True]
    assert steps[0].observations
    assert steps[1].reward == 1.0
    assert session.max_turns == 5
    with pytest.raises(
        EnvironmentFailure, match=r"env_config has no 'db_path'; to set it: environments\[\].config.db_path"
    ):
        play(tmp_path, {"name": "skyrl_gym:text2sql"}, row, "x")


def test_a_row_without_what_it_needs_fails_at_init(tmp_path):
    with pytest.raises(EnvironmentFailure, match="making skyrl_gym:gsm8k raised AssertionError: reward_spec"):
        play(tmp_path, {"name": "skyrl_gym:gsm8k"}, {"prompt": "x"}, "x")


def test_unknown_ids_get_the_nearest():
    with pytest.raises(UnknownEnvironment, match=r"did you mean: skyrl_gym:gsm8k"):
        EnvironmentSet([EnvironmentEntry(name="skyrl_gym:gsm8")], env_threads=1, env_timeout_s=1)
    with pytest.raises(UnknownEnvironment, match=r"did you mean: skyrl_gym:gsm8k\?"):
        EnvironmentSet([EnvironmentEntry(name="gsm8k")], env_threads=1, env_timeout_s=1)


def test_a_subclass_of_their_base_class_is_registered_here(tmp_path):
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    class Theirs(BaseTextEnv):
        def __init__(self, env_config, extras={}):  # noqa: B006 - as theirs are written
            super().__init__()

        def step(self, action):
            return BaseTextEnvStepOutput(observations=[], reward=0.5, done=True, metadata={})

    register("theirs", Theirs)
    try:
        steps, _, aggregate = play(tmp_path, {"name": "theirs"}, ROW, "x")
    finally:
        deregister("theirs")
    assert steps[0].reward == 0.5
    assert aggregate == {}


@pytest.mark.parametrize("path", ["gsm8k.env:GSM8kEnv", "gsm8k.multi_turn_env:GSM8kMultiTurnEnv"])
def test_their_source_runs_with_only_its_imports_changed(tmp_path, path):
    module_name, _, class_name = path.partition(":")
    module = __import__(f"skyrl_gym.envs.{module_name}", fromlist=[class_name])
    source = inspect.getsource(module).replace("skyrl_gym.envs.base_text_env", "palestra.environments")
    swapped = types.ModuleType("swapped")
    exec(compile(source, "swapped", "exec"), vars(swapped))  # noqa: S102 - their own file
    register("swapped", getattr(swapped, class_name))
    try:
        steps, _, _ = play(tmp_path, {"name": "swapped"}, ROW, "#### 42")
    finally:
        deregister("swapped")
    assert (steps[0].reward, steps[0].done) == (1.0, True)


def test_tool_groups_of_theirs_work_in_our_base_class_and_ours_in_theirs(tmp_path):
    from skyrl_gym.envs.base_text_env import BaseTextEnv as TheirEnv
    from skyrl_gym.tools.core import ToolGroup as TheirGroup
    from skyrl_gym.tools.core import tool as their_tool

    from palestra.environments import BaseTextEnv, ToolGroup, tool

    class Theirs(TheirGroup):
        @their_tool
        def add(self, a, b):
            return a + b

    class Ours(ToolGroup):
        @tool
        def add(self, a, b):
            return a + b

    for env, group in ((BaseTextEnv(), Theirs("sums")), (TheirEnv(), Ours("sums"))):
        env.init_tool_groups([group])
        assert env.tool_to_toolgroup == {"add": "sums"}
        assert env._execute_tool("sums", "add", (2, 3)) == 5
