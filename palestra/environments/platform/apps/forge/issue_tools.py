"""Tools for repositories, issues and labels."""

from __future__ import annotations

from typing import Literal

from palestra.environments.platform.apps.forge.finding import (
    issue_row,
    labels_of,
    next_number,
    repo_id,
    shown_issue,
    user_id,
)
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext, check_text
from palestra.environments.platform.tool_schemas import ToolOutput, tool

PAGE = 10
MAX_TITLE = 200


@tool()
def list_repos(context: ToolContext, owner: str | None = None, query: str = "") -> ToolOutput:
    """List repositories."""
    found = "SELECT o.name || '/' || r.name AS repo, about FROM repos r JOIN orgs o ON o.id = org_id "
    found += "WHERE instr(r.name, ?) AND (? IS NULL OR o.name = ?) ORDER BY 1"
    return {"repos": context.rows(found, query, owner, owner)}


@tool()
def search_issues(
    context: ToolContext,
    repo: str,
    query: str | None = None,
    state: Literal["open", "closed"] | None = None,
    label: str | None = None,
    assignee: str | None = None,
    cursor: str | None = None,
) -> ToolOutput:
    """Find issues, the oldest first; assignee "none" finds unassigned ones."""
    place = repo_id(context, repo)
    wheres = ["i.repo_id = ?"]
    args: list[object] = [place]
    same = "repo_id = i.repo_id AND number = i.number"
    for word in (query or "").split():
        wheres.append("instr(lower(i.title), lower(?))")
        args.append(word)
    if state is not None:
        wheres.append("i.state = ?")
        args.append(state)
    if label is not None:
        wheres.append(f"EXISTS (SELECT 1 FROM issue_labels WHERE {same} AND label = ?)")
        args.append(label)
    if assignee == "none":
        wheres.append(f"NOT EXISTS (SELECT 1 FROM assignees WHERE {same})")
    elif assignee is not None:
        wheres.append(f"EXISTS (SELECT 1 FROM assignees WHERE {same} AND user_id = ?)")
        args.append(user_id(context, assignee))
    found = (
        f"SELECT number, title, state, milestone, updated_at FROM issues i WHERE {' AND '.join(wheres)} ORDER BY number"
    )
    rows, following = context.page(found, *args, limit=PAGE, cursor=cursor)
    return {
        "issues": [row | {"labels": labels_of(context, place, row["number"])} for row in rows],
        "next_cursor": following,
    }


@tool()
def get_issue(context: ToolContext, repo: str, number: int) -> ToolOutput:
    """Read an issue with its comments."""
    place = repo_id(context, repo)
    issue_row(context, place, number)
    query = "SELECT u.name AS author, body, created_at FROM comments JOIN users u ON u.id = author_id "
    query += "WHERE repo_id = ? AND number = ? ORDER BY comments.id LIMIT 50"
    return shown_issue(context, place, number) | {"comments": context.rows(query, place, number)}


@tool(writes=True)
def create_issue(
    context: ToolContext,
    repo: str,
    title: str,
    body: str = "",
    labels: list[str] | None = None,
    assignees: list[str] | None = None,
) -> ToolOutput:
    """Open an issue."""
    place = repo_id(context, repo)
    check_text("title", title, MAX_TITLE)
    number = next_number(context, place)
    facts = {"title": title, "body": body, "state": "open", "created_at": context.now, "updated_at": context.now}
    context.insert("issues", repo_id=place, number=number, author_id=int(context.me), **facts)
    _set_labels(context, place, number, labels or [])
    _set_assignees(context, place, number, assignees or [])
    return shown_issue(context, place, number)


@tool(writes=True)
def update_issue(
    context: ToolContext,
    repo: str,
    number: int,
    state: Literal["open", "closed"] | None = None,
    title: str | None = None,
    labels: list[str] | None = None,
    assignees: list[str] | None = None,
    milestone: str | None = None,
) -> ToolOutput:
    """Change an issue; labels and assignees are given as a whole."""
    place = repo_id(context, repo)
    issue_row(context, place, number)
    fields = {name: value for name, value in (("state", state), ("title", title)) if value is not None}
    if title is not None:
        check_text("title", title, MAX_TITLE)
    if milestone is not None:
        fields["milestone"] = _milestone(context, place, milestone)
    for name, value in fields.items():
        context.run(f"UPDATE issues SET {name} = ? WHERE repo_id = ? AND number = ?", value, place, number)
    if labels is not None:
        _set_labels(context, place, number, labels)
    if assignees is not None:
        _set_assignees(context, place, number, assignees)
    context.run("UPDATE issues SET updated_at = ? WHERE repo_id = ? AND number = ?", context.now, place, number)
    return shown_issue(context, place, number)


@tool(writes=True)
def add_comment(context: ToolContext, repo: str, number: int, body: str) -> ToolOutput:
    """Comment on an issue or a pull request."""
    place = repo_id(context, repo)
    kinds = "SELECT number FROM issues WHERE repo_id = ? UNION ALL SELECT number FROM pulls WHERE repo_id = ?"
    if number not in {row["number"] for row in context.rows(kinds, place, place)}:
        raise ToolError("not_found", f"there is no issue or pull request {number} here")
    check_text("body", body)
    facts = {"number": number, "body": body, "created_at": context.now}
    comment_id = context.insert("comments", repo_id=place, author_id=int(context.me), **facts)
    context.run("UPDATE issues SET updated_at = ? WHERE repo_id = ? AND number = ?", context.now, place, number)
    return {"comment": comment_id, "number": number}


@tool(writes=True)
def create_label(context: ToolContext, repo: str, name: str, color: str = "gray") -> ToolOutput:
    """Make a label for a repository."""
    place = repo_id(context, repo)
    check_text("name", name, 40)
    if name in _known(context, place):
        raise ToolError("exists", f"there is a label {name!r} already")
    context.insert("labels", repo_id=place, name=name, color=color)
    return {"label": name, "color": color}


def _set_labels(context: ToolContext, repo: int, number: int, labels: list[str]) -> None:
    known = _known(context, repo)
    for label in labels:
        if label not in known:
            raise ToolError("unknown_label", f"there is no label {label!r}", f"labels: {', '.join(known)}")
    requested, current = set(labels), set(labels_of(context, repo, number))
    for label in sorted(current - requested):
        context.run("DELETE FROM issue_labels WHERE repo_id = ? AND number = ? AND label = ?", repo, number, label)
    for label in sorted(requested - current):
        context.insert("issue_labels", repo_id=repo, number=number, label=label)


def _known(context: ToolContext, repo: int) -> list[str]:
    return [row["name"] for row in context.rows("SELECT name FROM labels WHERE repo_id = ? ORDER BY name", repo)]


def _set_assignees(context: ToolContext, repo: int, number: int, names: list[str]) -> None:
    requested = {user_id(context, name) for name in names}
    current = {
        row["user_id"]
        for row in context.rows("SELECT user_id FROM assignees WHERE repo_id = ? AND number = ?", repo, number)
    }
    for user in sorted(current - requested):
        context.run("DELETE FROM assignees WHERE repo_id = ? AND number = ? AND user_id = ?", repo, number, user)
    for user in sorted(requested - current):
        context.insert("assignees", repo_id=repo, number=number, user_id=user)


def _milestone(context: ToolContext, repo: int, title: str) -> str:
    titles = [
        row["title"] for row in context.rows("SELECT title FROM milestones WHERE repo_id = ? ORDER BY title", repo)
    ]
    if title not in titles:
        raise ToolError("unknown_milestone", f"there is no milestone {title!r}", f"milestones: {', '.join(titles)}")
    return title
