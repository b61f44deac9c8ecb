from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.environments import TaskOrder
from palestra.types.rollouts import Task
from tests.properties import examples


def deck(name, count):
    return [Task(id=str(i), environment=name, prompt=[]) for i in range(count)]


mixes = st.lists(st.tuples(st.floats(0.05, 20), st.integers(1, 40)), min_size=1, max_size=4).map(
    lambda sizes: [(weight, deck(f"env{i}", count)) for i, (weight, count) in enumerate(sizes)]
)


@given(mixes, st.integers(0, 1000))
@examples(30)
def test_each_environments_tasks_come_once_in_every_pass(weighted, seed):
    order = TaskOrder(weighted, seed)
    seen: dict[str, list[str]] = {}
    for index in range(1500):
        seen.setdefault(order[index].environment, []).append(order[index].id)
    for _, tasks in weighted:
        ids, everything = seen.get(tasks[0].environment, []), {task.id for task in tasks}
        for start in range(0, len(ids) - len(tasks) + 1, len(tasks)):
            assert set(ids[start : start + len(tasks)]) == everything


@given(mixes, st.integers(0, 20_000), st.integers(200, 2000))
@examples(30)
def test_any_stretch_holds_each_environment_by_its_weight(weighted, start, length):
    order = TaskOrder(weighted, seed=1)
    counts = Counter(order[index].environment for index in range(start, start + length))
    total = sum(weight for weight, _ in weighted)
    for weight, tasks in weighted:
        share = weight / total
        assert abs(counts[tasks[0].environment] - share * length) <= len(weighted) + 1 + length * 0.001


@given(mixes, st.integers(0, 1000), st.lists(st.integers(0, 30_000), max_size=20))
@examples(30)
def test_the_same_seed_gives_the_same_task_at_any_index_in_any_order(weighted, seed, indices):
    order = TaskOrder(weighted, seed)
    forward = {index: order[index] for index in sorted(indices)}
    fresh = TaskOrder(weighted, seed)
    assert {index: fresh[index] for index in sorted(indices, reverse=True)} == forward


def test_unshuffled_tasks_come_in_their_own_order_in_every_pass():
    order = TaskOrder([(1.0, deck("a", 5)), (1.0, deck("b", 5))], seed=3, unshuffled={1})
    played = [order[index] for index in range(40)]
    assert [task.id for task in played if task.environment == "b"] == [*"01234"] * 4
    assert [task.id for task in played if task.environment == "a"] != [*"01234"] * 4


def test_seeds_and_passes_differ():
    tasks = deck("a", 50)

    def ids(seed, epoch):
        order = TaskOrder([(1.0, tasks)], seed)
        return [order[epoch * 50 + i].id for i in range(50)]

    assert ids(0, 0) != ids(1, 0)
    assert ids(0, 0) != ids(0, 1)
    assert ids(0, 0) == ids(0, 0)


def test_common_shares_are_exact_and_the_rare_are_not_forgotten():
    order = TaskOrder([(0.7, deck("a", 3)), (0.3, deck("b", 3))], seed=0)
    assert Counter(order[i].environment for i in range(5040)) == {"a": 3528, "b": 1512}
    rare = TaskOrder([(1e9, deck("a", 3)), (1e-9, deck("b", 3))], seed=0)
    assert Counter(rare[i].environment for i in range(5040))["b"] == 1


def test_what_is_no_order():
    for weighted in ([], [(1.0, [])], [(0.0, deck("a", 1))], [(-1.0, deck("a", 1)), (1.0, deck("b", 1))]):
        with pytest.raises(ValueError, match="weight above 0"):
            TaskOrder(weighted, seed=0)
    with pytest.raises(IndexError, match="numbered from 0"):
        TaskOrder([(1.0, deck("a", 1))], seed=0)[-1]
