"""Tools to find, read and sort mail. Reading changes nothing: a mail becomes read only by a call that says so."""

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
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.times import moment
from palestra.environments.platform.tool_context import ToolContext
from palestra.environments.platform.tool_schemas import ToolOutput, tool

MAX_WORDS = 8  # of a query


@tool()
def search_messages(
    context: ToolContext,
    query: str | None = None,
    folder: str | None = None,
    sender: str | None = None,
    unread: bool | None = None,
    since: str | None = None,
    before: str | None = None,
    limit: int = 10,
    cursor: str | None = None,
) -> ToolOutput:
    """Find mail by words in subject or body, newest first; trash only by folder."""
    requested, args = _conditions(context, query, folder, sender, unread, since, before)
    rows, following = context.page(
        f"{LISTED} WHERE {' AND '.join(requested)} ORDER BY m.sent_at DESC, m.id DESC",
        *args,
        limit=limit,
        cursor=cursor,
    )
    return {"messages": [line_of(context, row) for row in rows], **({"next_cursor": following} if following else {})}


def _conditions(
    context: ToolContext,
    query: str | None,
    folder_name: str | None,
    sender: str | None,
    unread: bool | None,
    since: str | None,
    before: str | None,
) -> tuple[list[str], list[object]]:
    requested, args = ["m.folder_id = ?"], [folder(context, folder_name or TRASH)["id"]]
    if not folder_name:
        requested = ["m.folder_id != ?"]
    for word in _search_terms(query or ""):
        requested.append("instr(lower(m.subject || char(10) || m.body), lower(?))")
        args.append(word)
    if sender:
        requested.append("instr(lower(m.sender_name || ' <' || m.sender || '>'), lower(?))")
        args.append(sender.strip())
    if unread is not None:
        requested.append("m.is_read = ?")
        args.append(int(not unread))
    if since:
        requested.append("m.sent_at >= ?")
        args.append(moment(since, "since"))
    if before:
        requested.append("m.sent_at < ?")
        args.append(moment(before, "before"))
    return requested, args


def _search_terms(query: str) -> list[str]:
    found = query.split()
    if len(found) > MAX_WORDS:
        raise ToolError("bad_arguments", f"a query has at most {MAX_WORDS} words", "every word must occur: use fewer")
    return found


@tool()
def get_message(context: ToolContext, id: int) -> ToolOutput:
    """Read one mail with its text."""
    row = message(context, id)
    found = {
        "id": id,
        "from": sender_of(row),
        "to": recipients_of(context, id, "to"),
        "subject": row["subject"],
        "date": row["sent_at"],
        "folder": row["folder"],
        "read": bool(row["is_read"]),
        "flagged": bool(row["is_flagged"]),
        "body": row["body"],
    }
    more = {
        "cc": recipients_of(context, id, "cc"),
        "labels": labels_of(context, id),
        "attachments": context.rows("SELECT name, size_bytes FROM attachments WHERE message_id = ? ORDER BY id", id),
        "reply_to_id": row["reply_to_id"],
        "forwarded": _forwarded(context, row["forward_of_id"]),
    }
    return found | {name: value for name, value in more.items() if value}


def _forwarded(context: ToolContext, number: int | None) -> ToolOutput:
    if number is None:
        return {}
    row = message(context, number)
    return {
        "id": number,
        "from": sender_of(row),
        "subject": row["subject"],
        "date": row["sent_at"],
        "body": row["body"],
    }


@tool()
def list_folders(context: ToolContext) -> ToolOutput:
    """List folders with their mail counts, and all labels."""
    folders = context.rows(
        "SELECT f.name, count(m.id) AS total, coalesce(sum(m.is_read = 0), 0) AS unread "
        "FROM folders f LEFT JOIN messages m ON m.folder_id = f.id GROUP BY f.id ORDER BY f.id"
    )
    return {"folders": folders, "labels": [row["name"] for row in context.rows("SELECT name FROM labels ORDER BY id")]}


@tool(writes=True)
def move_message(context: ToolContext, id: int, folder: str) -> ToolOutput:
    """Move a mail to a folder."""
    message(context, id)
    return _move(context, id, folder)


@tool(writes=True)
def delete_message(context: ToolContext, id: int) -> ToolOutput:
    """Move a mail to the trash."""
    if message(context, id)["folder"] == TRASH:
        raise ToolError("already_deleted", f"message {id} is in the trash", "move_message(id, folder) takes it out")
    return _move(context, id, TRASH)


def _move(context: ToolContext, number: int, name: str) -> ToolOutput:
    context.run("UPDATE messages SET folder_id = ? WHERE id = ?", folder(context, name)["id"], number)
    return changed_line(context, number)


@tool(writes=True)
def set_flags(context: ToolContext, id: int, read: bool | None = None, flagged: bool | None = None) -> ToolOutput:
    """Mark a mail read or unread, flag or unflag it."""
    if read is None and flagged is None:
        raise ToolError("bad_arguments", "nothing to set", "give read, flagged or both")
    message(context, id)
    context.run(
        "UPDATE messages SET is_read = coalesce(?, is_read), is_flagged = coalesce(?, is_flagged) WHERE id = ?",
        read,
        flagged,
        id,
    )
    return changed_line(context, id)


@tool(writes=True)
def label_message(context: ToolContext, id: int, label: str, remove: bool = False) -> ToolOutput:
    """Put a label on a mail, or take it off."""
    message(context, id)
    _set_label(context, id, label, remove)
    return changed_line(context, id)


def _set_label(context: ToolContext, number: int, name: str, remove: bool) -> None:
    label_id = label(context, name)["id"]
    if remove:
        context.run("DELETE FROM message_labels WHERE message_id = ? AND label_id = ?", number, label_id)
    else:
        context.run("INSERT INTO message_labels VALUES (?, ?) ON CONFLICT DO NOTHING", number, label_id)


@tool()
def search_contacts(context: ToolContext, query: str, limit: int = 10, cursor: str | None = None) -> ToolOutput:
    """Find people's addresses by name, address or company."""
    rows, following = context.page(
        "SELECT name, email, company FROM contacts "
        "WHERE instr(lower(name || ' <' || email || '> ' || company), lower(?)) ORDER BY name, id",
        query.strip(),
        limit=limit,
        cursor=cursor,
    )
    return {"contacts": rows, **({"next_cursor": following} if following else {})}
