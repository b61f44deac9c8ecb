"""Finds rows by what a caller knows about them, or raises an error that says how to find them."""

from __future__ import annotations

from typing import Literal

from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext
from palestra.util.suggest import nearest

Target = Literal["post", "comment"]
TABLES = {"post": "posts", "comment": "comments"}
POST = (
    "SELECT p.id, c.name AS community, u.name AS author, p.title, p.body, p.flair, p.score, p.state, p.created_at "
    "FROM posts p JOIN communities c ON c.id = p.community_id JOIN users u ON u.id = p.author_id"
)
COMMENT = (
    "SELECT m.id, m.post_id, m.parent_id, u.name AS author, m.body, m.score, m.created_at "
    "FROM comments m JOIN users u ON u.id = m.author_id"
)


def community(context: ToolContext, name: str) -> Row:
    found = context.first("SELECT * FROM communities WHERE name = ? COLLATE NOCASE", name)
    if found is None:
        raise ToolError("not_found", f"there is no community {name!r}", _nearest(context, "communities", name))
    return found


def user(context: ToolContext, name: str) -> Row:
    found = context.first("SELECT * FROM users WHERE name = ? COLLATE NOCASE", name)
    if found is None:
        raise ToolError("not_found", f"there is no user {name!r}", _nearest(context, "users", name))
    return found


def _nearest(context: ToolContext, table: str, name: str) -> str:
    names = [row["name"] for row in context.rows(f"SELECT name FROM {table} ORDER BY name")]
    near = nearest(name, names)
    return f"did you mean {near}?" if near else f"some: {', '.join(names[:5])}"


def row_of(context: ToolContext, target: Target, row_id: int) -> Row:
    """Returns a post or a comment that everybody can see."""
    how = "search_posts finds ids" if target == "post" else "list_comments finds ids"
    query = f"SELECT * FROM {TABLES[target]} WHERE id = ? AND state != 'deleted'"
    return context.found(f"there is no {target} {row_id}", how, query, row_id)


def own_row(context: ToolContext, target: Target, row_id: int) -> Row:
    found = row_of(context, target, row_id)
    if found["author_id"] != int(context.me):
        raise ToolError("not_yours", f"{target} {row_id} is somebody else's", "you can report it, or vote")
    return found


def shown_post(context: ToolContext, post_id: int) -> Row:
    return context.rows(f"{POST} WHERE p.id = ?", post_id)[0]


def shown_comment(context: ToolContext, comment_id: int) -> Row:
    return context.rows(f"{COMMENT} WHERE m.id = ?", comment_id)[0]
