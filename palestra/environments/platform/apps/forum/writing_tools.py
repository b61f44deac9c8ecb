"""Tools that write: posts, comments, votes, reports, actions of moderators."""

from __future__ import annotations

from typing import Literal

from palestra.environments.platform.apps.forum.finding import (
    TABLES,
    Target,
    community,
    own_row,
    row_of,
    shown_comment,
    shown_post,
    user,
)
from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext, check_text
from palestra.environments.platform.tool_schemas import ToolOutput, tool

MAX_TITLE, MAX_BODY = 200, 5000
STATES = {"remove": "removed", "approve": "open", "lock": "locked"}


@tool(writes=True)
def create_post(context: ToolContext, community: str, title: str, body: str, flair: str | None = None) -> ToolOutput:
    """Write a post in a community you have joined."""
    place = _joined(context, community)
    check_text("title", title, MAX_TITLE)
    check_text("body", body, MAX_BODY)
    if flair is not None:
        _check_flair(context, place, flair)
    facts = {"title": title, "body": body, "flair": flair, "created_at": context.now}
    return shown_post(context, context.insert("posts", community_id=place, author_id=int(context.me), **facts))


@tool(writes=True)
def comment(context: ToolContext, post_id: int, body: str, parent_id: int | None = None) -> ToolOutput:
    """Comment on a post, or answer a comment of it."""
    if row_of(context, "post", post_id)["state"] != "open":
        raise ToolError("locked", f"post {post_id} takes no comments")
    if parent_id is not None and row_of(context, "comment", parent_id)["post_id"] != post_id:
        raise ToolError("bad_arguments", f"comment {parent_id} is not of post {post_id}")
    check_text("body", body, MAX_BODY)
    facts = {"post_id": post_id, "parent_id": parent_id, "body": body, "created_at": context.now}
    return shown_comment(context, context.insert("comments", author_id=int(context.me), **facts))


@tool(writes=True)
def vote(context: ToolContext, target: Target, id: int, value: Literal[-1, 0, 1]) -> ToolOutput:
    """Vote up (1), down (-1), or take a vote back (0)."""
    row_of(context, target, id)
    mine = "user_id = ? AND target = ? AND target_id = ?"
    before = context.value(f"SELECT value FROM votes WHERE {mine}", context.me, target, id) or 0
    context.run(f"DELETE FROM votes WHERE {mine}", context.me, target, id)
    if value:
        context.insert("votes", user_id=int(context.me), target=target, target_id=id, value=value)
    context.run(f"UPDATE {TABLES[target]} SET score = score + ? WHERE id = ?", value - before, id)
    return {"target": target, "id": id, "score": row_of(context, target, id)["score"]}


@tool(writes=True)
def edit_own(context: ToolContext, target: Target, id: int, body: str) -> ToolOutput:
    """Replace the text of a post or comment of yours."""
    own_row(context, target, id)
    check_text("body", body, MAX_BODY)
    context.run(f"UPDATE {TABLES[target]} SET body = ? WHERE id = ?", body, id)
    return shown_post(context, id) if target == "post" else shown_comment(context, id)


@tool(writes=True)
def delete_own(context: ToolContext, target: Target, id: int) -> ToolOutput:
    """Delete a post or comment of yours."""
    own_row(context, target, id)
    context.run(f"UPDATE {TABLES[target]} SET state = 'deleted' WHERE id = ?", id)
    return {"deleted": id}


@tool(writes=True)
def save_post(context: ToolContext, id: int, remove: bool = False) -> ToolOutput:
    """Save a post for later, or take it off the list."""
    row_of(context, "post", id)
    if remove:
        context.run("DELETE FROM saved WHERE user_id = ? AND post_id = ?", context.me, id)
    else:
        context.run("INSERT INTO saved VALUES (?, ?) ON CONFLICT DO NOTHING", int(context.me), id)
    return {"id": id, "saved": not remove}


@tool(writes=True)
def join(context: ToolContext, community: str, leave: bool = False) -> ToolOutput:
    """Join or leave a community."""
    found = _found(context, community)
    if leave:
        context.run("DELETE FROM memberships WHERE community_id = ? AND user_id = ?", found["id"], context.me)
    else:
        facts = (found["id"], int(context.me), "member")
        context.run("INSERT INTO memberships VALUES (?, ?, ?) ON CONFLICT DO NOTHING", *facts)
    return {"community": found["name"], "joined": not leave}


@tool(writes=True)
def report(context: ToolContext, target: Target, id: int, reason: str) -> ToolOutput:
    """Report a post or comment to the moderators."""
    row_of(context, target, id)
    check_text("reason", reason, MAX_TITLE)
    facts = {"target": target, "target_id": id, "reason": reason, "created_at": context.now}
    context.insert("reports", user_id=int(context.me), **facts)
    return {"reported": id, "reason": reason}


@tool(writes=True)
def mod_action(
    context: ToolContext,
    target: Target,
    id: int,
    action: Literal["remove", "approve", "lock", "flair"],
    reason: str = "",
) -> ToolOutput:
    """For moderators: remove, approve or lock; or set a post's flair, named in reason."""
    row = row_of(context, target, id)
    place = row["community_id"] if target == "post" else row_of(context, "post", row["post_id"])["community_id"]
    _check_moderator(context, place)
    if target == "comment" and action in ("lock", "flair"):
        raise ToolError("bad_arguments", f"only posts can be given {action}")
    if action == "flair":
        _check_flair(context, place, reason)
        context.run("UPDATE posts SET flair = ? WHERE id = ?", reason, id)
    else:
        context.run(f"UPDATE {TABLES[target]} SET state = ? WHERE id = ?", STATES[action], id)
    facts = {"target": target, "target_id": id, "action": action, "reason": reason, "created_at": context.now}
    context.insert("mod_actions", user_id=int(context.me), **facts)
    return {"target": target, "id": id, "action": action, "reason": reason}


@tool(writes=True)
def send_message(context: ToolContext, to: str, body: str) -> ToolOutput:
    """Send a user a private message."""
    receiver = user(context, to)
    check_text("body", body, MAX_BODY)
    context.insert("messages", sender_id=int(context.me), receiver_id=receiver["id"], body=body, created_at=context.now)
    return {"to": receiver["name"], "sent": body}


def _found(context: ToolContext, name: str) -> Row:
    return community(context, name)


def _joined(context: ToolContext, name: str) -> int:
    place = community(context, name)["id"]
    if context.value("SELECT 1 FROM memberships WHERE community_id = ? AND user_id = ?", place, context.me) is None:
        raise ToolError("not_a_member", f"you have not joined {name}", f"join it first: join(community={name!r})")
    return place


def _check_moderator(context: ToolContext, place: int) -> None:
    role = context.value("SELECT role FROM memberships WHERE community_id = ? AND user_id = ?", place, context.me)
    if role != "moderator":
        raise ToolError("not_a_moderator", "you do not moderate this community", "report what breaks its rules")


def _check_flair(context: ToolContext, place: int, flair: str) -> None:
    names = [row["name"] for row in context.rows("SELECT name FROM flairs WHERE community_id = ? ORDER BY name", place)]
    if flair not in names:
        raise ToolError("unknown_flair", f"there is no flair {flair!r} here", f"flairs: {', '.join(names)}")
