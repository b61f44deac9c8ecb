"""Pauses between tries."""

from __future__ import annotations

from itertools import islice

from palestra.util.backoff import Backoff


def test_pauses_double_up_to_the_longest_and_stay_finite():
    assert list(islice(Backoff(0.5, 5.0).pauses(), 6)) == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert Backoff(0.5, 5.0).after(0) == 0.5
    assert Backoff(1.0, 1e30).after(10**6) == 2.0**60


def test_a_spread_makes_pauses_shorter_by_at_most_that_share():
    found = {Backoff(2.0, 8.0, spread=0.5).after(2) for _ in range(100)}
    assert 2.0 <= min(found) < max(found) <= 4.0
