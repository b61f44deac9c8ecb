"""Turns come back with their whole prompts; traces are bounded in number and age, and are their owner's."""

from __future__ import annotations

import pytest

from palestra.store import Store
from palestra.store.traces import (
    Purge,
    Trace,
    Turn,
    TurnFacts,
    TurnSample,
    append_turn,
    get_trace,
    list_traces,
    purge_traces,
    turns_of,
)

FACTS = TurnFacts(
    response_id="r",
    route="chat",
    base_model="b",
    weights="b",
    temperature=1.0,
    match="new",
    started_at=1.0,
    prepare_s=0.0,
    sample_s=0.0,
    compute_s=0.0,
)


def trace(name: str, *, owner: str = "o", at: float = 1.0) -> Trace:
    return Trace(trace_id=name, owner=owner, model="m", created_at=at, updated_at=at)


def turn(prompt: list[int], *tokens: int, parent: int | None = None) -> Turn:
    sample = TurnSample(tokens=list(tokens), logprobs=[-0.5] * len(tokens), stop_reason="stop")
    return Turn(
        prompt=prompt, samples=[sample], facts=FACTS, parent=parent, parent_sample=None if parent is None else 0
    )


def test_prompts_are_put_together_again_along_their_branches(store: Store) -> None:
    turns = [
        turn([1, 2], 3, 4),
        turn([1, 2, 3, 4, 5], 6, parent=0),
        turn([1, 2, 3, 4, 7], 8, parent=0),
        turn([1, 2, 3, 4, 7, 8, 9], 2**31 - 1, parent=2),
    ]
    reads = [[1, 2], [5], [7], [9]]
    for expected, (one, read) in enumerate(zip(turns, reads, strict=True)):
        key = store.write_now(lambda c, one=one, read=read: append_turn(c, trace("a"), one, read))
        assert (key.trace_id, key.number) == ("a", expected)
    found = store.read_now(lambda c: turns_of(c, "a"))
    assert [t.prompt for t in found] == [t.prompt for t in turns]
    assert [t.samples for t in found] == [t.samples for t in turns]
    assert [t.number for t in found] == [0, 1, 2, 3]
    assert [t.facts for t in found] == [FACTS] * 4


def test_a_turn_whose_trace_was_purged_begins_another(store: Store) -> None:
    key = store.write_now(lambda c: append_turn(c, trace("a"), turn([1, 2, 3], 4, parent=5), [3]))
    assert store.read_now(lambda c: get_trace(c, "a", "o")) is None
    (only,) = store.read_now(lambda c: turns_of(c, key.trace_id))
    assert (only.number, only.parent, only.prompt) == (0, None, [1, 2, 3])


def test_traces_are_their_owners(store: Store) -> None:
    store.write_now(lambda c: append_turn(c, trace("a", owner="alice"), turn([1], 2), [1]))
    assert store.read_now(lambda c: get_trace(c, "a", "bob")) is None
    assert store.read_now(lambda c: list_traces(c, "bob", limit=10)).total == 0
    assert store.read_now(lambda c: get_trace(c, "a", "alice")) is not None


@pytest.mark.parametrize(
    ("purge", "left"),
    [
        (Purge(before=0, max_turns=100), {"a1", "a2", "a3", "b1"}),
        (Purge(before=2.5, max_turns=100), {"a3"}),
        (Purge(before=0, max_turns=2), {"a2", "a3", "b1"}),
        (Purge(before=0, max_turns=0), set()),
    ],
)
def test_old_and_surplus_traces_go(store: Store, purge: Purge, left: set[str]) -> None:
    for name, owner, at in (("a1", "alice", 1.0), ("a2", "alice", 2.0), ("a3", "alice", 3.0), ("b1", "bob", 1.0)):
        one = trace(name, owner=owner, at=at)
        store.write_now(lambda c, one=one: append_turn(c, one, turn([1], 2), [1]))
    assert store.write_now(lambda c: purge_traces(c, purge)) == 4 - len(left)
    found = {
        t.trace_id for o in ("alice", "bob") for t in store.read_now(lambda c, o=o: list_traces(c, o, limit=9)).items
    }
    assert found == left
    for name in ("a1", "a2", "a3", "b1"):
        assert bool(store.read_now(lambda c, n=name: turns_of(c, n))) == (name in left)
