"""Worlds: the same from the same number, sound in themselves, of three sizes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from palestra.environments.platform import SeedSize
from palestra.environments.platform.app import SeedDatabase
from palestra.environments.platform.apps.mail.injections import INJECTIONS, injection_in
from palestra.environments.platform.seeds import seed_of
from tests.environments.platform.apps.mail.conftest import MAIL

SIZES = list(SeedSize)
DIGESTS = """
from palestra.environments.platform import APPS, SeedSize
from palestra.environments.platform.seeds import seed_of
print(*(seed_of(APPS["mail"], 5, size).digest for size in SeedSize))
"""


def worlds(size: SeedSize) -> list[SeedDatabase]:
    return [seed_of(MAIL, number, size) for number in range(4)]


def test_another_process_makes_the_same_world():
    """Whatever it hashes strings by."""
    env = os.environ | {"PYTHONHASHSEED": "77"}
    response = subprocess.run([sys.executable, "-c", DIGESTS], env=env, capture_output=True, text=True, check=True)
    assert response.stdout.split() == [seed_of(MAIL, 5, size).digest for size in SeedSize]


@pytest.mark.parametrize("size", SIZES)
def test_mails_have_one_order_and_lie_before_today(size: SeedSize):
    for seed in worlds(size):
        mails = seed.rows("SELECT id, sent_at FROM messages ORDER BY id")
        times = [mail["sent_at"] for mail in mails]
        assert times == sorted(set(times))
        assert times[-1] < seed.variables["CURRENT_DATE"]
        ids = [mail["id"] for mail in mails]
        assert ids == list(range(ids[0], ids[0] + len(ids)))


@pytest.mark.parametrize("size", SIZES)
def test_rows_belong_to_rows(size: SeedSize):
    for seed in worlds(size):
        seed.connection.execute("PRAGMA foreign_keys = 1")
        assert seed.rows("PRAGMA foreign_key_check") == []


@pytest.mark.parametrize("size", SIZES)
def test_people_can_be_told_apart(size: SeedSize):
    for seed in worlds(size):
        names = [row["name"] for row in seed.rows("SELECT name FROM contacts")]
        me = seed.variables["LOGGED_IN_NAME"]
        assert len({me, *names}) == len(names) + 1
        assert seed.rows("SELECT 1 FROM users WHERE name = ? AND email = ?", me, seed.variables["LOGGED_IN_USER"])


@pytest.mark.parametrize("size", SIZES)
def test_mails_that_talk_say_one_thing_and_a_fact(size: SeedSize):
    for seed in worlds(size):
        talking = [r["body"] for r in seed.rows("SELECT body FROM messages") if injection_in(r["body"])]
        assert talking
        for body in talking:
            assert sum(one.request in body for one in INJECTIONS) == 1
            assert " is " in body


def test_sizes_are_sizes():
    counts = [seed_of(MAIL, 0, size).rows("SELECT count(*) AS n FROM messages")[0]["n"] for size in SIZES]
    assert counts == sorted(counts)
    assert counts[0] < 20
    assert counts[-1] > 300
