"""A conversation stays where its tokens are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from palestra.server.replicas.affinity import BLOCK, Affinity

tokens = st.lists(st.integers(0, 3), max_size=3 * BLOCK).map(tuple)


@given(st.lists(st.tuples(tokens, st.integers(0, 2)), max_size=12), tokens)
def test_the_longest_sequence_that_a_prompt_begins_with_decides(noted, prompt):
    affinity, homes = Affinity(), {}
    for sequence, server in noted:
        affinity.note(sequence, server)
        homes[sequence] = server
    begins = [sequence for sequence in homes if prompt[: len(sequence)] == sequence]
    assert affinity.home(prompt) == (homes[max(begins, key=len)] if begins else None)


@given(tokens, st.lists(tokens, max_size=6))
def test_a_conversation_that_grows_stays(prompt, turns):
    affinity, said = Affinity(), prompt
    affinity.note(said, 1)
    for turn in turns:
        said += turn
        assert affinity.home(said) == 1
        affinity.note(said, 1)


def test_a_shared_beginning_is_no_conversation():
    affinity, system = Affinity(), tuple(range(100))
    affinity.note((*system, 1, 2, 3), 0)
    assert affinity.home((*system, 4, 5, 6)) is None


def test_the_least_recently_used_ones_are_forgotten():
    affinity = Affinity(max_ends=2)
    for n in (1, 2):
        affinity.note((n,) * 20, n)
    assert affinity.home((1,) * 20) == 1
    affinity.note((3,) * 20, 3)
    assert [affinity.home((n,) * 20) for n in (1, 2, 3)] == [1, None, 3]
