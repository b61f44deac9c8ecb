"""Tools for files, branches and pull requests."""

from __future__ import annotations

from typing import Any, Literal

from palestra.environments.platform.apps.forge.checks import failed_checks
from palestra.environments.platform.apps.forge.finding import branch_name, files_of, next_number, pull_row, repo_id
from palestra.environments.platform.changes import Row
from palestra.environments.platform.errors import ToolError
from palestra.environments.platform.tool_context import ToolContext, check_text
from palestra.environments.platform.tool_schemas import ToolOutput, tool

PAGE = 10
MAX_FILES = 50


@tool()
def get_file(context: ToolContext, repo: str, path: str, ref: str | None = None) -> ToolOutput:
    """Read a file of a branch; main if none is named."""
    place = repo_id(context, repo)
    branch = branch_name(context, place, ref)
    found = files_of(context, place, branch)
    if path not in found:
        raise ToolError("not_found", f"there is no file {path!r} on {branch}", f"files: {', '.join(found)}")
    return {"path": path, "branch": branch, "content": found[path]}


@tool()
def list_files(context: ToolContext, repo: str, path: str = "", ref: str | None = None) -> ToolOutput:
    """List files of a branch, and whether its checks pass."""
    place = repo_id(context, repo)
    branch = branch_name(context, place, ref)
    found = files_of(context, place, branch)
    names = [name for name in found if name.startswith(path)]
    return {"branch": branch, "files": names, "failed_checks": failed_checks(found)}


@tool()
def list_commits(context: ToolContext, repo: str, branch: str | None = None, cursor: str | None = None) -> ToolOutput:
    """List commits of a branch, the newest first, with the text before and after."""
    place = repo_id(context, repo)
    query = (
        "SELECT c.id, u.name AS author, message, path, before, after FROM commits c JOIN users u ON u.id = author_id "
    )
    query += "WHERE repo_id = ? AND branch = ? ORDER BY c.id DESC"
    rows, following = context.page(query, place, branch_name(context, place, branch), limit=PAGE, cursor=cursor)
    return {"commits": rows, "next_cursor": following}


@tool(writes=True)
def create_branch(context: ToolContext, repo: str, name: str, origin: str | None = None) -> ToolOutput:
    """Make a branch from another; from main if none is named."""
    place = repo_id(context, repo)
    start = branch_name(context, place, origin)
    check_text("name", name, 60)
    if context.value("SELECT 1 FROM branches WHERE repo_id = ? AND name = ?", place, name):
        raise ToolError("exists", f"there is a branch {name!r} already")
    last = context.value("SELECT coalesce(max(id), 0) FROM commits WHERE repo_id = ? AND branch = ?", place, start)
    context.insert("branches", repo_id=place, name=name, origin=start, origin_commit=last)
    for path, content in files_of(context, place, start).items():
        context.insert("files", repo_id=place, branch=name, path=path, content=content)
    return {"branch": name, "from": start}


@tool(writes=True)
def commit_file(context: ToolContext, repo: str, branch: str, path: str, content: str, message: str) -> ToolOutput:
    """Write a whole file on a branch."""
    place = repo_id(context, repo)
    branch = branch_name(context, place, branch)
    if context.value("SELECT 1 FROM protections WHERE repo_id = ? AND branch = ?", place, branch):
        raise ToolError("protected", f"{branch} is protected", "commit on another branch and open a pull request")
    check_text("path", path, 100)
    check_text("message", message, 500)
    files = files_of(context, place, branch)
    if path not in files and len(files) >= MAX_FILES:
        raise ToolError("full", f"a branch has at most {MAX_FILES} files")
    if files.get(path) == content:
        raise ToolError("no_change", f"{path} has this content already")
    _write(context, place, branch, path, content, message)
    return {"branch": branch, "path": path, "failed_checks": failed_checks(files_of(context, place, branch))}


@tool(writes=True)
def create_pull(context: ToolContext, repo: str, head: str, base: str, title: str, body: str = "") -> ToolOutput:
    """Open a pull request from head into base."""
    place = repo_id(context, repo)
    head, base = branch_name(context, place, head), branch_name(context, place, base)
    check_text("title", title, 200)
    if head == base or not changed_paths(context, place, head):
        raise ToolError("no_change", f"{head} has no commits of its own", "commit_file there first")
    number = next_number(context, place)
    facts = {"title": title, "body": body, "head": head, "base": base, "state": "open", "created_at": context.now}
    context.insert("pulls", repo_id=place, number=number, author_id=int(context.me), **facts)
    return _shown(context, place, pull_row(context, place, number))


@tool()
def get_pull(context: ToolContext, repo: str, number: int) -> ToolOutput:
    """Read a pull request: files before and after, checks, reviews."""
    place = repo_id(context, repo)
    pull = pull_row(context, place, number)
    base, head = files_of(context, place, pull["base"]), files_of(context, place, pull["head"])
    diff = [{"path": p, "before": base.get(p), "after": head[p]} for p in changed_paths(context, place, pull["head"])]
    return _shown(context, place, pull) | {"body": pull["body"], "files": diff}


@tool()
def list_pulls(
    context: ToolContext, repo: str, state: Literal["open", "merged"] = "open", cursor: str | None = None
) -> ToolOutput:
    """List pull requests, the oldest first."""
    place = repo_id(context, repo)
    query = "SELECT * FROM pulls WHERE repo_id = ? AND state = ? ORDER BY number"
    rows, following = context.page(query, place, state, limit=PAGE, cursor=cursor)
    return {"pulls": [_shown(context, place, row) for row in rows], "next_cursor": following}


@tool(writes=True)
def review_pull(
    context: ToolContext,
    repo: str,
    number: int,
    verdict: Literal["approve", "request_changes", "comment"],
    body: str = "",
) -> ToolOutput:
    """Review a pull request of somebody else."""
    place = repo_id(context, repo)
    pull = _open(context, place, number)
    if pull["author_id"] == int(context.me):
        raise ToolError("own_pull", "you cannot review your own pull request")
    facts = {"number": number, "verdict": verdict, "body": body, "created_at": context.now}
    context.insert("reviews", repo_id=place, author_id=int(context.me), **facts)
    return _shown(context, place, pull)


@tool(writes=True)
def merge_pull(
    context: ToolContext, repo: str, number: int, method: Literal["merge", "squash"] = "merge"
) -> ToolOutput:
    """Merge a pull request whose checks pass."""
    place = repo_id(context, repo)
    pull = _open(context, place, number)
    head = files_of(context, place, pull["head"])
    if failed := failed_checks(head):
        raise ToolError("checks_failed", "; ".join(failed), "only green pull requests can be merged")
    if clash := _conflicts(context, place, pull):
        raise ToolError("conflict", f"{', '.join(clash)} changed on {pull['base']} too", "bring the branch up to date")
    if _needs_review(context, place, pull):
        raise ToolError("needs_review", f"{pull['base']} is protected: somebody has to approve first")
    message = f"{'Merge' if method == 'merge' else 'Squash'} #{number}"
    for path in changed_paths(context, place, pull["head"]):
        _write(context, place, pull["base"], path, head[path], message)
    context.run("UPDATE pulls SET state = 'merged' WHERE repo_id = ? AND number = ?", place, number)
    return _shown(context, place, pull_row(context, place, number))


def changed_paths(db: Any, repo: int, branch: str) -> list[str]:
    """Returns the paths that the branch's own commits changed."""
    rows = db.rows("SELECT DISTINCT path FROM commits WHERE repo_id = ? AND branch = ? ORDER BY path", repo, branch)
    return [row["path"] for row in rows]


def _write(context: ToolContext, repo: int, branch: str, path: str, content: str, message: str) -> None:
    before = files_of(context, repo, branch).get(path)
    context.run(
        "INSERT INTO files VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET content = excluded.content",
        repo,
        branch,
        path,
        content,
    )
    facts = {"message": message, "path": path, "before": before, "after": content, "created_at": context.now}
    context.insert("commits", repo_id=repo, branch=branch, author_id=int(context.me), **facts)


def _open(context: ToolContext, repo: int, number: int) -> Row:
    pull = pull_row(context, repo, number)
    if pull["state"] != "open":
        raise ToolError("not_open", f"pull request {number} is {pull['state']}")
    return pull


def _conflicts(context: ToolContext, repo: int, pull: Row) -> list[str]:
    """Returns the paths that the base has changed, too, since the branch was made."""
    since = context.value("SELECT origin_commit FROM branches WHERE repo_id = ? AND name = ?", repo, pull["head"])
    query = "SELECT DISTINCT path FROM commits WHERE repo_id = ? AND branch = ? AND id > ?"
    base = {row["path"] for row in context.rows(query, repo, pull["base"], since)}
    return sorted(base & set(changed_paths(context, repo, pull["head"])))


def _needs_review(context: ToolContext, repo: int, pull: Row) -> bool:
    if not context.value("SELECT 1 FROM protections WHERE repo_id = ? AND branch = ?", repo, pull["base"]):
        return False
    query = "SELECT 1 FROM reviews WHERE repo_id = ? AND number = ? AND verdict = 'approve'"
    return context.value(query, repo, pull["number"]) is None


def _shown(context: ToolContext, repo: int, pull: Row) -> dict[str, object]:
    reviews = "SELECT u.name AS author, verdict FROM reviews JOIN users u ON u.id = author_id "
    reviews += "WHERE repo_id = ? AND number = ? ORDER BY reviews.id"
    shown = {name: pull[name] for name in ("number", "title", "head", "base", "state")}
    return shown | {
        "author": context.value("SELECT name FROM users WHERE id = ?", pull["author_id"]),
        "failed_checks": failed_checks(files_of(context, repo, pull["head"])),
        "reviews": context.rows(reviews, repo, pull["number"]),
    }
