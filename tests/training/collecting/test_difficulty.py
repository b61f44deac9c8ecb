"""Tasks chosen by how often they are solved: skipped, rechecked, replayed, and the same after a resume."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config import ConfigError
from palestra.config.difficulty import DifficultyConfig
from palestra.config.train import load_train_config
from palestra.environments.task_order import TaskOrder
from palestra.runs.reader import RunReader
from palestra.runs.run_state import DifficultyState
from palestra.training.collecting.difficulty import TaskFilter
from palestra.training.collecting.sync_collector import RequestMaker
from palestra.types.rollouts import Group, GroupRequest, Task
from tests.properties import examples
from tests.training.records import make_rollout
from tests.training.trainers import SMALL, merged, train

SIZE = 4


def make_maker(
    state: DifficultyState, position: int = 0, pending: tuple[int, ...] = (), tasks: int = 12, **settings: Any
) -> RequestMaker:
    found = [Task(id=str(n), environment="x", prompt=[], extras={"level": n % 3}) for n in range(tasks)]
    chosen = TaskFilter(DifficultyConfig.model_validate(settings), 1.0, state)
    return RequestMaker(TaskOrder([(1.0, found)], 0), 0, SIZE, position, pending, chosen)


def played(request: GroupRequest, passes: int) -> Group:
    rollouts = [make_rollout(f"{request.id}-{i}", float(i < passes)) for i in range(SIZE)]
    return Group(id=request.id, task=request.task, step=request.step, rollouts=rollouts)


def epoch(maker: RequestMaker, passes: dict[str, int], count: int = 12, by: str = "") -> list[str]:
    """Plays one step of `count` groups; tasks that `passes` does not name are passed by half."""
    requests = [maker.next(0) for _ in range(count)]
    key = (lambda task: str(task.extras[by])) if by else (lambda task: task.id)
    maker.observe([played(request, passes.get(key(request.task), SIZE // 2)) for request in requests])
    return [request.task.id for request in requests]


def test_tasks_outside_the_band_are_skipped():
    maker = make_maker(DifficultyState(), lowest=0.2, highest=0.8)
    assert sorted(epoch(maker, {"3": 0, "5": SIZE}), key=int) == [str(n) for n in range(12)]
    later = epoch(maker, {}, count=30)
    assert not {"3", "5"} & set(later)
    assert set(later) == {str(n) for n in range(12)} - {"3", "5"}


def test_a_skipped_task_is_looked_at_again_from_time_to_time():
    state = DifficultyState()
    maker = make_maker(state, lowest=0.2, recheck_every=3, ema_decay=0.0)
    epoch(maker, {"3": 0})
    later = epoch(maker, {"3": SIZE}, count=40)
    assert later.count("3") == 1  # in the third of three epochs
    assert state.rates["x/3"].estimate == 1.0
    assert epoch(maker, {}, count=24).count("3") >= 1


def test_estimates_move_and_tasks_may_share_one():
    state = DifficultyState()
    maker = make_maker(state, by="level", highest=0.9, ema_decay=0.5, recheck_every=1000)
    later = [epoch(maker, {"0": SIZE}, by="level") for _ in range(3)][-1]
    assert state.rates["x/level=0"].estimate > 0.9
    assert {int(task) % 3 for task in later} == {1, 2}
    assert state.rates["x/level=1"].estimate == 0.5
    epoch(maker, {"1": 0}, count=1, by="level")


def test_tasks_that_were_solved_once_are_played_again_as_often_as_the_share_says():
    maker = make_maker(DifficultyState(), tasks=400, replay_share=0.25)
    hard = {str(n): 1 for n in range(0, 400, 2)}
    first = epoch(maker, hard, count=40)
    second = epoch(maker, {}, count=40)
    again = [task for task in second if task in first]
    assert len(again) == 10
    assert again == [task for task in first if task in hard][:10]


def test_solved_tasks_and_hopeless_ones_are_not_replayed():
    state = DifficultyState()
    maker = make_maker(state, replay_share=0.5)
    epoch(maker, {str(n): (0, SIZE, 2)[n % 3] for n in range(12)})
    assert state.queue == []
    epoch(maker, {"1": 1})
    assert len(state.queue) == 1


def test_a_band_that_nothing_fits_does_not_hang_a_run():
    maker = make_maker(DifficultyState(), lowest=0.9, recheck_every=1_000_000)
    epoch(maker, {})
    assert len(epoch(maker, {}, count=2)) == 2


@examples(20)
@given(st.integers(0, 10_000), st.integers(1, 5), st.sampled_from(["task", "level"]))
def test_a_resumed_run_chooses_the_same_tasks(seed: int, cut: int, by: str):
    """The state goes through JSON, as in a checkpoint; groups under way are begun again."""
    settings = {"lowest": 0.2, "highest": 0.8, "recheck_every": 2, "replay_share": 0.3, "by": by}

    def step(maker: RequestMaker, number: int) -> list[tuple[str, str, tuple[int, ...]]]:
        requests = [maker.next(number) for _ in range(5)]
        drawn = random.Random(f"{seed}/{number}")
        maker.observe([played(request, drawn.randrange(SIZE + 1)) for request in requests])
        return [(request.id, request.task.id, request.seeds) for request in requests]

    state = DifficultyState()
    maker = make_maker(state, **settings)
    before = [step(maker, number) for number in range(cut)]
    saved = json.dumps(msgspec.to_builtins(state))
    position = maker.position
    whole = [*before, *(step(maker, number) for number in range(cut, 8))]
    restored = msgspec.json.decode(saved, type=DifficultyState)
    resumed = make_maker(restored, position, **settings)
    assert [*before, *(step(resumed, number) for number in range(cut, 8))] == whole


def test_a_replayed_group_that_was_under_way_is_the_same_after_a_resume():
    state = DifficultyState()
    maker = make_maker(state, tasks=40, replay_share=0.5)
    epoch(maker, {str(n): 1 for n in range(40)}, count=8)
    begun = [maker.next(1) for _ in range(4)]
    restored = msgspec.json.decode(json.dumps(msgspec.to_builtins(state)), type=DifficultyState)
    pending = tuple(request.position for request in begun)
    again = make_maker(restored, maker.position, pending, tasks=40, replay_share=0.5)
    assert [again.next(1) for _ in range(4)] == begun
    assert state.replayed


@pytest.mark.slow
def test_a_run_with_filters_resumes_on_the_same_tasks(ephebe_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    difficulty = {"lowest": 0.1, "highest": 0.9, "by": "difficulty", "ema_decay": 0.3, "replay_share": 0.25}
    settings = {"server": ephebe_url, "steps": 4, "difficulty": difficulty, "data": {"zero_variance": "drop"}}
    (tmp_path / "run.json").write_text(json.dumps(merged(SMALL, settings)))
    for arguments in (("run.json", "--name", "whole"), ("run.json", "--name", "cut", "steps=2")):
        code, said = train(*arguments)
        assert code == 0, said
    code, said = train("--resume", "cut", "steps=4")
    assert code == 0, said
    whole, cut = (RunReader(tmp_path / "runs" / name) for name in ("whole", "cut"))
    for step in range(1, 5):
        assert [one["task"] for one in cut.read_rollouts(step)] == [one["task"] for one in whole.read_rollouts(step)]
    rows = whole.read_metrics()
    assert all("difficulty/skipped" in row and "difficulty/outside_share" in row for row in rows)
    assert rows[-1]["difficulty/known"] >= 2


def test_a_band_upside_down_is_refused():
    with pytest.raises(ConfigError, match="must not be above highest"):
        load_train_config([], [], {"environments": [{"name": "x"}], "difficulty": {"lowest": 0.9, "highest": 0.1}})
