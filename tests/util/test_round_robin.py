"""RoundRobin go to owners first: what one of them has waiting costs the others nothing."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from palestra.util.round_robin import RoundRobin
from tests.properties import examples

OWNERS, NAMES = st.sampled_from("abc"), st.sampled_from("12345")


def take(order: RoundRobin[str]) -> str:
    owner, name, item = order.first()
    order.owner_served(owner)
    order.served(owner, name)
    return item


@examples(200)
@given(st.lists(st.tuples(OWNERS, NAMES), min_size=1), st.lists(st.tuples(st.booleans(), OWNERS, NAMES)))
def test_every_owner_that_waits_has_a_turn_in_each_round_and_every_name_in_its_own(
    first: list[tuple[str, str]], changes: list[tuple[bool, str, str]]
) -> None:
    order, waiting = RoundRobin[str](), set[tuple[str, str]]()
    for is_more, owner, name in [(True, *one) for one in first] + changes:
        if is_more:
            order.add(owner, name, owner + name)
            waiting.add((owner, name))
        else:
            order.remove(owner, name)
            waiting.discard((owner, name))
        if order:
            take(order)  # order between arrivals, so that the order is any
    assert len(order) == len(waiting) == len(list(order))
    assert sorted(order) == sorted(owner + name for owner, name in waiting)
    names = Counter(owner for owner, _ in waiting)
    if waiting:
        longest = max(names.values())
        had = [take(order) for _ in range(len(names) * longest)]
        assert Counter(item[0] for item in had) == dict.fromkeys(names, longest)
        for owner, count in names.items():
            theirs = [item for item in had if item[0] == owner]
            assert len(set(theirs[:count])) == count


def test_an_iteration_is_the_order_in_which_turns_come() -> None:
    order = RoundRobin[str]()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        order.add(item[0], item[1], item)
    assert list(order) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert [take(order) for _ in range(6)] == ["a1", "b1", "c1", "a2", "b1", "c2"]


def test_what_waits_already_keeps_its_place() -> None:
    order = RoundRobin[str]()
    for name in ("1", "2", "1"):
        order.add("a", name, name)
    assert list(order) == ["1", "2"]
