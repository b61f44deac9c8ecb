"""Rows by what a caller knows of them, or an error that says how to find them."""

from __future__ import annotations

from typing import Any

from palestra.environments.platform.changes import Row
from palestra.environments.platform.desk import Desk
from palestra.environments.platform.errors import ToolError
from palestra.util.json_types import JsonObject
from palestra.util.suggest import did_you_mean

MAIN_BRANCH = "main"


def repo_id(desk: Desk, name: str) -> int:
    found = desk.value("SELECT id FROM repos WHERE name = ?", name.rpartition("/")[2])
    if found is None:
        names = [row["name"] for row in desk.rows("SELECT name FROM repos ORDER BY name")]
        hint = did_you_mean(name, names, otherwise="repositories")
        raise ToolError("not_found", f"there is no repository {name!r}", hint)
    return found


def issue_row(desk: Desk, repo: int, number: int) -> Row:
    query = "SELECT * FROM issues WHERE repo_id = ? AND number = ?"
    return desk.found(f"there is no issue {number} here", "search_issues finds numbers", query, repo, number)


def pull_row(desk: Desk, repo: int, number: int) -> Row:
    found = desk.first("SELECT * FROM pulls WHERE repo_id = ? AND number = ?", repo, number)
    if found is None:
        numbers = ", ".join(str(row["number"]) for row in desk.rows("SELECT number FROM pulls WHERE repo_id = ?", repo))
        raise ToolError("not_found", f"there is no pull request {number} here", f"there are: {numbers or 'none'}")
    return found


def branch_name(desk: Desk, repo: int, name: str | None) -> str:
    wanted = name or MAIN_BRANCH
    if desk.value("SELECT 1 FROM branches WHERE repo_id = ? AND name = ?", repo, wanted) is None:
        rows = desk.rows("SELECT name FROM branches WHERE repo_id = ? ORDER BY name", repo)
        raise ToolError(
            "not_found", f"there is no branch {wanted!r}", f"branches: {', '.join(r['name'] for r in rows)}"
        )
    return wanted


def files_of(db: Any, repo: int, branch: str) -> dict[str, str]:
    rows = db.rows("SELECT path, content FROM files WHERE repo_id = ? AND branch = ? ORDER BY path", repo, branch)
    return {row["path"]: row["content"] for row in rows}


def user_id(desk: Desk, name: str) -> int:
    found = desk.value("SELECT id FROM users WHERE name = ?", name)
    if found is None:
        names = [row["name"] for row in desk.rows("SELECT name FROM users ORDER BY name")]
        raise ToolError("not_found", f"there is no user {name!r}", f"users: {', '.join(names)}")
    return found


def shown_issue(desk: Desk, repo: int, number: int) -> JsonObject:
    row = desk.rows(
        "SELECT number, u.name AS author, title, body, state, milestone, updated_at FROM issues "
        "JOIN users u ON u.id = author_id WHERE repo_id = ? AND number = ?",
        repo,
        number,
    )[0]
    assigned = "SELECT name FROM assignees JOIN users ON id = user_id WHERE repo_id = ? AND number = ? ORDER BY name"
    return row | {
        "labels": labels_of(desk, repo, number),
        "assignees": [one["name"] for one in desk.rows(assigned, repo, number)],
    }


def labels_of(desk: Desk, repo: int, number: int) -> list[str]:
    query = "SELECT label FROM issue_labels WHERE repo_id = ? AND number = ? ORDER BY label"
    return [row["label"] for row in desk.rows(query, repo, number)]


def next_number(desk: Desk, repo: int) -> int:
    """Issues and pull requests share their numbers."""
    highest = (desk.value(f"SELECT max(number) FROM {table} WHERE repo_id = ?", repo) for table in ("issues", "pulls"))
    return 1 + max(number or 0 for number in highest)
