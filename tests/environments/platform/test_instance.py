"""One instance: calls, what they change, copies of it."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.environments.platform import APPS, Instance, PlatformError, SeedSize, TaskKey, make_task
from palestra.environments.platform.changes import ChangeKind, compared
from palestra.environments.platform.seeds import seed_named, seed_of

KEYS = APPS["keys"]
names = st.sampled_from("abcdefghij")
calls = st.one_of(
    st.tuples(st.just("set"), st.fixed_dictionaries({"name": names, "value": st.integers(0, 3)})),
    st.tuples(st.just("drop"), st.fixed_dictionaries({"name": names})),
    st.tuples(st.just("put"), st.fixed_dictionaries({"value": st.integers(0, 3)})),
    st.tuples(st.just("get"), st.fixed_dictionaries({"name": names})),
)


def told(instance: Instance, name: Any, arguments: Any) -> dict[str, Any]:
    return json.loads(instance.call(name, arguments).text)


@given(st.lists(calls, max_size=30))
def test_the_same_calls_give_the_same_state_and_the_changes_of_a_full_comparison(
    made: list[tuple[str, dict[str, Any]]],
):
    one, other, seed = (Instance.create(KEYS, 3) for _ in range(3))
    for name, arguments in made:
        assert one.call(name, arguments) == other.call(name, arguments)
    assert one.state_hash() == other.state_hash()
    assert one.changes() == compared(seed.connection, one.connection, {})
    assert [event.tool for event in one.events()] == [name for name, _ in made]


@given(
    st.text(), st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(), st.lists) | st.just({})
)
def test_whatever_a_model_calls_it_gets_a_result_and_nothing_changes(name: str, arguments: Any):
    instance = Instance.create(KEYS)
    before = instance.state_hash()
    told(instance, name, arguments)
    for known in ("put", "set", "drop"):
        assert told(instance, known, arguments)["error"] == "bad_arguments"
        assert told(instance, known, {"name": arguments, "value": arguments, "more": 1})["error"] == "bad_arguments"
    assert instance.state_hash() == before


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("put", {"x" * 150_000: 1}), ("y" * 150_000, {}), ("put", {"value": ["z" * 300_000]}), ("w" * 300_000, {})],
)
def test_a_long_call_is_told_shortly_and_fills_nothing(name: str, arguments: Any):
    instance = Instance.create(KEYS)
    assert len(instance.call(name, arguments).text) < 500
    assert len(instance.snapshot()) - len(instance.seed.data) < 200_000


def test_an_instance_that_is_full_says_so_and_grows_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("palestra.environments.platform.instance.MAX_PAGES", 200)
    instance = Instance.create(KEYS)
    with pytest.raises(sqlite3.OperationalError, match="full"), instance.transaction() as connection:
        connection.execute("INSERT INTO numbers (value) VALUES (zeroblob(300000))")
    assert instance.changes() == []
    while told(instance, "nothing", {"text": "x" * 50_000})["error"] != "full":
        pass
    before = instance.state_hash(), instance.events()
    assert told(instance, "put", {"value": 1})["error"] == "full"
    assert (instance.state_hash(), instance.events()) == before
    assert len(instance.snapshot()) < 300_000


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("put", {"valu": 1}, "no argument 'valu'"),
        ("put", {}, "missing argument value"),
        ("put", {"value": "3"}, "Expected int, got str"),
        ("put", {"value": 2**63}, "too large"),
        ("put", [], "must be an object, found a list"),
        ("set", {"name": "\ud83d", "value": 1}, "surrogates"),
        ("set", {"name": "x" * 30_000, "value": 1}, "longer than"),
        ("gett", {"name": "a"}, "no tool 'gett'"),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong(name: str, arguments: Any, message: str):
    answer = told(Instance.create(KEYS), name, arguments)
    assert message in answer["message"]
    assert answer["hint"]


def test_a_call_that_fails_halfway_has_changed_nothing():
    instance = Instance.create(KEYS)
    for value in range(1000):
        instance.call("put", {"value": value})
    before = instance.state_hash()
    assert told(instance, "put", {"value": 1})["error"] == "full"  # found after the row was written
    assert instance.state_hash() == before


def test_what_is_undone_is_no_change():
    instance = Instance.create(KEYS)
    item = told(instance, "list", {})
    name, value = next(iter(item.items()))
    instance.call("set", {"name": name, "value": value + 1})
    (change,) = instance.changes()
    assert (change.kind, change.key, change.fields) == (ChangeKind.UPDATE, (name,), ("value",))
    instance.call("drop", {"name": name})
    assert [change.kind for change in instance.changes()] == [ChangeKind.DELETE]
    instance.call("set", {"name": name, "value": value})
    assert instance.changes() == []


def test_only_writing_moves_the_clock():
    instance = Instance.create(KEYS)
    assert instance.now == "2026-03-02T09:00:00"
    instance.call("list", {})
    instance.call("get", {"name": "nobody"})
    instance.call("drop", {"name": "nobody"})
    assert instance.now == "2026-03-02T09:00:00"
    instance.call("put", {"value": 1})
    assert instance.now == "2026-03-02T09:01:00"


def test_a_fork_goes_its_own_way_and_a_snapshot_brings_back():
    instance = Instance.create(KEYS)
    instance.call("put", {"value": 1})
    kept, fork = instance.snapshot(), instance.fork()
    assert (fork.state_hash(), fork.events(), fork.changes()) == (
        instance.state_hash(),
        instance.events(),
        instance.changes(),
    )
    fork.call("put", {"value": 2})
    assert len(instance.changes()) == 1
    instance.call("put", {"value": 3})
    instance.restore(kept)
    assert [change.after["value"] for change in instance.changes()] == [1]
    instance.reset()
    assert instance.changes() == []
    assert instance.state_hash() == Instance.create(KEYS).state_hash()


def test_a_closed_instance_says_so():
    instance = Instance.create(KEYS)
    instance.close()
    instance.close()
    with pytest.raises(PlatformError, match="closed"):
        instance.call("list", {})


def test_seeds_are_the_same_each_time_and_differ_by_number():
    seeds = [seed_of(KEYS, number, SeedSize.SMALL) for number in range(20)]
    assert len({seed.digest for seed in seeds}) == 20
    assert seed_named(KEYS, "small-7") is seeds[7]
    for wrong in ("small", "huge-1", "small-x", "small--1", "small-9999999999"):
        with pytest.raises(PlatformError, match="small-17"):
            seed_named(KEYS, wrong)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("keys", "not a task key"),
        ("key-put_number-0b-1", "did you mean keys"),
        ("keys-put_numbers-0b-1", "did you mean put_number"),
        ("keys-put_number-0a-1", "has difficulty 0b"),
        (f"keys-put_number-0b-{2**32}", "below"),
    ],
)
def test_a_wrong_task_key_is_told_what_is_wrong(key: str, message: str):
    with pytest.raises(PlatformError, match=message):
        make_task(key)


def test_a_key_is_read_as_it_is_written():
    key = TaskKey("keys", "put_number", "0b", 17)
    assert TaskKey.parse(str(key)) == key
    assert make_task(key).key == key
