"""Rows that tools of `mail` name: found, or an error for the model that says where to look."""

from __future__ import annotations

import re
from collections.abc import Iterable

from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext
from palestra.environments.platform.tool_schemas import ToolOutput

MAX_ROWS = 2000  # of a table, so that an agent in a loop is stopped
MAX_ADDRESSES = 50
ADDRESS = re.compile(r"[^\s@,;<>]{1,64}@[^\s@,;<>]{1,190}")

LISTED = """
SELECT m.id, m.sender, m.sender_name, m.subject, m.sent_at, m.is_read, m.is_flagged, f.name AS folder
FROM messages m JOIN folders f ON f.id = m.folder_id
"""


def message(context: ToolContext, number: int) -> Row:
    query = "SELECT m.*, f.name AS folder FROM messages m JOIN folders f ON f.id = m.folder_id WHERE m.id = ?"
    return context.found(f"there is no message {number}", "search_messages() shows ids", query, number)


def folder(context: ToolContext, name: str) -> Row:
    return _named(context, "folders", name)


def label(context: ToolContext, name: str) -> Row:
    return _named(context, "labels", name)


def _named(context: ToolContext, table: str, name: str) -> Row:
    found = context.first(f"SELECT id, name FROM {table} WHERE name = ?", name.strip())
    if found is None:
        names = ", ".join(row["name"] for row in context.rows(f"SELECT name FROM {table} ORDER BY id"))
        raise ToolError("not_found", f"there is no {table[:-1]} {name[:40]!r}", f"there are: {names}")
    return found


def addresses(given: Iterable[str]) -> list[str]:
    """Returns addresses as they are stored: small letters, each once, in the given order."""
    found = list(dict.fromkeys(one.strip().lower() for one in given))
    for one in found:
        if not ADDRESS.fullmatch(one):
            raise ToolError("bad_address", f"{one[:80]!r} is no mail address", "search_contacts(query) finds addresses")
    if len(found) > MAX_ADDRESSES:
        raise ToolError("bad_arguments", f"at most {MAX_ADDRESSES} addresses at once")
    return found


def check_room(context: ToolContext, table: str) -> None:
    if context.value(f"SELECT count(*) FROM {table}") >= MAX_ROWS:
        raise ToolError("full", f"there is room for {MAX_ROWS} {table}")


def line_of(context: ToolContext, row: Row) -> ToolOutput:
    """Returns a mail as lists show it: enough to choose by, without its text."""
    labels = labels_of(context, row["id"])
    return {
        "id": row["id"],
        "from": sender_of(row),
        "subject": row["subject"],
        "date": row["sent_at"],
        "folder": row["folder"],
        "read": bool(row["is_read"]),
        "flagged": bool(row["is_flagged"]),
        **({"labels": labels} if labels else {}),
    }


def changed_line(context: ToolContext, number: int) -> ToolOutput:
    return line_of(context, context.rows(f"{LISTED} WHERE m.id = ?", number)[0])


def sender_of(row: Row) -> str:
    return f"{row['sender_name']} <{row['sender']}>"


def labels_of(context: ToolContext, number: int) -> list[str]:
    query = (
        "SELECT l.name FROM message_labels x JOIN labels l ON l.id = x.label_id WHERE x.message_id = ? ORDER BY l.name"
    )
    return [row["name"] for row in context.rows(query, number)]


def recipients_of(context: ToolContext, number: int, kind: str) -> list[str]:
    query = "SELECT email FROM recipients WHERE message_id = ? AND kind = ? ORDER BY email"
    return [row["email"] for row in context.rows(query, number, kind)]
