"""Worlds of `returns`: customers of a shop with their orders, and what each of them is going to say."""

from __future__ import annotations

import random
import re
import sqlite3
from collections.abc import Mapping
from datetime import date, timedelta
from importlib.resources import files

from palestra.environments.platform import scripted_user
from palestra.environments.platform.app import SeedSize
from palestra.environments.platform.changes import Row
from palestra.environments.platform.people import Person, draw_cast
from palestra.environments.platform.scripted_user import FactWords, UserScript, add_script
from palestra.environments.platform.seeds import numbered

PACKAGE = "palestra.environments.platform.apps.returns"
SCHEMA = (
    """
CREATE TABLE customers (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, email TEXT NOT NULL UNIQUE, postcode TEXT NOT NULL, tier TEXT NOT NULL
);
CREATE TABLE orders (
    id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customers (id), delivered_on TEXT NOT NULL
);
CREATE TABLE items (
    id INTEGER PRIMARY KEY, order_id INTEGER NOT NULL REFERENCES orders (id), name TEXT NOT NULL, kind TEXT NOT NULL,
    cents INTEGER NOT NULL, state TEXT NOT NULL
);
CREATE TABLE refunds (
    id INTEGER PRIMARY KEY AUTOINCREMENT, item_id INTEGER NOT NULL, reason TEXT NOT NULL, refund_to TEXT NOT NULL,
    cents INTEGER NOT NULL
);
CREATE TABLE transfers (id INTEGER PRIMARY KEY AUTOINCREMENT, customer_id INTEGER NOT NULL, reason TEXT NOT NULL);
"""
    + scripted_user.SCHEMA
)
FIXED = {"customers", "orders"}

GOODS = {
    "electronics": ("headphones", "radio", "keyboard", "projector", "speaker", "printer"),
    "home": ("lamp", "kettle", "blanket", "teapot", "clock", "mirror", "rug", "stool"),
    "hygiene": ("hair brush", "bath sponge", "make-up set", "toothbrush"),
    "clearance": ("garden chair", "winter coat", "tent", "suitcase"),
}
FREE_DAYS, GOLD_DAYS = 30, 60
FEE_PERCENT = {"electronics": 15}
PLAIN_FEE_PERCENT = 10
MOST_CENTS = 30_000
"""R6: a larger refund is for a human."""
REASONS = {
    "broken": ("It came broken.", "It does not work; it was broken when I unpacked it."),
    "wrong_item": ("It is not what I ordered, somebody packed the wrong item.", "You sent me the wrong item."),
    "changed_mind": ("I changed my mind.", "Nothing is wrong with it, I just do not need it any more."),
}
METHODS = {"card": ("Back to my card, please.", "To the card."), "voucher": ("As a voucher.", "A voucher is fine.")}
OPENINGS = (
    "Hello, I want to send something back.",
    "Hi! I would like to return a thing that I bought from you.",
    "Good morning. I need to return an item.",
    "I have something here that I do not want to keep.",
    "Hello there, how do returns work with you?",
)
KINDS = (
    "mind",
    "voucher",
    "broken",
    "late",
    "late_gold",
    "gold",
    "excluded",
    "excluded_broken",
    "stranger",
    "dear",
    "declined",
)
"""The kinds of cases; a world has some of each."""
CALLERS = {SeedSize.TINY: 1, SeedSize.SMALL: 2, SeedSize.LARGE: 4}  # of each kind


FACTS: Mapping[str, FactWords] = {
    "email": FactWords(
        re.compile(r"\be-?mail\b", re.IGNORECASE),
        ("It is {value}.", "My mail address is {value}.", "{value}", "You can find me under {value}."),
    ),
    "postcode": FactWords(
        re.compile(r"\b(post ?code|postal code|zip( code)?)\b", re.IGNORECASE),
        ("The postcode is {value}.", "{value} is my postcode.", "I live in {value}."),
    ),
    "item": FactWords(
        re.compile(r"\b(item|product|article|thing|which order|what order|order number|return\W*\?)", re.IGNORECASE),
        ("It is the {value}.", "The {value}.", "I mean the {value} that you sent me."),
    ),
    "reason": FactWords(re.compile(r"\b(reason|why|wrong with|problem|matter)\b", re.IGNORECASE), ("{value}",)),
    "refund_to": FactWords(
        re.compile(r"\b(card|voucher|refund(ed)? to|where (should|shall))\b", re.IGNORECASE), ("{value}",)
    ),
}  # fmt: skip


def policy() -> str:
    return files(PACKAGE).joinpath("policy.md").read_text(encoding="utf-8").strip()


def refund_of(cents: int, kind: str, reason: str, refund_to: str) -> int:
    """Returns what the policy pays back for an item."""
    if reason != "changed_mind" or refund_to == "voucher":
        return cents
    percent = FEE_PERCENT.get(kind, PLAIN_FEE_PERCENT)
    return cents * (100 - percent) // 100


def fill(db: sqlite3.Connection, rng: random.Random, size: SeedSize) -> Mapping[str, str]:
    callers = [kind for kind in KINDS for _ in range(CALLERS[size])]
    rng.shuffle(callers)
    cast = draw_cast(rng, 1, len(callers))
    numbers = iter(numbered(rng, 20 * len(callers)))
    for number, (kind, person) in enumerate(zip(callers, cast.outsiders, strict=True), 1):
        _Customer(db, rng, number, person, cast.today, numbers).fill(kind)
    agent = cast.colleagues[0]
    return {"LOGGED_IN_USER": agent.email, "LOGGED_IN_NAME": agent.name, "CURRENT_DATE": cast.today.isoformat()}


class _Customer:
    def __init__(
        self, db: sqlite3.Connection, rng: random.Random, number: int, person: Person, today: date, ids
    ) -> None:
        self._db, self._rng, self._number, self._person, self._today, self._ids = db, rng, number, person, today, ids

    def fill(self, kind: str) -> None:
        rng = self._rng
        postcode = f"{rng.randrange(10_000, 99_999)}"
        tier = "gold" if kind in ("gold", "late_gold") else "plain"
        row = (self._number, self._person.name, self._person.email, postcode, tier)
        self._db.execute("INSERT INTO customers VALUES (?, ?, ?, ?, ?)", row)
        kinds = (
            [rng.choice(("electronics", "home"))]
            if kind not in ("excluded", "excluded_broken")
            else ["hygiene", "clearance"]
        )
        wanted = rng.choice(kinds)
        names = rng.sample([(name, one) for one, names in GOODS.items() for name in names], 6)
        name = rng.choice(GOODS[wanted])
        cents = rng.randrange(36_000, 90_000) if kind == "dear" else rng.randrange(900, 28_000)
        days = {"late": (31, 90), "gold": (31, 60), "late_gold": (61, 120), "broken": (2, 90)}.get(kind, (2, 30))
        others = [one for one in names if one[0] != name]
        item = self._order(rng.randint(*days), [(name, wanted, cents), *self._priced(others[:1])])
        for other in others[1 : 1 + rng.randint(1, 2)]:
            self._order(rng.randint(2, 100), self._priced([other]))
        self._script(kind, {"id": item, "name": name, "kind": wanted, "cents": cents}, postcode)

    def _priced(self, goods: list[tuple[str, str]]) -> list[tuple[str, str, int]]:
        return [(name, kind, self._rng.randrange(900, 28_000)) for name, kind in goods]

    def _order(self, days_ago: int, items: list[tuple[str, str, int]]) -> int:
        """Makes an order and returns the id of its first item."""
        order = next(self._ids)
        delivered = (self._today - timedelta(days=days_ago)).isoformat()
        self._db.execute("INSERT INTO orders VALUES (?, ?, ?)", (order, self._number, delivered))
        rows = [(next(self._ids), order, name, kind, cents, "delivered") for name, kind, cents in items]
        first = rows[0][0]
        self._rng.shuffle(rows)
        self._db.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", rows)
        return first

    def _script(self, kind: str, item: Row, postcode: str) -> None:
        rng = self._rng
        reason = rng.choice(("broken", "wrong_item")) if kind in ("broken", "excluded_broken") else "changed_mind"
        refund_to = "voucher" if kind == "voucher" else "card"
        cents = refund_of(item["cents"], item["kind"], reason, refund_to)
        other = str((int(postcode) - 10_000 + rng.randrange(1, 80_000)) % 90_000 + 10_000)
        script = UserScript(
            kind=kind,
            name=self._person.name,
            opening=rng.choice(OPENINGS),
            facts={
                "email": self._person.email,
                "postcode": other if kind == "stranger" else postcode,
                "item": item["name"],
                "reason": rng.choice(REASONS[reason]),
                "refund_to": rng.choice(METHODS[refund_to]),
            },
            patience=rng.randint(9, 14),
            least_cents=item["cents"] if kind == "declined" else None,
            case={**item, "customer": self._number, "reason": reason, "refund_to": refund_to, "refund": cents},
        )
        add_script(self._db, self._number, script)
