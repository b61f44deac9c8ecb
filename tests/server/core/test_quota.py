"""One owner may fill the room, and cannot take it from the others."""

from __future__ import annotations

from collections import Counter
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from palestra.server.core.owners.quotas import FairQuota


@given(st.integers(1, 50), st.lists(st.sampled_from("abcd")))
def test_nobody_is_shut_out_and_what_waits_is_bounded(limit: int, comers: list[str]):
    room, inside = FairQuota(limit), Counter[str]()
    for owner in comers:
        is_let_in = room.admits(owner)
        if is_let_in:
            room.acquire(owner)
            inside[owner] += 1
        assert is_let_in or inside[owner] >= limit / len({*inside, owner})
        assert inside.total() <= sum(ceil(limit / n) for n in range(1, len(inside) + 1))
    for owner, size in inside.items():
        room.release(owner, size)
    assert room.admits("a")


def test_a_lone_owner_may_have_all_of_it_and_no_more():
    room = FairQuota(3)
    for _ in range(3):
        assert room.admits("a")
        room.acquire("a")
    assert not room.admits("a")
    assert room.admits("b")
    room.release("a")
    assert room.admits("a")
