"""Worlds of several apps: the same people, one clock, one state; and each app as if it were alone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from palestra.environments.platform import APPS, Instance, SeedSize, TaskApp, TaskTemplate, make_task, verify
from palestra.environments.platform.app import SeedDatabase
from palestra.environments.platform.app_namespaces import TableNames, table_names, variables_of
from palestra.environments.platform.attackers import words_of
from palestra.environments.platform.changes import tables_of
from palestra.environments.platform.golden import ANSWER_TOOL, play_golden
from palestra.environments.platform.seeds import seed_of
from palestra.environments.platform.verdicts import TaskVerdict
from palestra.environments.random_calls import random_value

WORLDS = {key: app for key, app in APPS.items() if app.parts}
PARTS = [(world, part.key) for world, app in WORLDS.items() for part in app.parts]
DIGESTS = """
from palestra.environments.platform import APPS, SeedSize
from palestra.environments.platform.seeds import seed_of
print(*(seed_of(app, 5, size).digest for app in APPS.values() if app.parts for size in SeedSize))
"""


def alone(world: SeedDatabase, part: TaskApp) -> SeedDatabase:
    """The app by itself, with the rows it has in the world."""
    names = table_names(part.key, part.schema)

    def fill(connection: Any, _rng: random.Random, _size: SeedSize) -> Mapping[str, str]:
        for table in tables_of(connection):
            rows = world.rows(f"SELECT * FROM {names.of(table.name)}")
            marks = ", ".join("?" * len(table.columns))
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", [tuple(row.values()) for row in rows])
        return variables_of(part.key, world.variables)

    return seed_of(replace(part, fill=fill, version=f"of-{world.app.key}-{world.key}"), 0, SeedSize.SMALL)


@pytest.mark.parametrize(
    ("own", "shared"),
    [
        ("SELECT * FROM posts", "SELECT * FROM forum_posts AS posts"),
        ("SELECT p.id FROM posts p WHERE p.id = ?", "SELECT p.id FROM forum_posts p WHERE p.id = ?"),
        ("SELECT 1 FROM posts AS q", "SELECT 1 FROM forum_posts AS q"),
        ("SELECT posts FROM users WHERE posts = 1", "SELECT posts FROM forum_users AS users WHERE posts = 1"),
        ("INSERT INTO posts (title) VALUES (?)", "INSERT INTO forum_posts (title) VALUES (?)"),
        ("UPDATE posts SET title = ?", "UPDATE forum_posts SET title = ?"),
        ("SELECT * FROM (SELECT 1 FROM hidden)", "SELECT * FROM (SELECT 1 FROM hidden)"),
        ("DELETE FROM _notes", "DELETE FROM _forum_notes AS _notes"),
    ],
)
def test_a_statement_finds_its_tables(own: str, shared: str):
    schema = "CREATE TABLE posts (id INTEGER PRIMARY KEY, u INTEGER REFERENCES users);\nCREATE TABLE users (id);"
    names = TableNames("forum", f"{schema}\nCREATE TABLE _notes (id);\nCREATE INDEX by_user ON posts (u);")
    assert names.in_statement(own) == shared
    assert "REFERENCES forum_users)" in names.schema
    assert "CREATE INDEX by_user ON forum_posts (u)" in names.schema


class Pair:
    """An app in a world, and the same one alone: each call goes to both, and must be answered alike."""

    def __init__(self, world: str, part: str) -> None:
        seed = seed_of(WORLDS[world], 1, SeedSize.SMALL)
        self.app = next(app for app in WORLDS[world].parts if app.key == part)
        self.whole, self.alone = Instance(seed), Instance(alone(seed, self.app))
        self.worked: set[str] = set()

    def call(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        response, expected = self.whole.call(f"{self.app.key}.{tool}", arguments), self.alone.call(tool, arguments)
        assert response.is_error is expected.is_error
        assert response.text.replace(f"{self.app.key}.", "") == expected.text.replace(f"{self.app.key}.", "")
        self.worked |= set() if response.is_error else {tool}
        return json.loads(response.text)

    def solve(self, template: TaskTemplate, rng: random.Random) -> None:
        drawn_params = (template.params(rng, self.alone.seed) for _ in range(200))
        solving = template.solve(next(params for params in drawn_params if params is not None))
        response: Any = None
        with contextlib.suppress(StopIteration, LookupError, RuntimeError, ValueError):  # the world is not a fresh one
            while (call := solving.send(response)).tool != ANSWER_TOOL:
                response = self.call(call.tool, call.arguments)


@pytest.mark.parametrize("rounds", [1, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("world", "part"), PARTS)
def test_an_apps_tools_say_and_do_what_they_do_alone(world: str, part: str, rounds: int):
    """Every statement finds its tables: in solutions of the app's own tasks, and in calls at random."""
    pair, rng = Pair(world, part), random.Random(7)
    words = words_of(pair.alone.seed)
    for _ in range(rounds):
        for template in pair.app.templates:
            if template.size == "small":
                pair.solve(template, rng)
        for tool in pair.app.tools * 5:
            fields, required = tool.parameters["properties"], tool.parameters["required"]
            taken = [name for name in fields if name in required or rng.random() < 0.3]
            pair.call(tool.name, {name: random_value(rng, fields[name], words) for name in taken})
    assert len(pair.worked) > len(pair.app.tools) / 2
    names = table_names(part, pair.app.schema)
    renamed = [replace(change, table=names.of(change.table)) for change in pair.alone.changes()]
    assert sorted(map(repr, pair.whole.changes())) == sorted(map(repr, renamed))
    assert pair.whole.now == pair.alone.now


@pytest.mark.parametrize("size", list(SeedSize))
@pytest.mark.parametrize("world", WORLDS)
def test_everybody_is_somebody_in_the_mailbox(world: str, size: SeedSize):
    seed = seed_of(WORLDS[world], 3, size)
    mail = seed.part("mail")
    known = {
        row["name"].lower().replace(" ", "_")
        for row in mail.rows("SELECT name FROM users UNION SELECT name FROM contacts")
    }
    for part in ("forge", "forum"):
        if part in {app.key for app in seed.app.parts}:
            handles = [row["name"] for row in seed.part(part).rows("SELECT name FROM users ORDER BY id")]
            assert len(set(handles)) == len(handles) > 4
            assert set(handles) <= known
            assert seed.part(part).variables["LOGGED_IN_NAME"] == handles[0]
    names = {part.key: seed.part(part.key).variables for part in seed.app.parts}
    assert {one["CURRENT_DATE"] for one in names.values()} == {seed.variables["CURRENT_DATE"]}
    if "stay" in names:
        (me,) = seed.part("stay").rows("SELECT name, email FROM users WHERE id = 1")
        assert (me["name"], me["email"]) == (seed.variables["LOGGED_IN_NAME"], seed.variables["LOGGED_IN_USER"])


def test_another_process_makes_the_same_worlds():
    env = os.environ | {"PYTHONHASHSEED": "77"}
    response = subprocess.run([sys.executable, "-c", DIGESTS], env=env, capture_output=True, text=True, check=True)
    assert response.stdout.split() == [seed_of(app, 5, size).digest for app in WORLDS.values() for size in SeedSize]


def any_hotel(instance: Instance) -> dict[str, int]:
    return {"hotel_id": instance.seed.part("stay").rows("SELECT id FROM hotels")[0]["id"]}


def test_apps_share_the_clock_the_state_and_its_copies():
    instance = Instance.create(WORLDS["travel"], 2)
    began, first = instance.now, instance.state_hash()
    hotel = any_hotel(instance)
    assert not instance.call("stay.save_to_wishlist", hotel).is_error
    kept, after_one = instance.snapshot(), instance.state_hash()
    sent = instance.call("mail.send_message", {"to": ["a@b.example"], "subject": "x", "body": "y"})
    assert json.loads(sent.text)["date"] == instance.now > began
    assert {change.table for change in instance.changes()} == {"stay_wishlists", "mail_messages", "mail_recipients"}
    fork = instance.fork()
    assert fork.state_hash() == instance.state_hash() not in (first, after_one)
    instance.restore(kept)
    assert instance.state_hash() == after_one
    assert [event.tool for event in instance.events()] == ["stay.save_to_wishlist"]
    instance.reset()
    assert (instance.state_hash(), instance.changes()) == (first, [])


def test_what_is_wrong_is_told_with_the_tools_full_names():
    instance = Instance.create(WORLDS["team"])

    def response(tool: str, **arguments: Any) -> dict[str, Any]:
        return json.loads(instance.call(tool, arguments).text)

    assert response("mail.get_message", id=10_000)["hint"] == "mail.search_messages() shows ids"
    assert response("mail.get_message")["hint"] == "mail.get_message(id: integer)"
    assert "forge.search_issues finds" in response("forge.get_issue", repo="tidepool", number=999)["hint"]
    stranger = next(row["name"] for row in instance.seed.part("forum").rows(
        "SELECT name FROM communities WHERE id NOT IN (SELECT community_id FROM memberships WHERE user_id = 1)"
    ))  # fmt: skip
    refused = response("forum.create_post", community=stranger, title="a", body="b")
    assert refused["hint"] == f"join it first: forum.join(community={stranger!r})"
    assert "mail.search_messages" in response("search_messages")["hint"]


def test_a_task_over_two_apps_is_judged_app_by_app():
    task = make_task("travel-cancel_and_tell-2-4")
    calls = [call for call, _ in play_golden(task, Instance(task.seed)).steps]

    def judged(apps: set[str], *more: tuple[str, dict[str, Any]]) -> TaskVerdict:
        instance = Instance(task.seed)
        for tool, arguments in [*((call.tool, call.arguments) for call in calls), *more]:
            if tool.partition(".")[0] in apps:
                assert not instance.call(tool, arguments).is_error
        return verify(task, instance)

    assert judged(set()).apps == {"mail": False, "stay": False}
    half = judged({"stay"})
    assert (half.score, half.apps, half.met, half.checks) == (0.0, {"mail": False, "stay": True}, ["app stay"], 2)
    assert judged({"mail"}).apps == {"mail": True, "stay": False}
    whole = judged({"mail", "stay"})
    assert (whole.score, whole.apps) == (1.0, {"mail": True, "stay": True})
    stray = judged({"mail", "stay"}, ("stay.save_to_wishlist", any_hotel(Instance(task.seed))))
    assert (stray.score, stray.apps) == (0.0, {"mail": True, "stay": False})


def test_what_happens_in_an_app_that_a_task_is_not_about_counts_against_it():
    task = make_task("team-mail_assignee-1-3")
    instance = Instance(task.seed)
    play_golden(task, instance)
    assert verify(task, instance).apps == {"mail": True}
    post = task.seed.part("forum").rows("SELECT id FROM posts")[0]["id"]
    assert not instance.call("forum.save_post", {"id": post}).is_error
    verdict = verify(task, instance)
    assert (verdict.score, verdict.apps) == (0.0, {"forum": False, "mail": True})
