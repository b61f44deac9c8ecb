"""Expectations of the tasks of `mail`, and their look-ups in a seed database. Every column of a new row is named: ids
are given in order, so that of the first new mail is known; only the time of sending is free."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from palestra.environments.platform.app import SeedDatabase
from palestra.environments.platform.apps.mail.schema import SENT, TRASH
from palestra.environments.platform.changes import Row
from palestra.environments.platform.expectations import FREE, Expected, FreeText, InsertedRow, UpdatedRow

FROM = "FROM messages m JOIN folders f ON f.id = m.folder_id"


def mails(seed: SeedDatabase, where: str, *args: object) -> list[Row]:
    """Returns mails, newest first, as `search_messages` does."""
    return seed.rows(f"SELECT m.*, f.name AS folder {FROM} WHERE {where} ORDER BY m.sent_at DESC, m.id DESC", *args)


def any_one(rng: random.Random, found: Sequence[Any]) -> Any:
    """Returns one of them; None if there is none."""
    return rng.choice(found) if found else None


def any_contact(rng: random.Random, seed: SeedDatabase) -> Row:
    return rng.choice(seed.rows("SELECT name, email FROM contacts ORDER BY id"))


def colleagues(seed: SeedDatabase) -> list[Row]:
    """Returns the people with a calendar, without the owner."""
    me = seed.variables["LOGGED_IN_USER"]
    return seed.rows("SELECT name, email FROM users WHERE email != ? ORDER BY id", me)


def id_of(seed: SeedDatabase, table: str, name: str) -> int:
    return seed.rows(f"SELECT id FROM {table} WHERE name = ?", name)[0]["id"]


def next_id(seed: SeedDatabase, table: str) -> int:
    return seed.rows(f"SELECT max(id) + 1 AS following FROM {table}")[0]["following"] or 1


def moved(seed: SeedDatabase, ids: Sequence[int], folder: str) -> list[Expected]:
    return [UpdatedRow("messages", (number,), {"folder_id": id_of(seed, "folders", folder)}) for number in ids]


def deleted(seed: SeedDatabase, ids: Sequence[int]) -> list[Expected]:
    return moved(seed, ids, TRASH)


def labelled(seed: SeedDatabase, ids: Sequence[int], label: str) -> list[Expected]:
    label_id = id_of(seed, "labels", label)
    return [_whole("message_labels", message_id=number, label_id=label_id) for number in ids]


def sent(
    seed: SeedDatabase,
    to: Sequence[str],
    subject: object,
    body: FreeText,
    *,
    reply_to_id: int | None = None,
    forward_of_id: int | None = None,
) -> list[Expected]:
    """Expects one mail to these recipients and nobody else."""
    made = next_id(seed, "messages")
    mail = _whole(
        "messages",
        id=made,
        folder_id=id_of(seed, "folders", SENT),
        sender=seed.variables["LOGGED_IN_USER"],
        sender_name=seed.variables["LOGGED_IN_NAME"],
        subject=subject,
        body=body,
        sent_at=FREE,
        is_read=1,
        is_flagged=0,
        reply_to_id=reply_to_id,
        forward_of_id=forward_of_id,
    )
    return [mail, *(_whole("recipients", message_id=made, email=email, kind="to") for email in to)]


def attached_again(seed: SeedDatabase, message_id: int) -> list[Expected]:
    """Expects copies of a mail's attachments on the first new mail, as forwarding makes them."""
    made, following = next_id(seed, "messages"), next_id(seed, "attachments")
    rows = seed.rows("SELECT name, size_bytes FROM attachments WHERE message_id = ? ORDER BY id", message_id)
    return [
        _whole("attachments", id=following + n, message_id=made, name=row["name"], size_bytes=row["size_bytes"])
        for n, row in enumerate(rows)
    ]


def scheduled(
    seed: SeedDatabase, *, title: str, start: str, end: str, location: str, attendees: Sequence[str]
) -> list[Expected]:
    made = next_id(seed, "events")
    event = _whole(
        "events",
        id=made,
        organizer=seed.variables["LOGGED_IN_USER"],
        title=FreeText(title),
        starts_at=start,
        ends_at=end,
        location=FreeText(location),
    )
    invited = (_whole("attendees", event_id=made, email=email, response="needs_action") for email in attendees)
    return [event, *invited]


def ruled(seed: SeedDatabase, *, field: str, contains: str, action: str, target: str) -> Expected:
    made = next_id(seed, "rules")
    return _whole("rules", id=made, field=field, contains=contains.lower(), action=action, target=target)


def _whole(table: str, **fields: object) -> InsertedRow:
    return InsertedRow(table, fields, others=False)
