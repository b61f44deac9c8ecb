"""Finds rows by what a caller knows about them, or raises an error that says how to find them."""

from __future__ import annotations

from typing import Any

from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext
from palestra.util.suggest import did_you_mean

MAIN_BRANCH = "main"


def repo_id(context: ToolContext, name: str) -> int:
    found = context.value("SELECT id FROM repos WHERE name = ?", name.rpartition("/")[2])
    if found is None:
        names = [row["name"] for row in context.rows("SELECT name FROM repos ORDER BY name")]
        hint = did_you_mean(name, names, otherwise="repositories")
        raise ToolError("not_found", f"there is no repository {name!r}", hint)
    return found


def issue_row(context: ToolContext, repo: int, number: int) -> Row:
    query = "SELECT * FROM issues WHERE repo_id = ? AND number = ?"
    return context.found(f"there is no issue {number} here", "search_issues finds numbers", query, repo, number)


def pull_row(context: ToolContext, repo: int, number: int) -> Row:
    found = context.first("SELECT * FROM pulls WHERE repo_id = ? AND number = ?", repo, number)
    if found is None:
        numbers = ", ".join(
            str(row["number"]) for row in context.rows("SELECT number FROM pulls WHERE repo_id = ?", repo)
        )
        raise ToolError("not_found", f"there is no pull request {number} here", f"there are: {numbers or 'none'}")
    return found


def branch_name(context: ToolContext, repo: int, name: str | None) -> str:
    requested = name or MAIN_BRANCH
    if context.value("SELECT 1 FROM branches WHERE repo_id = ? AND name = ?", repo, requested) is None:
        rows = context.rows("SELECT name FROM branches WHERE repo_id = ? ORDER BY name", repo)
        raise ToolError(
            "not_found", f"there is no branch {requested!r}", f"branches: {', '.join(r['name'] for r in rows)}"
        )
    return requested


def files_of(db: Any, repo: int, branch: str) -> dict[str, str]:
    rows = db.rows("SELECT path, content FROM files WHERE repo_id = ? AND branch = ? ORDER BY path", repo, branch)
    return {row["path"]: row["content"] for row in rows}


def user_id(context: ToolContext, name: str) -> int:
    found = context.value("SELECT id FROM users WHERE name = ?", name)
    if found is None:
        names = [row["name"] for row in context.rows("SELECT name FROM users ORDER BY name")]
        raise ToolError("not_found", f"there is no user {name!r}", f"users: {', '.join(names)}")
    return found


def shown_issue(context: ToolContext, repo: int, number: int) -> Row:
    row = context.rows(
        "SELECT number, u.name AS author, title, body, state, milestone, updated_at FROM issues "
        "JOIN users u ON u.id = author_id WHERE repo_id = ? AND number = ?",
        repo,
        number,
    )[0]
    assigned = "SELECT name FROM assignees JOIN users ON id = user_id WHERE repo_id = ? AND number = ? ORDER BY name"
    return row | {
        "labels": labels_of(context, repo, number),
        "assignees": [one["name"] for one in context.rows(assigned, repo, number)],
    }


def labels_of(context: ToolContext, repo: int, number: int) -> list[str]:
    query = "SELECT label FROM issue_labels WHERE repo_id = ? AND number = ? ORDER BY label"
    return [row["label"] for row in context.rows(query, repo, number)]


def next_number(context: ToolContext, repo: int) -> int:
    """Returns the next number; issues and pull requests share their numbers."""
    highest = (
        context.value(f"SELECT max(number) FROM {table} WHERE repo_id = ?", repo) for table in ("issues", "pulls")
    )
    return 1 + max(number or 0 for number in highest)
