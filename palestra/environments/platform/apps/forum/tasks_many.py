"""Tasks of `forum` that go over a whole community, as a moderator or a careful reader does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from palestra.environments.platform.app import SeedDatabase, TemplateMaker
from palestra.environments.platform.apps.forum.seed import ME, RULES, TAGS
from palestra.environments.platform.apps.forum.tasks_plain import commented, some_community
from palestra.environments.platform.expectations import FREE, Expected, FreeText, InsertedRow, UpdatedRow
from palestra.environments.platform.task_templates import Params, Solution, SolutionCall, read_pages

template = TemplateMaker("palestra.environments.platform.apps.forum")

MODERATED = 1  # the community that the user moderates
MOST = 8  # posts to act on in one task

BREAKS: dict[str, Callable[[Params], bool]] = {
    "links": lambda post: "http" in post["body"],
    "sales": lambda post: post["title"].startswith("[sale]"),
    "shouting": lambda post: post["title"].isupper(),
}


def _posts(seed: SeedDatabase, place: int) -> list[Params]:
    return seed.rows("SELECT * FROM posts WHERE community_id = ? ORDER BY created_at, id", place)


def _name(seed: SeedDatabase, place: int) -> str:
    return seed.rows("SELECT name FROM communities WHERE id = ?", place)[0]["name"]


def _acted(action: str, posts: dict[int, Params], reasons: dict[int, Any]) -> list[Expected]:
    """Expects the result of a moderator's actions: the changed posts, and a note for each."""
    expected: list[Expected] = []
    for post, fields in posts.items():
        noted = {"user_id": ME, "target": "post", "target_id": post, "action": action, "reason": reasons[post]}
        expected += [UpdatedRow("posts", (post,), fields), InsertedRow("mod_actions", noted)]
    return expected


# Remove what breaks a rule


def _breaking(rng: random.Random, seed: SeedDatabase) -> Params | None:
    rule = rng.choice(sorted(RULES))
    found = [post["id"] for post in _posts(seed, MODERATED) if BREAKS[rule](post)]
    if not 1 <= len(found) <= MOST:
        return None
    return {"community": _name(seed, MODERATED), "rule": RULES[rule], "kind": rule, "posts": found}


def _removed(params: Params, _seed: SeedDatabase) -> list[Expected]:
    posts = params["posts"]
    return _acted("remove", {post: {"state": "removed"} for post in posts}, dict.fromkeys(posts, FREE))


@template("2", params=_breaking, expect=_removed, max_turns=40)
def remove_rule_breakers(params: Params) -> Solution:
    posts = yield from read_pages("search_posts", "posts", community=params["community"], sort="old")
    for post in posts:
        whole = (yield SolutionCall("get_post", {"id": post["id"]})) if params["kind"] == "links" else post
        if BREAKS[params["kind"]](whole):
            yield SolutionCall("mod_action", {"target": "post", "id": post["id"], "action": "remove"})


# Flairs by a table


def _tagged(rng: random.Random, seed: SeedDatabase) -> Params | None:
    tags = sorted(rng.sample(sorted(TAGS), 2))
    found = {
        str(post["id"]): TAGS[tag] for post in _posts(seed, MODERATED) for tag in tags if post["title"].startswith(tag)
    }
    if not 2 <= len(found) <= MOST or len(set(found.values())) < 2:
        return None
    table = ", ".join(f"{tag} is {TAGS[tag]}" for tag in tags)
    return {"community": _name(seed, MODERATED), "table": table, "tags": tags, "flairs": found}


def _flaired(params: Params, _seed: SeedDatabase) -> list[Expected]:
    flairs = {int(post): flair for post, flair in params["flairs"].items()}
    return _acted("flair", {post: {"flair": flair} for post, flair in flairs.items()}, flairs)


@template("2", params=_tagged, expect=_flaired, max_turns=20)
def flair_by_table(params: Params) -> Solution:
    posts = yield from read_pages("search_posts", "posts", community=params["community"], sort="old")
    for post in posts:
        tag = post["title"].partition(" ")[0]
        if tag in params["tags"]:
            yield SolutionCall(
                "mod_action", {"target": "post", "id": post["id"], "action": "flair", "reason": TAGS[tag]}
            )


# An answer that is in another thread


def _elsewhere(rng: random.Random, seed: SeedDatabase) -> Params | None:
    params = some_community(rng, seed)
    requests = seed.rows(
        "SELECT id, title FROM posts WHERE community_id = ? AND title LIKE 'What is the % called?'", params["place"]
    )[0]
    thing = requests["title"].removeprefix("What is the ").removesuffix(" called?")
    result = (
        "SELECT m.body, post_id FROM comments m JOIN posts p ON p.id = post_id WHERE m.body LIKE ? AND community_id = ?"
    )
    row = seed.rows(result, f"The {thing} is called %", params["place"])[0]
    word = row["body"].removesuffix(".").rpartition(" ")[2]
    return params | {
        "post": requests["id"],
        "title": requests["title"],
        "thing": thing,
        "known": row["post_id"],
        "word": word,
    }


@template("2", params=_elsewhere, expect=lambda params, _seed: commented(params, params["word"]), max_turns=8)
def answer_from_thread(params: Params) -> Solution:
    yield SolutionCall("search_posts", {"community": params["community"], "query": params["thing"]})
    result = yield SolutionCall("list_comments", {"post_id": params["known"]})
    known = next(one["body"] for one in result["comments"] if " is called " in one["body"])
    yield SolutionCall("comment", {"post_id": params["post"], "body": known.removesuffix(".").rpartition(" ")[2]})


# Duplicates


def _doubled(rng: random.Random, seed: SeedDatabase) -> Params | None:
    params = some_community(rng, seed)
    seen: set[str] = set()
    found = []
    for post in _posts(seed, params["place"]):
        if post["title"] in seen:
            found.append(post["id"])
        seen.add(post["title"])
    return params | {"posts": found} if 1 <= len(found) <= MOST else None


@template(
    "3",
    params=_doubled,
    expect=lambda params, _seed: [
        InsertedRow("reports", {"user_id": ME, "target": "post", "target_id": post, "reason": FreeText("duplicate")})
        for post in params["posts"]
    ],
    max_turns=20,
)
def report_duplicates(params: Params) -> Solution:
    posts = yield from read_pages("search_posts", "posts", community=params["community"], sort="old")
    seen: set[str] = set()
    for post in posts:
        if post["title"] in seen:
            yield SolutionCall("report", {"target": "post", "id": post["id"], "reason": "duplicate"})
        seen.add(post["title"])


MANY = (remove_rule_breakers, flair_by_table, answer_from_thread, report_duplicates)
