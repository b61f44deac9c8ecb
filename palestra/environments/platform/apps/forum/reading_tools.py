"""Tools that read: posts, comments, communities."""

from __future__ import annotations

from datetime import date
from typing import Literal

from palestra.environments.platform.apps.forum.finding import COMMENT, POST, community, row_of, shown_post, user
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext
from palestra.environments.platform.tool_schemas import ToolOutput, tool

PAGE = 10
SORTS = {"top": "score DESC, id", "new": "created_at DESC, id DESC", "old": "created_at, id"}
Sort = Literal["top", "new", "old"]


@tool()
def search_posts(
    context: ToolContext,
    query: str | None = None,
    community: str | None = None,
    author: str | None = None,
    sort: Sort = "new",
    since: str | None = None,
    cursor: str | None = None,
) -> ToolOutput:
    """Find posts by words in the title, community, author or day."""
    wheres, args = ["p.state IN ('open', 'locked')"], []
    for word in (query or "").split():
        wheres.append("instr(lower(p.title), lower(?))")
        args.append(word)
    if community is not None:
        wheres.append("p.community_id = ?")
        args.append(_community_id(context, community))
    if author is not None:
        wheres.append("p.author_id = ?")
        args.append(user(context, author)["id"])
    if since is not None:
        wheres.append("p.created_at >= ?")
        args.append(_day(since))
    found = f"SELECT id, community, author, title, flair, score, created_at FROM ({POST} WHERE {' AND '.join(wheres)})"
    rows, following = context.page(f"{found} ORDER BY {SORTS[sort]}", *args, limit=PAGE, cursor=cursor)
    return {"posts": rows, "next_cursor": following}


@tool()
def get_post(context: ToolContext, id: int) -> ToolOutput:
    """Read a post."""
    row_of(context, "post", id)
    comments = context.value("SELECT count(*) FROM comments WHERE post_id = ? AND state = 'open'", id)
    return shown_post(context, id) | {"comments": comments}


@tool()
def list_comments(context: ToolContext, post_id: int, sort: Sort = "old", cursor: str | None = None) -> ToolOutput:
    """Read the comments of a post."""
    row_of(context, "post", post_id)
    query = f"SELECT * FROM ({COMMENT} WHERE m.post_id = ? AND m.state = 'open') ORDER BY {SORTS[sort]}"
    rows, following = context.page(query, post_id, limit=PAGE, cursor=cursor)
    return {"comments": rows, "next_cursor": following}


@tool()
def list_communities(context: ToolContext, query: str = "") -> ToolOutput:
    """Find communities by name."""
    counted = "(SELECT count(*) FROM memberships m WHERE m.community_id = c.id) AS members"
    found = f"SELECT name, about, {counted} FROM communities c WHERE instr(lower(name), lower(?)) ORDER BY name"
    return {"communities": context.rows(found, query)}


@tool()
def get_community(context: ToolContext, name: str) -> ToolOutput:
    """Show a community: rules, flairs, moderators, your role."""
    found = community(context, name)
    role = context.value("SELECT role FROM memberships WHERE community_id = ? AND user_id = ?", found["id"], context.me)
    moderators = (
        "SELECT u.name FROM memberships JOIN users u ON u.id = user_id WHERE community_id = ? AND role = 'moderator'"
    )
    return {
        "name": found["name"],
        "about": found["about"],
        "rules": [
            row["text"]
            for row in context.rows("SELECT text FROM rules WHERE community_id = ? ORDER BY id", found["id"])
        ],
        "flairs": [
            row["name"]
            for row in context.rows("SELECT name FROM flairs WHERE community_id = ? ORDER BY 1", found["id"])
        ],
        "moderators": [row["name"] for row in context.rows(f"{moderators} ORDER BY u.name", found["id"])],
        "your_role": role,
    }


def _community_id(context: ToolContext, name: str) -> int:
    return community(context, name)["id"]


def _day(text: str) -> str:
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise ToolError("bad_date", f"since must be a day as 2026-03-14, found {text!r}") from None
