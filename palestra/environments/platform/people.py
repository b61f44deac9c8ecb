"""The people of a world: names, companies and addresses, for every app that has people in it.

No name is part of another (an Ana Lopez beside a Diana Lopez), so that a search for one finds one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import date, timedelta

import msgspec

_FIRST = """
Alice Andrei Beatriz Boris Carmen Chidi Clara Daniel Dmitri Elena Emeka Farah Felix Greta Hugo Ingrid Jonas Julia Kenji
Laila Lucas Marta Mei Milan Nadia Noah Olga Omar Paulo Priya Quentin Rosa Ruth Samir Sofia Tariq Tomas Uma Viktor
Wanda Yusuf Zoe
"""
_LAST = """
Abbott Almeida Bauer Becker Castillo Chen Costa Diaz Dubois Eriksen Fischer Fontana Garcia Gupta Haddad Horvath
Ivanov Jansen Johansson Keller Kowalski Lindgren Lopez Mbeki Moreau Nakamura Novak Okafor Olsen Patel Pereira Quinn
Rahman Romano Santos Schmidt Tanaka Torres Usman Vargas Weber Yilmaz Zhang
"""
FIRST_NAMES, LAST_NAMES = tuple(_FIRST.split()), tuple(_LAST.split())
COMPANIES = (
    "Brightwater",
    "Cedarline",
    "Fairmont Tools",
    "Halcyon Labs",
    "Kestrel Print",
    "Larkspur Foods",
    "Northgate",
    "Oakfield Supply",
    "Quarry Street",
    "Silverpine",
)


FIRST_DAY = date(2026, 3, 16)  # a Monday
WEEKS = 40


class Person(msgspec.Struct, frozen=True):
    name: str
    email: str
    company: str

    @property
    def first_name(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def handle(self) -> str:
        """The user name, for apps with one word for each person."""
        return self.name.lower().replace(" ", "_")


class Cast(msgspec.Struct, frozen=True):
    """The people that the apps of one world share, and its day."""

    colleagues: list[Person]
    """The first is the user for whom the agent works."""
    outsiders: list[Person]
    today: date

    @property
    def people(self) -> list[Person]:
        return self.colleagues + self.outsiders


def draw_cast(rng: random.Random, colleagues: int, outsiders: int) -> Cast:
    """Chooses people and a working day."""
    home, *others = rng.sample(COMPANIES, len(COMPANIES))
    people = draw_people(rng, [home] * colleagues + [rng.choice(others) for _ in range(outsiders)])
    today = FIRST_DAY + timedelta(weeks=rng.randrange(WEEKS), days=rng.randrange(5))
    return Cast(people[:colleagues], people[colleagues:], today)


def domain_of(company: str) -> str:
    """Returns a domain name that is reserved and never resolves."""
    return f"{company.lower().replace(' ', '-')}.example"


def draw_people(rng: random.Random, companies: Sequence[str]) -> list[Person]:
    """Returns one person for each given company, which may be repeated; no two share a name."""
    drawn = rng.sample(range(len(FIRST_NAMES) * len(LAST_NAMES)), len(companies))
    return [
        _person(*divmod(number, len(LAST_NAMES)), company) for number, company in zip(drawn, companies, strict=True)
    ]


def _person(first: int, last: int, company: str) -> Person:
    names = FIRST_NAMES[first], LAST_NAMES[last]
    return Person(" ".join(names), f"{'.'.join(names).lower()}@{domain_of(company)}", company)
