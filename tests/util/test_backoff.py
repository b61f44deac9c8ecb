"""Pauses between tries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import islice

import pytest

from palestra.util.backoff import Backoff, retry_after_s


def test_pauses_double_up_to_the_longest_and_stay_finite():
    assert list(islice(Backoff(0.5, 5.0).pauses(), 6)) == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert Backoff(0.5, 5.0).after(0) == 0.5
    assert Backoff(1.0, 1e30).after(10**6) == 2.0**60


def test_a_spread_makes_pauses_shorter_by_at_most_that_share():
    found = {Backoff(2.0, 8.0, spread=0.5).after(2) for _ in range(100)}
    assert 2.0 <= min(found) < max(found) <= 4.0


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 0), ("", 0), ("2.5", 2.5), ("-1", 0), ("nan", 0), ("inf", 60), ("3600", 60), ("soon", 0)],
)
def test_a_server_may_ask_for_a_pause(header, seconds):
    assert retry_after_s(header) == seconds


def test_a_server_may_name_a_date():
    then = datetime.now(UTC) + timedelta(seconds=20)
    assert 15 < retry_after_s(format_datetime(then, usegmt=True)) <= 20
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0
