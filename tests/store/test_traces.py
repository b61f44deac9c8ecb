"""Turns come back with their whole prompts; traces are bounded in number and age, and are their owner's."""

from __future__ import annotations

import msgspec
import pytest

from palestra.episodes.board import EpisodeBoard
from palestra.store import Store
from palestra.store.queries.episodes import save_changes
from palestra.store.queries.traces import (
    KeptAnswer,
    Purge,
    Trace,
    TraceTurn,
    TurnFacts,
    TurnKey,
    TurnSample,
    answers_of,
    append_turn,
    get_trace,
    list_traces,
    note_answered,
    note_unanswered,
    purge_traces,
    traces_named,
    traces_of,
    turns_of,
    unanswered_of,
)
from palestra.types.episode_rows import EpisodeRow, Gone
from palestra.types.episodes import NewGroup
from palestra.types.rollouts import Task

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


def turn(prompt: list[int], *tokens: int, parent: int | None = None) -> TraceTurn:
    sample = TurnSample(tokens=list(tokens), logprobs=[-0.5] * len(tokens), stop_reason="stop")
    return TraceTurn(
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


def test_turns_without_an_answer_are_known_until_they_have_one_or_are_purged(store: Store) -> None:
    def keep(name: str) -> TurnKey:
        return store.write_now(lambda c: append_turn(c, trace(name), turn([1], 2), [1]))

    def unanswered() -> set[TurnKey]:
        return store.read_now(lambda c: unanswered_of(c, [f"no-{n}" for n in range(600)] + ["a", "b"]))

    keys = [keep("a"), keep("a"), keep("b")]
    store.write_now(lambda c: note_unanswered(c, keys))
    assert unanswered() == set(keys)
    for _ in range(2):
        store.write_now(lambda c: note_answered(c, keys[1:2]))
        assert unanswered() == {keys[0], keys[2]}
    store.write_now(lambda c: purge_traces(c, Purge(before=9.0, max_turns=9)))
    assert unanswered() == set()


def test_a_turn_whose_trace_was_purged_begins_another(store: Store) -> None:
    key = store.write_now(lambda c: append_turn(c, trace("a"), turn([1, 2, 3], 4, parent=5), [3]))
    assert store.read_now(lambda c: get_trace(c, "a", "o")) is None
    (only,) = store.read_now(lambda c: turns_of(c, key.trace_id))
    assert (only.number, only.parent, only.prompt) == (0, None, [1, 2, 3])


def test_answers_are_found_by_their_names_with_all_it_takes_to_go_on(store: Store) -> None:
    def named(name: bytes, **thoughts: str) -> KeptAnswer:
        return KeptAnswer(name=name, thoughts={int(place[1:]): text for place, text in thoughts.items()})

    two = msgspec.structs.replace(turn([1], 2), samples=[*turn([1], 2).samples, *turn([1], 3).samples])
    later = msgspec.structs.replace(FACTS, drift=True, begun=2)
    child = msgspec.structs.replace(turn([1, 3, 4], 5, parent=0), parent_sample=1, facts=later)
    store.write_now(lambda c: append_turn(c, trace("a"), two, [1], [named(b"x"), named(b"y", _1="hm")]))
    store.write_now(lambda c: append_turn(c, trace("a", at=2.0), child, [4], [named(b"z")]))
    store.write_now(lambda c: append_turn(c, trace("b", at=9.0), turn([1], 2), [1], [named(b"x")]))
    store.write_now(lambda c: append_turn(c, trace("c", at=5.0), turn([1], 2), [1], [named(b"x")]))
    store.write_now(lambda c: append_turn(c, trace("unnamed"), turn([1], 2), [1]))
    found = store.read_now(lambda c: traces_named(c, [b"z", b"other", b"x"], most=2))
    assert found == [(b"z", "a"), (b"x", "b"), (b"x", "c")]
    first, second, third = store.read_now(lambda c: answers_of(c, "a"))
    assert [(a.number, a.sample, list(a.tokens)) for a in (first, second, third)] == [
        (0, 0, [2]),
        (0, 1, [3]),
        (1, 0, [5]),
    ]
    assert (second.answer, second.parent, second.drift) == (named(b"y", _1="hm"), None, False)
    assert (third.parent, third.parent_sample, list(third.read)) == (0, 1, [4])
    assert (third.drift, third.begun, third.stop_reason) == (True, 2, "stop")
    assert store.read_now(lambda c: answers_of(c, "unnamed")) == []
    store.write_now(lambda c: purge_traces(c, Purge(before=100.0, max_turns=100)))
    assert store.read_now(lambda c: traces_named(c, [b"x", b"z"], most=2)) == []


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


def test_traces_of_an_attempt_are_found_and_stay_until_its_episode_is_committed(tables_store: Store) -> None:
    def put(name: str, origin: str | None, at: float) -> None:
        one = msgspec.structs.replace(trace(name, at=at), origin=origin)
        tables_store.write_now(lambda c: append_turn(c, one, turn([1], 2), [1]))

    put("late", "e-1#2", 3.0)
    put("early", "e-1#2", 2.0)
    put("lost", "e-1#1", 1.0)
    put("free", None, 1.0)
    found = tables_store.read_now(lambda c: traces_of(c, "e-1#2", "o"))
    assert [(one.trace_id, one.origin) for one in found] == [("early", "e-1#2"), ("late", "e-1#2")]
    assert tables_store.read_now(lambda c: traces_of(c, "e-1#2", "p")) == []
    board = EpisodeBoard()
    board.put_run("o", "r", 0.0)
    task = Task(id="t", environment="e", prompt=[])
    board.register("o", "r", [NewGroup(group_id="g", task=task, size=1)], 0.0)
    (row,) = [one for one in board.take_changes() if isinstance(one, EpisodeRow)]
    kept = msgspec.structs.replace(row, episode_id="e-1")
    tables_store.write_now(lambda c: save_changes(c, [kept]))
    assert tables_store.write_now(lambda c: purge_traces(c, Purge(before=100.0, max_turns=100))) == 1
    assert tables_store.read_now(lambda c: get_trace(c, "free", "o")) is None
    tables_store.write_now(lambda c: save_changes(c, [Gone(EpisodeRow, "e-1")]))
    assert tables_store.write_now(lambda c: purge_traces(c, Purge(before=100.0, max_turns=100))) == 3
