from __future__ import annotations

import asyncio
import json

import pytest

from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments import (
    BaseTextEnv,
    EnvironmentFailure,
    EnvironmentSet,
    TaskFileError,
    UnknownEnvironment,
    deregister,
    register,
)
from palestra.environments.bundled import arithmetic, stockroom_tasks


class Recorder(BaseTextEnv):
    """Writes down what it was made with; brings tasks as plain rows."""

    made: list = []  # noqa: RUF012
    max_turns = 4

    def __init__(self, env_config, extras):
        super().__init__(env_config, extras)
        if extras.get("bad"):
            raise ValueError("bad task")
        extras["list"].append("mine")
        self.made.append((env_config, extras))

    def step(self, action):
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}

    @staticmethod
    def tasks(split):
        rows = [{"prompt": "a", "list": [1]}, {"prompt": "b", "list": [], "bad": True}]
        return rows if split == "train" else []

    @staticmethod
    def aggregate_metrics(metrics):
        return {"most_turns": max(one["turns"] for one in metrics), "note": "text"}


@pytest.fixture(autouse=True)
def _registered():
    Recorder.made = []
    register("recorder", Recorder)
    register("bare", BaseTextEnv)
    yield
    deregister("recorder")
    deregister("bare")


def environment_set(*entries):
    return EnvironmentSet([EnvironmentEntry(**entry) for entry in entries], env_threads=2, env_timeout_s=5)


def test_each_environment_brings_its_tasks_or_reads_a_file(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "1+1?", "answer": 2}) + "\n")
    with environment_set(
        {"name": "arithmetic", "tasks": tmp_path / "t.jsonl", "weight": 3},
        {"name": "recorder"},
        {"name": "palestra.environments.bundled.stockroom:Stockroom"},
    ) as envs:
        train, eval_ = envs.tasks("train"), envs.tasks("eval")
    assert [(entry.name, len(tasks)) for entry, tasks in train] == [
        ("arithmetic", 1),
        ("recorder", 2),
        ("palestra.environments.bundled.stockroom:Stockroom", 20_000),
    ]
    assert [entry.name for entry, _ in eval_] == ["arithmetic", "palestra.environments.bundled.stockroom:Stockroom"]
    assert all(tasks[0].environment == entry.name for entry, tasks in train + eval_)
    assert train[0].entry.weight == 3
    assert train[1].tasks[0].extras == {"list": [1]}


def test_an_environment_without_tasks_to_train_on_is_named():
    with environment_set({"name": "bare"}) as envs:
        assert envs.tasks("eval") == []
        with pytest.raises(TaskFileError, match=r"'bare' brings no tasks .* name a JSONL file: environments\[\].tasks"):
            envs.tasks("train")


def _raises(split):
    raise OSError("no such dataset server")


def _yields(split):
    for number in range(3):
        yield {"id": f"{split}-{number}", "prompt": "hi"}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (_raises, r"raised OSError: no such dataset server \(.*test_sets.py:\d+\)"),
        (lambda split: exit(3), "raised SystemExit: 3"),
        (lambda: None, r"raised TypeError: .* takes 0 positional arguments but 1 was given"),
        (lambda split: None, "should return a list of rows or of Tasks, not None"),
        (lambda split: 5, "should return a list of rows or of Tasks, not 5"),
        (lambda split: {"prompt": "x"}, "should return a list of rows or of Tasks, not {'prompt': 'x'}"),
        (lambda split: ["x"], r"\[0\] should be a row \(a dict with a prompt\) or a Task, but is 'x'"),
        (lambda split: [{"prompt": "x"}, "y"], r"\[1\] should be a row, like those before, but is 'y'"),
    ],
)
def test_tasks_that_cannot_be_had_are_one_line(tasks, message):
    env_class = type("Mistaken", (BaseTextEnv,), {"tasks": staticmethod(tasks)})
    register("mistaken", env_class)
    try:
        with environment_set({"name": "mistaken"}) as envs, pytest.raises(TaskFileError, match=message) as caught:
            envs.tasks("train")
        assert str(caught.value).startswith("environment 'mistaken': tasks('train')")
        assert "\n" not in str(caught.value)
    finally:
        deregister("mistaken")


def test_tasks_may_be_a_generator_and_odd_rows_need_an_id():
    register("yielding", type("Yielding", (BaseTextEnv,), {"tasks": staticmethod(_yields)}))
    odd = [{"prompt": "x", "what": object()}]
    register("odd", type("Odd", (BaseTextEnv,), {"tasks": staticmethod(lambda split: odd)}))
    try:
        with environment_set({"name": "yielding"}) as envs:
            assert [task.id for task in envs.tasks("train")[0].tasks] == ["train-0", "train-1", "train-2"]
        with (
            environment_set({"name": "odd"}) as envs,
            pytest.raises(TaskFileError, match=r"odd train\[0\]: the row needs an 'id'"),
        ):
            envs.tasks("train")
    finally:
        deregister("yielding")
        deregister("odd")


def test_an_unknown_name_is_refused_at_once_with_the_nearest():
    with pytest.raises(UnknownEnvironment, match=r"environments\[1\].name: .*'stockrom'\n  did you mean: stockroom\?"):
        environment_set({"name": "arithmetic"}, {"name": "stockrom"})
    with pytest.raises(UnknownEnvironment, match=r"environments\[0\].name: .*no module 'nowhere'"):
        environment_set({"name": "nowhere:Env"})
    with pytest.raises(ValueError, match=r"environments\[1\]: 'arithmetic' is listed twice"):
        environment_set({"name": "arithmetic"}, {"name": "arithmetic"})


def test_config_and_extras_reach_the_environment_and_rollouts_share_nothing():
    entry = {"name": "recorder", "config": {"url": {"host": "x"}}, "extras": {"level": 2}, "max_turns": 7}

    async def episodes(envs):
        task = envs.tasks("train")[0].tasks[0]
        for _ in range(2):
            session = envs.open(task)
            assert session.max_turns == 7
            assert await session.init(task.prompt) == task.prompt
            assert (await session.step("x")).reward == 1.0
            await session.close()
        assert task.extras == {"list": [1]}

    with environment_set(entry) as envs:
        asyncio.run(episodes(envs))
    for config, extras in Recorder.made:
        assert config.url == {"host": "x"}
        assert extras == {"list": [1, "mine"], "level": 2, "max_turns": 7}
    assert Recorder.made[0][0]["url"] is not Recorder.made[1][0]["url"]


def test_a_constructor_that_fails_comes_out_of_init_and_max_turns_is_the_environments_own():
    async def episodes(envs):
        good, bad = envs.tasks("train")[0].tasks
        session = envs.open(bad)
        with pytest.raises(EnvironmentFailure, match="making recorder raised ValueError: bad task"):
            await session.init(bad.prompt)
        await session.close()
        session = envs.open(good)
        await session.init(good.prompt)
        assert session.max_turns == 4

    with environment_set({"name": "recorder"}) as envs:
        asyncio.run(episodes(envs))


def test_metrics_are_aggregated_by_the_environments_own_rule_or_by_means():
    with environment_set({"name": "recorder"}, {"name": "arithmetic"}) as envs:
        assert envs.aggregate("recorder", [{"turns": 1.0}, {"turns": 3.0}]) == {"most_turns": 3.0}
        assert envs.aggregate("recorder", [{"other": 1.0}, {"other": 3.0}]) == {"other": 2.0}
        assert envs.aggregate("arithmetic", [{"parse_error": 1.0}, {"parse_error": 0.0}]) == {"parse_error": 0.5}
        assert envs.aggregate("arithmetic", []) == {}


def test_the_bundled_environments_are_won_through_sessions():
    solvers = {
        "arithmetic": lambda task: [arithmetic.solve(task)],
        "stockroom": stockroom_tasks.solve,
    }

    async def episode(envs, task):
        session = envs.open(task)
        await session.init(task.prompt)
        rewards = [(await session.step(said)).reward for said in solvers[task.environment](task)]
        metrics = await session.metrics()
        await session.close()
        return rewards, metrics

    async def episodes(envs):
        tasks = [task for _, tasks in envs.tasks("eval") for task in tasks[:20]]
        return await asyncio.gather(*(episode(envs, task) for task in tasks))

    with environment_set({"name": "arithmetic"}, {"name": "stockroom"}) as envs:
        played = asyncio.run(episodes(envs))
    assert len(played) == 40
    assert all(sum(rewards) == 1.0 and metrics["parse_error"] == 0.0 for rewards, metrics in played)
