"""An instance's runner on the wire: queries that cannot harm, diffs, resets, verifiers of others."""

from __future__ import annotations

import base64
import io
import pickle
import zipfile
from typing import Any

import pytest

from palestra.environments.fleet.backend import partial_score
from palestra.environments.platform import Instance, make_task
from palestra.environments.platform.api import queries
from palestra.environments.platform.api.wire import sha_of
from palestra.environments.platform.golden import play_golden
from palestra.environments.platform.verifiers.source import verifier_source
from tests.environments.platform.api.conftest import Platform

TASK = "keys-put_number-0b-17"
ANSWERED = "keys-largest-2-3"
COUNTING = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c {}) SELECT {} FROM c"


@pytest.fixture
def instance_id(platform: Platform) -> str:
    return platform.make(data_key="tiny-0")["instance_id"]


def query(platform: Platform, instance_id: str, sql: Any, resource: str = "current", **more: Any) -> dict[str, Any]:
    answer = platform.runner(instance_id, f"resources/sqlite/{resource}/query", {"query": sql, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def played(platform: Platform, key: str) -> str:
    """An instance in which the task is done."""
    task = make_task(key)
    made = platform.make(data_key=task.seed.key)["instance_id"]
    for call, _ in play_golden(task, Instance(task.seed)).steps:
        platform.call(made, call.tool, call.arguments)
    return made


def test_what_the_platform_keeps_for_itself_is_not_seen(platform: Platform, instance_id: str):
    platform.call(instance_id, "put", {"value": 3})
    names = query(platform, instance_id, "SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")["rows"]
    assert sorted(name for (name,) in names) == ["items", "numbers"]
    tables = platform.runner(instance_id, "resources/sqlite/current/describe", method="GET").json()["tables"]
    assert [table["name"] for table in tables] == ["items", "numbers"]
    keys = [column["name"] for column in tables[0]["columns"] if column["primary_key"] and column["pk"]]
    assert keys == ["name"]


def test_queries_see_what_was_done_and_the_seed_does_not(platform: Platform, instance_id: str):
    for value in (3, 4):
        platform.call(instance_id, "put", {"value": value})
        assert query(platform, instance_id, "SELECT max(value) AS most FROM numbers") | {"message": ""} == {
            "success": True,
            "columns": ["most"],
            "rows": [[value]],
            "rows_affected": 0,
            "last_insert_id": 0,
            "message": "",
        }
    assert query(platform, instance_id, "SELECT * FROM numbers", "seed")["rows"] == []
    assert query(platform, instance_id, "SELECT value FROM numbers WHERE value > ?", args=[3])["rows"] == [[4]]


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO numbers (value) VALUES (1)",
        "DROP TABLE items",
        "ATTACH 'file.db' AS other",
        "PRAGMA query_only = 0",
        "SELECT load_extension('x')",
        "BEGIN",
        "SELECT 1; SELECT 2",
        "SELEC",
        "",
        "SELECT zeroblob(100000000)",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c",
    ],
)
def test_a_query_that_only_reads_can_do_nothing_else(platform: Platform, instance_id: str, sql: str):
    response = query(platform, instance_id, sql)
    if sql:
        assert response["success"] is False
        assert response["error"]
    assert query(platform, instance_id, "SELECT count(*) FROM items")["rows"] == [[4]]


def test_a_query_without_end_is_stopped(platform: Platform, instance_id: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(queries, "MAX_QUERY_S", 0.1)
    assert "took longer" in query(platform, instance_id, COUNTING.format("", "count(*)"))["error"]


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        (f"UPDATE items SET value = ({COUNTING.format('', 'count(*)')})", "took longer"),
        ("INSERT OR ROLLBACK INTO items (name, value) SELECT name, value FROM items", "UNIQUE"),
        (f"INSERT INTO numbers (value) {COUNTING.format('LIMIT 400', 'zeroblob(200000)')}", "full"),
    ],
    ids=["endless", "rolled back", "too much"],
)
def test_a_write_that_is_stopped_has_changed_nothing(
    platform: Platform, instance_id: str, sql: str, told: str, monkeypatch: pytest.MonkeyPatch
):
    # on a busy machine it takes more than a second until the memory is full
    monkeypatch.setattr(queries, "MAX_QUERY_S", 0.1 if told == "took longer" else 60.0)
    assert told in query(platform, instance_id, sql, read_only=False)["error"]
    assert platform.runner(instance_id, "diff/structured", {}).json()["diff"] == {}
    assert not platform.call(instance_id, "put", {"value": 3})["isError"]


def test_an_answer_that_would_fill_the_memory_is_refused(platform: Platform, instance_id: str):
    many = COUNTING.format("LIMIT 200", "zeroblob(200000)")
    assert "MiB; select fewer" in query(platform, instance_id, many)["error"]
    assert "too big" in query(platform, instance_id, "SELECT zeroblob(2000000)")["error"]
    assert "too complex" in query(platform, instance_id, f"SELECT 'x' LIKE '%{'x' * 2000}%'")["error"]
    long = query(platform, instance_id, "INSERT INTO numbers (value) VALUES (zeroblob(2000000))", read_only=False)
    assert "too big" in long["error"]


def test_rows_can_be_written_and_count_as_changes(platform: Platform, instance_id: str):
    response = query(platform, instance_id, "INSERT INTO numbers (value) VALUES (?)", args=[5], read_only=False)
    assert (response["success"], response["rows_affected"], response["last_insert_id"]) == (True, 1, 1)
    diff = platform.runner(instance_id, "diff/structured", {}).json()["diff"]
    assert diff["numbers"]["added_rows"] == [{"row_id": 1, "data": {"id": 1, "value": 5}}]
    for sql in ("DELETE FROM _events", "SELECT * FROM _facts", "DROP TABLE items", "COMMIT", "PRAGMA foreign_keys = 0"):
        assert query(platform, instance_id, sql, read_only=False)["success"] is False
    assert platform.runner(
        instance_id, "resources/sqlite/seed/query", {"query": "DELETE FROM items", "read_only": False}
    ).status_code == 400  # fmt: skip
    platform.call(instance_id, "put", {"value": 6})
    assert query(platform, instance_id, "SELECT value FROM numbers")["rows"] == [[5], [6]]


def test_a_diff_leaves_out_what_is_ignored(platform: Platform, instance_id: str):
    name, value = query(platform, instance_id, "SELECT name, value FROM items")["rows"][0]
    platform.call(instance_id, "set", {"name": name, "value": value + 1})
    platform.call(instance_id, "put", {"value": 3})
    diff = platform.runner(instance_id, "diff/structured").json()["diff"]
    assert diff["items"]["modified_rows"] == [
        {
            "row_id": name,
            "changes": {"value": {"before": value, "after": value + 1}},
            "data": {"name": name, "value": value + 1},
        }
    ]
    for ignore, left in (
        ({"tables": ["items"]}, {"numbers"}),
        ({"fields": ["value"]}, {"numbers"}),
        ({"table_fields": {"items": ["value"]}, "tables": ["numbers"]}, set()),
    ):
        response = platform.runner(instance_id, "diff/structured", {"ignore_config": ignore}).json()
        assert response["diff"].keys() == left
    for wrong in ({"tables": "items"}, {"table_fields": [1]}, [1], {"fields": [3]}):
        assert platform.runner(instance_id, "diff/structured", {"ignore_config": wrong}).status_code == 400


def test_a_reset_goes_back_to_the_seed_or_to_another(platform: Platform, instance_id: str):
    before = query(platform, instance_id, "SELECT * FROM items")["rows"]
    platform.call(instance_id, "put", {"value": 3})
    assert platform.runner(instance_id, "reset", {}).json()["success"]
    assert query(platform, instance_id, "SELECT * FROM numbers")["rows"] == []
    assert platform.runner(instance_id, "reset", {"seed": 1, "timestamp": None}).json()["success"]
    assert query(platform, instance_id, "SELECT * FROM items")["rows"] != before
    for wrong in ({"seed": "x"}, {"seed": -1}, {"timestamp": 5}):
        assert platform.runner(instance_id, "reset", wrong).status_code == 400


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"query": 3}', b'{"query": "SELECT ?", "args": {"a": 1}}'])
def test_queries_that_are_none_are_refused(platform: Platform, instance_id: str, body: bytes):
    answer = platform.http.post(f"/i/{instance_id}/api/v1/env/resources/sqlite/current/query", content=body)
    assert answer.status_code == 400 or answer.json()["success"] is False


# Verifiers


def executed(platform: Platform, instance_id: str, **fields: Any) -> dict[str, Any]:
    body = {"args_array": [{"env": instance_id}], **fields}
    answer = platform.http.post("/v1/verifiers/execute", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def arguments(**kwargs: Any) -> str:
    return base64.b64encode(pickle.dumps({"args": (None, {"env": "x"}), "kwargs": kwargs})).decode()


def bundle(source: str, name: str = "verifier.py") -> str:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, source)
    return base64.b64encode(file.getvalue()).decode()


def test_our_own_tasks_are_verified_by_their_key(platform: Platform):
    task = make_task(TASK)
    done, fresh = played(platform, TASK), platform.make(data_key=task.seed.key)["instance_id"]
    sha = sha_of(verifier_source(task))
    for fields in ({"sha256": sha}, {"sha256": "other", "bundle": bundle(verifier_source(task))}):
        good, bad = (executed(platform, one, key=TASK, **fields) for one in (done, fresh))
        assert (good["success"], good["result"], bad["success"], bad["result"]) == (True, 1.0, True, 0.0)
        assert "<<< ERROR_ACCUMULATOR <<<" in bad["stdout"]
        assert "missing" in bad["stdout"]
    wrong = executed(platform, platform.make(data_key="large-5")["instance_id"], key=TASK, sha256=sha)
    assert (wrong["success"], wrong["result"]) == (False, None)
    assert "but the instance is keys with large-5" in wrong["error"]["message"]


def test_an_answer_comes_out_of_the_pickle(platform: Platform):
    task = make_task(ANSWERED)
    sha = sha_of(verifier_source(task))
    done = played(platform, ANSWERED)
    response = [
        executed(platform, done, key=ANSWERED, sha256=sha, args=arguments(final_answer=answer))["result"]
        for answer in (task.params["wanted"], "nothing", None)
    ]
    assert response == [1.0, 0.0, 0.0]


def test_what_is_printed_of_our_own_tasks_pays_nothing_for_nothing(platform: Platform):
    """Whoever reads partial rewards out of it finds what the platform in this process gives."""
    task = make_task(ANSWERED)
    idle = platform.make(data_key=task.seed.key)["instance_id"]
    response = executed(platform, idle, key=ANSWERED, sha256=sha_of(verifier_source(task)))
    assert (response["result"], partial_score(response["stdout"])) == (0.0, 0.0)
    platform.call(idle, "put", {"value": 3})
    given = arguments(final_answer=task.params["wanted"])
    response = executed(platform, idle, key=ANSWERED, sha256=sha_of(verifier_source(task)), args=given)
    assert (response["result"], partial_score(response["stdout"])) == (0.0, 0.5)


class Evil:
    def __reduce__(self):
        return (print, ("gotcha",))


def endless() -> list[Any]:
    """A few hundred bytes as a pickle, longer than any memory as text."""
    found: list[Any] = ["ha"]
    for _ in range(60):
        found = [found, found]
    return found


@pytest.mark.parametrize(
    "args",
    [
        arguments(final_answer=Evil()),
        base64.b64encode(b"nothing").decode(),
        "!",
        base64.b64encode(pickle.dumps(3)).decode(),
        arguments(final_answer=[1]),
        arguments(something="else"),
        arguments(conversation=endless()),
        base64.b64encode(pickle.dumps({"args": (None, 5, {"env": "x"}), "kwargs": {}})).decode(),
    ],
)
def test_a_pickle_that_is_more_than_data_is_not_opened(
    platform: Platform, args: str, capsys: pytest.CaptureFixture[str]
):
    response = executed(
        platform, played(platform, TASK), key=TASK, sha256=sha_of(verifier_source(make_task(TASK))), args=args
    )
    assert (response["success"], response["result"]) == (False, None)
    assert response["error"]["message"]
    assert "gotcha" not in capsys.readouterr().out


SUM = """
def check(env, final_answer=None):
    print("looking")
    rows = env.db("current").table("numbers").all()
    env.db("seed").diff(env.db("current"), IgnoreConfig(tables={"numbers"})).expect_only_v2([])
    return 1.0 if sum(row["value"] for row in rows) == 7 and final_answer == "yes" else 0.0
"""


def test_verifiers_of_others_run_in_a_process_of_their_own(platform: Platform, instance_id: str):
    for value in (3, 4):
        platform.call(instance_id, "put", {"value": value})
    assert platform.http.get("/v1/verifiers/check?sha256=mine").json() == {"success": False}
    missing = executed(platform, instance_id, key="mine", sha256="mine")
    assert (missing["success"], missing["error"]["message"]) == (False, "bundle not found; send it with the request")
    sent = {"key": "mine", "sha256": "mine", "function_name": "check"}
    first = executed(platform, instance_id, **sent, bundle=bundle(SUM), args=arguments(final_answer="yes"))
    assert (first["success"], first["result"], first["stdout"]) == (True, 1.0, "looking\n")
    assert platform.http.get("/v1/verifiers/check?sha256=mine").json() == {"success": True}
    assert executed(platform, instance_id, **sent, args=arguments(final_answer="no"))["result"] == 0.0
    body = {"function_code": SUM, "function_name": "check", "text_solution": "yes"}
    response = platform.runner(instance_id, "execute_verifier_function", body).json()
    assert (response["result"], response["stdout"]) == (1.0, "looking\n")


def test_a_bundle_is_remembered_for_the_team_that_sent_it(platform: Platform):
    """Else one team could say what judges another's episodes."""
    sent = {"sha256": "claimed", "function_name": "check"}
    mine = platform.make()["instance_id"]
    assert executed(platform, mine, **sent, bundle=bundle("def check(env):\n    return 1\n"))["result"] == 1.0
    other = {"Authorization": "Bearer other"}
    theirs = platform.stranger.post("/v1/env/instances", json={"env_key": "keys"}, headers=other).json()["instance_id"]
    request = {"args_array": [{"env": theirs}], **sent}
    response = platform.stranger.post("/v1/verifiers/execute", json=request, headers=other).json()
    assert (response["success"], response["error"]["message"]) == (False, "bundle not found; send it with the request")
    known = platform.stranger.get("/v1/verifiers/check?sha256=claimed", headers=other)
    assert known.json() == {"success": False}


@pytest.mark.parametrize(
    ("source", "name", "told"),
    [
        ("def check(env):\n    raise ValueError('broken')\n", "check", "broken"),
        ("def check(env):\n    import os\n    os._exit(0)\n", "check", ""),
        ("def check(env):\n    while True:\n        pass\n", "check", "did not finish within"),
        ("x = 1", "check", "there is no function"),
        ("def helper():\n    pass\n\ndef check(env):\n    return 1\n", "check", "put check first"),
    ],
)
def test_a_verifier_that_breaks_is_an_unknown_verdict(
    platform: Platform, instance_id: str, source: str, name: str, told: str
):
    limit_s = 0.3 if "while" in source else 20
    answer = executed(
        platform, instance_id, key="x", sha256=source, bundle=bundle(source), function_name=name, timeout=limit_s
    )
    assert (answer["success"], answer["result"]) == (False, None)
    assert told in answer["error"]["message"]


def test_a_verifier_that_asserts_has_judged_and_one_that_returns_no_score_has_not(platform: Platform, instance_id: str):
    """What the SDK makes of a success without a result is a score: so it is none."""
    for body, result, kind, response in (
        ("assert env is None, 'not yet'", 0.0, "AssertionError", "not yet"),
        ("pass", None, "VerifierError", "returned None"),
        ("return 2", None, "VerifierError", "returned 2"),
    ):
        source = f"def check(env):\n    {body}\n"
        found = executed(platform, instance_id, key="x", sha256=source, bundle=bundle(source))
        assert (found["success"], found["result"], found["error"]["type"]) == (result is not None, result, kind)
        assert response in found["error"]["message"]
    told_there = platform.runner(instance_id, "execute_verifier_function", {"function_code": source}).json()
    assert (told_there["success"], "returned 2" in told_there["error"]) == (False, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"bundle": "!"},
        {"bundle": base64.b64encode(b"no zip").decode()},
        {"bundle": bundle("x", "other.py")},
        {"bundle": bundle("#" * (2 << 20))},
    ],
)
def test_a_bundle_that_is_none_is_told_so(platform: Platform, instance_id: str, fields: dict[str, str]):
    answer = executed(platform, instance_id, **fields)
    assert answer["success"] is False
    assert "verifier.py" in answer["error"]["message"]


@pytest.mark.parametrize("body", [{"args_array": []}, {"args_array": [3]}, {"args_array": [{"env": 3}]}, {"key": 3}])
def test_an_execution_without_an_instance_is_refused(platform: Platform, body: dict[str, Any]):
    assert platform.http.post("/v1/verifiers/execute", json=body).status_code == 400


def test_nobody_verifies_on_an_instance_of_another_team(platform: Platform, instance_id: str):
    body = {"args_array": [{"env": instance_id}], "key": TASK}
    assert platform.stranger.post("/v1/verifiers/execute", json=body).status_code == 410
