"""Tasks of `forge` about files, branches and pull requests."""

from __future__ import annotations

import random
import re

from palestra.environments.platform.app import SeedDatabase, TemplateMaker
from palestra.environments.platform.apps.forge.checks import CONSTANTS, MAIN, SETTINGS, failed_checks
from palestra.environments.platform.apps.forge.code_tools import changed_paths
from palestra.environments.platform.apps.forge.finding import files_of
from palestra.environments.platform.apps.forge.seed import BROKEN, ME, NAMES
from palestra.environments.platform.apps.forge.tasks_issues import commented, some_repo
from palestra.environments.platform.expectations import FREE, Expected, FreeText, InsertedRow, UpdatedRow
from palestra.environments.platform.task_templates import Params, Solution, SolutionCall

template = TemplateMaker("palestra.environments.platform.apps.forge")

TEXTS = ("Who can look at this?", "I will read it tomorrow.", "Looks useful, thanks.", "Please add a test.")


def _pulls(seed: SeedDatabase, repo: int) -> list[Params]:
    return seed.rows("SELECT * FROM pulls WHERE repo_id = ? AND state = 'open' ORDER BY number", repo)


# Comment on the oldest pull request without a review


def _unreviewed(rng: random.Random, seed: SeedDatabase) -> Params | None:
    params = some_repo(rng, seed)
    query = "SELECT number FROM reviews WHERE repo_id = ?"
    reviewed = {row["number"] for row in seed.rows(query, params["repo_id"])}
    waiting = [pull["number"] for pull in _pulls(seed, params["repo_id"]) if pull["number"] not in reviewed]
    return params | {"number": waiting[0], "text": rng.choice(TEXTS)} if waiting else None


@template("2", params=_unreviewed, expect=lambda params, _seed: commented(params, params["text"]), max_turns=5)
def comment_unreviewed(params: Params) -> Solution:
    result = yield SolutionCall("list_pulls", {"repo": params["repo"]})
    oldest = next(pull for pull in result["pulls"] if not pull["reviews"])
    yield SolutionCall("add_comment", {"repo": params["repo"], "number": oldest["number"], "body": params["text"]})


# Merge the green one and close its issue


def _green(rng: random.Random, seed: SeedDatabase) -> Params | None:
    params = some_repo(rng, seed)
    repo = params["repo_id"]
    green = [pull for pull in _pulls(seed, repo) if not failed_checks(files_of(seed, repo, pull["head"]))]
    if len(green) != 1:
        return None
    issue = int(green[0]["body"].removeprefix("Fixes #"))
    state = seed.rows("SELECT state FROM issues WHERE repo_id = ? AND number = ?", repo, issue)[0]["state"]
    return params | {"pull": green[0]["number"], "head": green[0]["head"], "issue": issue} if state == "open" else None


def _merged(params: Params, seed: SeedDatabase) -> list[Expected]:
    repo = params["repo_id"]
    head = files_of(seed, repo, params["head"])
    expected: list[Expected] = [
        UpdatedRow("pulls", (repo, params["pull"]), {"state": "merged"}),
        UpdatedRow("issues", (repo, params["issue"]), {"state": "closed"}),
    ]
    for path in changed_paths(seed, repo, params["head"]):
        expected.append(UpdatedRow("files", (repo, "main", path), {"content": head[path]}))
        expected.append(InsertedRow("commits", {"repo_id": repo, "branch": "main", "path": path, "after": head[path]}))
    return expected


@template("2", params=_green, expect=_merged, max_turns=8)
def merge_green(params: Params) -> Solution:
    result = yield SolutionCall("list_pulls", {"repo": params["repo"]})
    number = next(pull["number"] for pull in result["pulls"] if not pull["failed_checks"])
    pull = yield SolutionCall("get_pull", {"repo": params["repo"], "number": number})
    yield SolutionCall("merge_pull", {"repo": params["repo"], "number": number})
    issue = int(pull["body"].removeprefix("Fixes #"))
    yield SolutionCall("update_issue", {"repo": params["repo"], "number": issue, "state": "closed"})


# Rename a constant through a pull request


def _rename_params(rng: random.Random, seed: SeedDatabase) -> Params | None:
    params = some_repo(rng, seed)
    files = files_of(seed, params["repo_id"], "main")
    if failed_checks(files):
        return None
    old = rng.choice(re.findall(r"constants\.([A-Z_]+)", files[MAIN]))
    new = f"{rng.choice(('MAX', 'NEW', 'BASE'))}_{rng.choice([name for name in NAMES if name != old])}"
    return params | {"old": old, "new": new, "branch": f"rename-{old.lower()}", "title": f"Rename {old} to {new}"}


def _renamed(text: str, params: Params) -> str:
    return re.sub(rf"\b{params['old']}\b", params["new"], text)


def _rename_expect(params: Params, seed: SeedDatabase) -> list[Expected]:
    repo, branch = params["repo_id"], params["branch"]
    pull = {
        "repo_id": repo,
        "author_id": ME,
        "title": FreeText(params["title"]),
        "head": branch,
        "base": "main",
        "state": "open",
    }
    expected: list[Expected] = [
        InsertedRow("branches", {"repo_id": repo, "name": branch, "origin": "main"}),
        InsertedRow("pulls", pull),
    ]
    for path, content in files_of(seed, repo, "main").items():
        after = _renamed(content, params) if path in (CONSTANTS, MAIN) else content
        expected.append(InsertedRow("files", {"repo_id": repo, "branch": branch, "path": path, "content": after}))
        if after != content:
            row = {"repo_id": repo, "branch": branch, "author_id": ME, "path": path, "after": after, "message": FREE}
            expected.append(InsertedRow("commits", row))
    return expected


@template("2", params=_rename_params, expect=_rename_expect, max_turns=10)
def rename_constant(params: Params) -> Solution:
    repo, branch = params["repo"], params["branch"]
    yield SolutionCall("create_branch", {"repo": repo, "name": branch})
    for path in (CONSTANTS, MAIN):
        result = yield SolutionCall("get_file", {"repo": repo, "path": path, "ref": branch})
        requested = {"repo": repo, "branch": branch, "path": path, "content": _renamed(result["content"], params)}
        yield SolutionCall("commit_file", requested | {"message": params["title"]})
    yield SolutionCall("create_pull", {"repo": repo, "head": branch, "base": "main", "title": params["title"]})


# Undo the commit that broke the check


def _broken(_rng: random.Random, seed: SeedDatabase) -> Params | None:
    row = seed.rows("SELECT name FROM repos WHERE id = ?", BROKEN)
    if not row or not failed_checks(files_of(seed, BROKEN, "main")):
        return None
    return {"repo": row[0]["name"], "repo_id": BROKEN}


def _before(seed: SeedDatabase) -> str:
    query = "SELECT before FROM commits WHERE repo_id = ? AND branch = 'main' AND path = ? ORDER BY id DESC LIMIT 1"
    return seed.rows(query, BROKEN, SETTINGS)[0]["before"]


def _undone(params: Params, seed: SeedDatabase) -> list[Expected]:
    repo, before = params["repo_id"], _before(seed)
    row = {"repo_id": repo, "branch": "main", "author_id": ME, "path": SETTINGS, "after": before}
    return [UpdatedRow("files", (repo, "main", SETTINGS), {"content": before}), InsertedRow("commits", row)]


@template("3", params=_broken, expect=_undone, max_turns=10)
def undo_the_break(params: Params) -> Solution:
    result = yield SolutionCall("list_files", {"repo": params["repo"]})
    path = result["failed_checks"][0].partition(":")[0]
    commits = yield SolutionCall("list_commits", {"repo": params["repo"]})
    broke = next(commit for commit in commits["commits"] if commit["path"] == path)
    requested = {"repo": params["repo"], "branch": "main", "path": path, "content": broke["before"]}
    yield SolutionCall("commit_file", requested | {"message": f"Put {path} back"})


CODE_TASKS = (comment_unreviewed, merge_green, rename_constant, undo_the_break)
