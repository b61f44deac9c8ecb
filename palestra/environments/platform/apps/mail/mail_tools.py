"""Tools to find, read and put away mail. Reading changes nothing: a mail is read when somebody says so."""

from __future__ import annotations

from palestra.environments.platform.apps.mail.lookups import (
    LISTED,
    changed_line,
    folder,
    label,
    labels_of,
    line_of,
    message,
    recipients_of,
    sender_of,
)
from palestra.environments.platform.apps.mail.schema import TRASH
from palestra.environments.platform.desk import Desk
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.times import moment
from palestra.environments.platform.toolbox import tool
from palestra.util.json_types import JsonObject

MAX_WORDS = 8  # of a query


@tool()
def search_messages(
    desk: Desk,
    query: str | None = None,
    folder: str | None = None,
    sender: str | None = None,
    unread: bool | None = None,
    since: str | None = None,
    before: str | None = None,
    limit: int = 10,
    cursor: str | None = None,
) -> JsonObject:
    """Find mail by words in subject or body, newest first; trash only by folder."""
    wanted, args = _conditions(desk, query, folder, sender, unread, since, before)
    rows, following = desk.page(
        f"{LISTED} WHERE {' AND '.join(wanted)} ORDER BY m.sent_at DESC, m.id DESC", *args, limit=limit, cursor=cursor
    )
    return {"messages": [line_of(desk, row) for row in rows], **({"next_cursor": following} if following else {})}


def _conditions(
    desk: Desk,
    query: str | None,
    folder_name: str | None,
    sender: str | None,
    unread: bool | None,
    since: str | None,
    before: str | None,
) -> tuple[list[str], list[object]]:
    wanted, args = ["m.folder_id = ?"], [folder(desk, folder_name or TRASH)["id"]]
    if not folder_name:
        wanted = ["m.folder_id != ?"]
    for word in _words(query or ""):
        wanted.append("instr(lower(m.subject || char(10) || m.body), lower(?))")
        args.append(word)
    if sender:
        wanted.append("instr(lower(m.sender_name || ' <' || m.sender || '>'), lower(?))")
        args.append(sender.strip())
    if unread is not None:
        wanted.append("m.is_read = ?")
        args.append(int(not unread))
    if since:
        wanted.append("m.sent_at >= ?")
        args.append(moment(since, "since"))
    if before:
        wanted.append("m.sent_at < ?")
        args.append(moment(before, "before"))
    return wanted, args


def _words(query: str) -> list[str]:
    found = query.split()
    if len(found) > MAX_WORDS:
        raise ToolError("bad_arguments", f"a query has at most {MAX_WORDS} words", "every word must occur: use fewer")
    return found


@tool()
def get_message(desk: Desk, id: int) -> JsonObject:
    """Read one mail with its text."""
    row = message(desk, id)
    found = {
        "id": id,
        "from": sender_of(row),
        "to": recipients_of(desk, id, "to"),
        "subject": row["subject"],
        "date": row["sent_at"],
        "folder": row["folder"],
        "read": bool(row["is_read"]),
        "flagged": bool(row["is_flagged"]),
        "body": row["body"],
    }
    more = {
        "cc": recipients_of(desk, id, "cc"),
        "labels": labels_of(desk, id),
        "attachments": desk.rows("SELECT name, size_bytes FROM attachments WHERE message_id = ? ORDER BY id", id),
        "reply_to_id": row["reply_to_id"],
        "forwarded": _forwarded(desk, row["forward_of_id"]),
    }
    return found | {name: value for name, value in more.items() if value}


def _forwarded(desk: Desk, number: int | None) -> JsonObject:
    if number is None:
        return {}
    row = message(desk, number)
    return {
        "id": number,
        "from": sender_of(row),
        "subject": row["subject"],
        "date": row["sent_at"],
        "body": row["body"],
    }


@tool()
def list_folders(desk: Desk) -> JsonObject:
    """List folders with their mail counts, and all labels."""
    folders = desk.rows(
        "SELECT f.name, count(m.id) AS total, coalesce(sum(m.is_read = 0), 0) AS unread "
        "FROM folders f LEFT JOIN messages m ON m.folder_id = f.id GROUP BY f.id ORDER BY f.id"
    )
    return {"folders": folders, "labels": [row["name"] for row in desk.rows("SELECT name FROM labels ORDER BY id")]}


@tool(writes=True)
def move_message(desk: Desk, id: int, folder: str) -> JsonObject:
    """Move a mail to a folder."""
    message(desk, id)
    return _move(desk, id, folder)


@tool(writes=True)
def delete_message(desk: Desk, id: int) -> JsonObject:
    """Move a mail to the trash."""
    if message(desk, id)["folder"] == TRASH:
        raise ToolError("already_deleted", f"message {id} is in the trash", "move_message(id, folder) takes it out")
    return _move(desk, id, TRASH)


def _move(desk: Desk, number: int, name: str) -> JsonObject:
    desk.run("UPDATE messages SET folder_id = ? WHERE id = ?", folder(desk, name)["id"], number)
    return changed_line(desk, number)


@tool(writes=True)
def set_flags(desk: Desk, id: int, read: bool | None = None, flagged: bool | None = None) -> JsonObject:
    """Mark a mail read or unread, flag or unflag it."""
    if read is None and flagged is None:
        raise ToolError("bad_arguments", "nothing to set", "give read, flagged or both")
    message(desk, id)
    desk.run(
        "UPDATE messages SET is_read = coalesce(?, is_read), is_flagged = coalesce(?, is_flagged) WHERE id = ?",
        read,
        flagged,
        id,
    )
    return changed_line(desk, id)


@tool(writes=True)
def label_message(desk: Desk, id: int, label: str, remove: bool = False) -> JsonObject:
    """Put a label on a mail, or take it off."""
    message(desk, id)
    _set_label(desk, id, label, remove)
    return changed_line(desk, id)


def _set_label(desk: Desk, number: int, name: str, remove: bool) -> None:
    label_id = label(desk, name)["id"]
    if remove:
        desk.run("DELETE FROM message_labels WHERE message_id = ? AND label_id = ?", number, label_id)
    else:
        desk.run("INSERT INTO message_labels VALUES (?, ?) ON CONFLICT DO NOTHING", number, label_id)


@tool()
def search_contacts(desk: Desk, query: str, limit: int = 10, cursor: str | None = None) -> JsonObject:
    """Find people's addresses by name, address or company."""
    rows, following = desk.page(
        "SELECT name, email, company FROM contacts "
        "WHERE instr(lower(name || ' <' || email || '> ' || company), lower(?)) ORDER BY name, id",
        query.strip(),
        limit=limit,
        cursor=cursor,
    )
    return {"contacts": rows, **({"next_cursor": following} if following else {})}
