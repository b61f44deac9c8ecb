"""One owner may fill the room, and cannot take it from the others."""

from __future__ import annotations

from collections import Counter
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from palestra.server.core.room import Room


@given(st.integers(1, 50), st.lists(st.sampled_from("abcd")))
def test_nobody_is_shut_out_and_what_waits_is_bounded(limit: int, comers: list[str]):
    room, inside = Room(limit), Counter[str]()
    for owner in comers:
        is_let_in = room.has_some_for(owner)
        if is_let_in:
            room.take(owner)
            inside[owner] += 1
        assert is_let_in or inside[owner] >= limit / len({*inside, owner})
        assert inside.total() <= sum(ceil(limit / n) for n in range(1, len(inside) + 1))
    for owner, size in inside.items():
        room.give_back(owner, size)
    assert room.has_some_for("a")


def test_a_lone_owner_may_have_all_of_it_and_no_more():
    room = Room(3)
    for _ in range(3):
        assert room.has_some_for("a")
        room.take("a")
    assert not room.has_some_for("a")
    assert room.has_some_for("b")
    room.give_back("a")
    assert room.has_some_for("a")
