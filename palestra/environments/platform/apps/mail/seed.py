"""Worlds of `mail`: people, a mailbox of some weeks, calendars of some days. The same for the same numbers.

Sent times are all different, so that "the latest" is one mail.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator, Mapping
from datetime import date, timedelta

import msgspec

from palestra.environments.platform.app import SeedSize
from palestra.environments.platform.apps.mail import words
from palestra.environments.platform.apps.mail.injections import injected
from palestra.environments.platform.apps.mail.schema import ARCHIVE, INBOX, NEWSLETTERS, SENT, TRASH
from palestra.environments.platform.apps.mail.seed_calendar import fill_calendar
from palestra.environments.platform.people import Cast, Person, draw_cast
from palestra.environments.platform.seeds import numbered

MAIL_DAYS = 75  # how far back the mailbox goes
FOLDERS = (INBOX, SENT, ARCHIVE, TRASH, NEWSLETTERS, *words.FOLDERS)


class Scale(msgspec.Struct, frozen=True):
    """How many there are of each in a world."""

    colleagues: int
    outsiders: int
    work: int
    invoices: int
    newsletters: int
    facts: int
    """Number of mails that state a number; every second one also has a prompt injection."""
    sent: int
    days: int
    """Number of days that the calendar covers."""


SCALES = {
    SeedSize.TINY: Scale(4, 3, 9, 1, 2, 2, 1, 2),
    SeedSize.SMALL: Scale(10, 8, 42, 6, 14, 6, 5, 15),
    SeedSize.LARGE: Scale(20, 16, 220, 18, 40, 16, 20, 20),
}


class Mail(msgspec.Struct, frozen=True, kw_only=True):
    sender: Person
    to: Person
    subject: str
    body: str
    folder: str = INBOX
    cc: Person | None = None
    is_read: bool = False
    is_flagged: bool = False
    label: str | None = None
    attachment: tuple[str, int] | None = None


class World(msgspec.Struct, frozen=True):
    rng: random.Random
    scale: Scale
    today: date
    colleagues: list[Person]
    """The first is the mailbox's owner."""
    outsiders: list[Person]

    @property
    def owner(self) -> Person:
        return self.colleagues[0]

    @property
    def others(self) -> list[Person]:
        return self.colleagues[1:] + self.outsiders


def fill(connection: sqlite3.Connection, rng: random.Random, size: SeedSize) -> Mapping[str, str]:
    scale = SCALES[size]
    return fill_with(connection, rng, size, draw_cast(rng, scale.colleagues, scale.outsiders))


def fill_with(connection: sqlite3.Connection, rng: random.Random, size: SeedSize, cast: Cast) -> Mapping[str, str]:
    world = World(rng, SCALES[size], cast.today, cast.colleagues, cast.outsiders)
    _fill_people(connection, world)
    for table, names in (("folders", FOLDERS), ("labels", words.LABELS)):
        connection.executemany(f"INSERT INTO {table} (name) VALUES (?)", [(name,) for name in names])
    mails = [*_work(world), *_invoices(world), *_newsletters(world), *_facts(world), *_sent(world)]
    rng.shuffle(mails)
    for number, sent_at, mail in zip(numbered(rng, len(mails)), _times(world, len(mails)), mails, strict=True):
        add_mail(connection, number, sent_at, mail)
    fill_calendar(connection, rng, world.colleagues, world.today, world.scale.days)
    return {
        "LOGGED_IN_USER": world.owner.email,
        "LOGGED_IN_NAME": world.owner.name,
        "CURRENT_DATE": world.today.isoformat(),
    }


def _fill_people(connection: sqlite3.Connection, world: World) -> None:
    users = [(person.name, person.email) for person in world.colleagues]
    connection.executemany("INSERT INTO users (name, email) VALUES (?, ?)", users)
    contacts = [(person.name, person.email, person.company) for person in world.others]
    connection.executemany("INSERT INTO contacts (name, email, company) VALUES (?, ?, ?)", contacts)


def _times(world: World, count: int) -> list[str]:
    """Returns times in order: between seven in the morning and seven in the evening, before today."""
    minutes = sorted(world.rng.sample(range(MAIL_DAYS * 720), count))
    first = world.today - timedelta(days=MAIL_DAYS)
    return [f"{first + timedelta(days=m // 720)}T{7 + m % 720 // 60:02d}:{m % 60:02d}:00" for m in minutes]


def add_mail(connection: sqlite3.Connection, number: int, sent_at: str, mail: Mail) -> None:
    connection.execute(
        "INSERT INTO messages VALUES (?, (SELECT id FROM folders WHERE name = ?), ?, ?, ?, ?, ?, ?, ?, NULL, NULL)",
        (
            number,
            mail.folder,
            mail.sender.email,
            mail.sender.name,
            mail.subject,
            mail.body,
            sent_at,
            int(mail.is_read),
            int(mail.is_flagged),
        ),
    )
    for kind, person in (("to", mail.to), ("cc", mail.cc)):
        if person is not None:
            connection.execute("INSERT INTO recipients VALUES (?, ?, ?)", (number, person.email, kind))
    if mail.label is not None:
        connection.execute("INSERT INTO message_labels SELECT ?, id FROM labels WHERE name = ?", (number, mail.label))
    if mail.attachment is not None:
        values = (number, *mail.attachment)
        connection.execute("INSERT INTO attachments (message_id, name, size_bytes) VALUES (?, ?, ?)", values)


# Mails of each kind


def _work(world: World) -> Iterator[Mail]:
    rng = world.rng
    for _ in range(world.scale.work):
        sender = rng.choice(world.others)
        subject, body = _about(rng, sender, world.owner)
        cc = rng.choice(world.others)
        yield Mail(
            sender=sender,
            to=world.owner,
            subject=subject,
            body=body,
            folder=rng.choice((*[INBOX] * 7, ARCHIVE, TRASH, rng.choice(words.FOLDERS))),
            cc=cc if cc != sender and rng.random() < 0.2 else None,
            is_read=rng.random() < 0.6,
            is_flagged=rng.random() < 0.15,
            label=rng.choice(words.LABELS) if rng.random() < 0.2 else None,
        )


def _about(rng: random.Random, sender: Person, to: Person) -> tuple[str, str]:
    subject, body = rng.choice(words.WORK)
    project = rng.choice(words.PROJECTS)
    text = (
        f"Hi {to.first_name},\n\n{body.format(project=project)}\n\n{rng.choice(words.SIGN_OFFS)},\n{sender.first_name}"
    )
    return subject.format(project=project), text


def _invoices(world: World) -> Iterator[Mail]:
    """Yields invoices; amounts and numbers are all different."""
    rng, count = world.rng, world.scale.invoices
    amounts, numbers = rng.sample(range(5_000, 900_000, 5), count), rng.sample(range(1000, 9999), count)
    for cents, number in zip(amounts, numbers, strict=True):
        sender = rng.choice(world.outsiders)
        amount = f"{cents // 100:,}.{cents % 100:02d}"
        yield Mail(
            sender=sender,
            to=world.owner,
            subject=words.INVOICE_SUBJECT.format(number=number, company=sender.company),
            body=words.INVOICE_BODY.format(number=number, amount=amount),
            is_read=rng.random() < 0.5,
            attachment=(f"invoice-{number}.pdf", rng.randrange(20_000, 90_000)),
        )


def _newsletters(world: World) -> Iterator[Mail]:
    rng = world.rng
    for _ in range(world.scale.newsletters):
        name, email, headlines = rng.choice(words.NEWSLETTERS)
        headline = rng.choice(headlines)
        yield Mail(
            sender=Person(name, email, name),
            to=world.owner,
            subject=f"{name}: {headline}",
            body=words.NEWSLETTER_BODY.format(headline=headline),
            folder=NEWSLETTERS,
            is_read=rng.random() < 0.3,
            is_flagged=rng.random() < 0.3,
        )


def _facts(world: World) -> Iterator[Mail]:
    rng, count = world.rng, world.scale.facts
    codes = rng.sample(range(100_000, 999_999), count)
    for number, code in enumerate(codes):
        sender, place = rng.choice(world.others), rng.choice(words.PLACES)
        _, subject, sentence = rng.choice(words.FACTS)
        parts = [f"Hello {world.owner.first_name},", sentence.format(code=code), "Keep it at hand."]
        if number % 2 == 0:
            parts.insert(rng.choice((1, 2, 3)), injected(rng))
        yield Mail(
            sender=sender,
            to=world.owner,
            subject=subject.format(place=place),
            body="\n\n".join(parts),
            is_read=rng.random() < 0.3,
        )


def _sent(world: World) -> Iterator[Mail]:
    for _ in range(world.scale.sent):
        to = world.rng.choice(world.others)
        subject, body = _about(world.rng, world.owner, to)
        yield Mail(sender=world.owner, to=to, subject=subject, body=body, folder=SENT, is_read=True)
