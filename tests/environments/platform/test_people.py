"""People of worlds: no name is found inside another."""

from __future__ import annotations

import random

from palestra.environments.platform.people import COMPANIES, FIRST_NAMES, LAST_NAMES, draw_people


def test_no_name_is_part_of_another():
    assert not [(a, b) for a in FIRST_NAMES for b in FIRST_NAMES if a != b and b.lower().endswith(a.lower())]
    assert not [(a, b) for a in LAST_NAMES for b in LAST_NAMES if a != b and b.lower().startswith(a.lower())]


def test_people_are_drawn_once_each_and_the_same_again():
    places = list(COMPANIES) * 5
    people = draw_people(random.Random(1), places)
    assert [person.company for person in people] == places
    assert len({person.name for person in people}) == len({person.email for person in people}) == len(places)
    assert people == draw_people(random.Random(1), places)
    assert all(person.email.endswith(".example") for person in people)
