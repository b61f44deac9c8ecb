"""Verifiers of others: what they may do, what they may not, and that whatever they do, we go on."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.environments.platform.verifiers import VerifierExecution, VerifierLimits, run_verifier
from palestra.environments.platform.verifiers.runtime.databases import DatabaseSnapshot
from palestra.sandbox.compute_only import process

SCHEMA = """
CREATE TABLE t (id INTEGER PRIMARY KEY, v TEXT, n INTEGER);
CREATE TABLE pairs (a INTEGER, b TEXT, v TEXT, PRIMARY KEY (a, b));
INSERT INTO t VALUES (1, 'a', NULL), (2, 'b', 5), (3, '{"x": 1, "y": 2}', 0);
INSERT INTO pairs VALUES (1, 'x', 'one');
"""
LIMITS = VerifierLimits(wall_s=20)


def database(*statements: str) -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA + ";".join(statements))
    return connection.serialize()


SEED = database()


def ran(body: str, *statements: str, limits: VerifierLimits = LIMITS, **given) -> VerifierExecution:
    source = body if "def " in body else "def verify(env, final_answer=None):\n    " + body.replace("\n", "\n    ")
    return asyncio.run(run_verifier(source, SEED, database(*statements), limits=limits, **given))


TYPICAL = """
from fleet.verifiers import *
import fleet

@verifier(key="task")
def validate(env: Environment, final_answer: str | None = None) -> int:
    env.instance.load()
    seed, current = env.db("seed"), env.db("current")
    errors = []
    if current.table("t").eq("id", 2).select("v").first() != {"v": "c"}:
        errors.append("v")
    try:
        seed.diff(current, IgnoreConfig(tables={"log"}, table_fields={"t": {"n"}})).expect_only_v2(
            [{"table": "t", "pk": 2, "type": "modify", "resulting_fields": [("v", "c")], "no_other_changes": True}]
        )
    except AssertionError as e:
        errors.append(str(e))
    if not normalized_contains("forty-two", final_answer) or not contains_number(final_answer, 42):
        errors.append("answer")
    print(f">>> ERROR_ACCUMULATOR >>>\\n{errors}\\n<<< ERROR_ACCUMULATOR <<<")
    return TASK_FAILED_SCORE if errors else TASK_SUCCESSFUL_SCORE
"""


WORLD = """
CREATE TABLE mail_users (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE mail_notes (id INTEGER PRIMARY KEY, user INTEGER REFERENCES mail_users (id), v TEXT);
CREATE TABLE stay_users (id INTEGER PRIMARY KEY);
CREATE TABLE _events (id INTEGER PRIMARY KEY);
CREATE TRIGGER note AFTER INSERT ON mail_notes BEGIN INSERT INTO _events VALUES (NULL); END;
INSERT INTO mail_users VALUES (1, 'Ada')
"""


def test_an_app_of_a_world_is_found_by_its_name():
    body = """
mail = env.app("mail")
mail.load()
seed, current = mail.db("seed"), mail.db("current")
assert current.tables() == ["notes", "users"], current.tables()
seed.diff(current, IgnoreConfig()).expect_only_v2(
    [{"table": "notes", "pk": 1, "type": "insert", "fields": [("id", 1), ("user", 1), ("v", "x")]}]
)
return env.app("mail") is mail and env.app("stay").db("current").tables() == ["users"]"""
    source = "def verify(env):\n    " + body.replace("\n", "\n    ")
    seed, current = world(), world("INSERT INTO mail_notes VALUES (1, 1, 'x')")
    found = asyncio.run(run_verifier(source, seed, current, limits=LIMITS))
    assert (found.score, found.error) == (1.0, "")
    missing = asyncio.run(run_verifier("def v(env):\n    env.app('forge')", seed, seed, limits=LIMITS))
    assert missing.score is None
    assert "there is no app 'forge' in this world" in missing.error


def world(*statements: str) -> bytes:
    connection = sqlite3.connect(":memory:")
    connection.executescript(";".join([WORLD, *statements]))
    return connection.serialize()


def test_a_typical_verifier_finds_its_names():
    update = "UPDATE t SET v = 'c', n = 9 WHERE id = 2"
    good = ran(TYPICAL, update, final_answer="Forty two: 42")
    assert (good.score, good.error) == (1.0, "")
    assert "ERROR_ACCUMULATOR" in good.stdout
    assert ran(TYPICAL, update, final_answer="41").score == 0.0
    assert ran(TYPICAL, final_answer="forty-two 42").score == 0.0
    assert ran(TYPICAL, update, "DELETE FROM pairs", final_answer="forty-two 42").score == 0.0


def test_the_conversation_goes_to_those_who_declare_it():
    source = "def v(env, final_answer=None, conversation=None):\n    return conversation[0]['n'] + len(final_answer)"
    assert ran(source, final_answer="a", conversation=[{"n": -0.5}]).result == 0.5
    assert ran("def v(env):\n    return 1").score == 1.0
    assert ran("import json\ndef first(env):\n    return second()\ndef second():\n    return 0.25").score == 0.25


def test_files_are_read_with_what_stands_in_their_log(tmp_path: Path):
    seed, current = tmp_path / "seed.db", tmp_path / "current.db"
    seed.write_bytes(SEED)
    current.write_bytes(SEED)
    connection = sqlite3.connect(current)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("DELETE FROM pairs")
    connection.commit()
    source = "def v(env):\n    return env.db('seed').table('pairs').count() - env.db('current').table('pairs').count()"
    assert asyncio.run(run_verifier(source, seed, current)).result == 1.0
    connection.close()


# Changes

SET_B = "UPDATE t SET v = 'c' WHERE id = 2"
MODIFY = "{'table': 't', 'pk': 2, 'type': 'modify', 'resulting_fields': [('v', %s)], 'no_other_changes': True}"
INSERT = "{'table': 't', 'pk': '9', 'type': 'insert', 'fields': [('id', 9), ('v', %s), ('n', None)]}"


@pytest.mark.parametrize(
    ("method", "specs", "statements", "is_fine"),
    [
        ("expect_only_v2", "", (), True),
        ("expect_only_v2", "", (SET_B,), False),
        ("expect_only_v2", MODIFY % "'c'", (SET_B,), True),
        ("expect_only_v2", MODIFY % "'c'", (), True),
        ("expect_only_v2", MODIFY % "...", (SET_B,), True),
        ("expect_only_v2", MODIFY % "'d'", (SET_B,), False),
        ("expect_only_v2", MODIFY % "'c'", (SET_B, "UPDATE t SET n = 1 WHERE id = 2"), False),
        ("expect_only_v2", MODIFY.replace("True", "False") % "'c'", (SET_B, "UPDATE t SET n = 1 WHERE id = 2"), True),
        # Rows and tables that the list does not name: the SDK's own would not see these two.
        ("expect_only_v2", MODIFY % "'c'", (SET_B, "UPDATE t SET n = 1 WHERE id = 1"), False),
        ("expect_only_v2", MODIFY % "'c'", (SET_B, "UPDATE pairs SET v = 'two'"), False),
        ("expect_only_v2", INSERT % "'z'", ("INSERT INTO t VALUES (9, 'z', NULL)",), True),
        ("expect_only_v2", INSERT % "'z'", ("INSERT INTO t VALUES (9, 'z', 0)",), False),
        ("expect_only_v2", "{'table': 't', 'pk': 9, 'type': 'insert', 'fields': [('id', 9)]}",
         ("INSERT INTO t VALUES (9, 'z', NULL)",), False),
        ("expect_only_v2", "{'table': 't', 'pk': 1, 'type': 'delete'}", ("DELETE FROM t WHERE id = 1",), True),
        ("expect_only_v2", "{'table': 't', 'pk': 1, 'type': 'delete', 'fields': [('v', 'b')]}",
         ("DELETE FROM t WHERE id = 1",), False),
        ("expect_only_v2", "{'table': 'pairs', 'pk': [1, 'x'], 'type': 'delete'}", ("DELETE FROM pairs",), True),
        ("expect_only", "{'table': 't', 'pk': 2, 'field': 'v', 'after': 'c'}", (SET_B,), True),
        ("expect_only", "{'table': 't', 'pk': 2, 'field': 'n', 'after': 'c'}", (SET_B,), False),
        ("expect_only", "{'table': 't', 'pk': 9, 'field': None, 'after': '__added__'}",
         ("INSERT INTO t VALUES (9, 'z', 0)",), True),
        ("expect_exactly", MODIFY % "'c'", (SET_B,), True),
        ("expect_exactly", MODIFY % "'c'", (), False),
        ("expect_exactly", MODIFY % "'c'", (SET_B, "DELETE FROM pairs"), False),
        ("expect_exactly", MODIFY.replace("]", ", ('n', 7)]") % "'c'", (SET_B,), False),
        # The same JSON, written otherwise, is no change.
        ("expect_only_v2", "", ("UPDATE t SET v = '{\"y\":2,\"x\":1}' WHERE id = 3",), True),
    ],
)  # fmt: skip
def test_changes_that_are_allowed_and_expected(method, specs, statements, is_fine):
    """Without a process: these are the same classes."""
    found = DatabaseSnapshot(SEED, "seed").diff(DatabaseSnapshot(database(*statements), "current"))
    listed = eval(f"[{specs}]")  # noqa: S307 - as a verifier writes it
    with contextlib.nullcontext() if is_fine else pytest.raises(AssertionError, match="Unexpected database changes"):
        getattr(found, method)(listed)


def test_a_list_that_is_none_is_the_verifiers_mistake():
    broken = ran("env.db('seed').diff(env.db('current')).expect_exactly([{'table': 't'}])")
    assert (broken.score, "needs 'type'" in broken.error) == (None, True)


# Hostile ones

FORGED = """import os
for pipe in range(1, 9):
    try:
        os.write(pipe, b'{}')
    except OSError:
        pass
os._exit(0)"""
HOSTILE = {
    "a socket": ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "No module named 'socket'"),
    "a socket by its C module": ("import _socket\n_socket.socket()", "No module named '_socket'"),
    "a file": ("return len(open('/etc/passwd').read())", "may not"),
    "a file by its descriptor": ("import os\nreturn os.open('/etc/passwd', 0)", "may not"),
    "writing a file": ("open('/tmp/x', 'w').write('x')", "may not"),
    "another process": ("import os\nreturn os.system('true')", "may not"),
    "a fork": ("import os\nreturn os.fork()", "may not"),
    "killing": ("import os\nos.kill(1, 9)", "may not"),
    "foreign code": ("import ctypes\nreturn ctypes.CDLL(None).getpid()", "may not"),
    "writing to a database": ("env.db('current').rows('DELETE FROM t')", "readonly"),
    "another database": ("env.db('current').rows(\"ATTACH '/tmp/x' AS x\")", "not authorized"),
    "leaving": ("import sys\nsys.exit(0)", "SystemExit"),
    "leaving at once": ("import os\nos._exit(0)", "ended without an answer"),
    "an answer in its place": (FORGED, "ended without an answer"),
    "endless recursion": ("def f():\n    return f()\nreturn f()", "RecursionError"),
    "all the memory": ("x = []\nwhile True:\n    x.append(bytearray(10**8))", "MemoryError"),
    "no number": ("return float('nan')", "returned nan, but a score must be a number from 0 to 1"),
    "no Python": ("return (", "SyntaxError"),
    "nothing": ("x = 1", "no function"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_verifier_must_not_do_leaves_the_grade_unknown(name: str):
    body, why = HOSTILE[name]
    source = "def verify(env, final_answer=None):\n    " + body.replace("\n", "\n    ") if name != "nothing" else body
    found = asyncio.run(run_verifier(source, SEED, SEED, limits=LIMITS))
    assert (found.success, found.score) == (False, None)
    assert why in found.error


CHANGED = "UPDATE t SET v = 'c' WHERE id = 2"
ENDINGS = {
    "assert final_answer == '42', 'not 42'": (0.0, "AssertionError: not 42"),
    "env.db('seed').diff(env.db('current')).expect_only_v2([])": (0.0, "AssertionError: Unexpected database changes"),
    "pass": (None, "the verifier returned None, but a score must be a number from 0 to 1"),
    "return 1.5": (None, "the verifier returned 1.5, but a score must be a number from 0 to 1"),
    "return -1": (None, "the verifier returned -1, but a score must be a number from 0 to 1"),
}


def test_an_assertion_that_fails_is_0_and_what_is_no_score_is_unknown_with_a_reason():
    async def all_of_them() -> list[VerifierExecution]:
        sources = ["def v(env, final_answer=None):\n    " + body for body in ENDINGS]
        return await asyncio.gather(*(run_verifier(one, SEED, database(CHANGED), limits=LIMITS) for one in sources))

    found = asyncio.run(all_of_them())
    assert [one.score for one in found] == [score for score, _ in ENDINGS.values()]
    assert all(why in one.error for one, (_, why) in zip(found, ENDINGS.values(), strict=True))
    assert [one.success for one in found] == [score is not None for score, _ in ENDINGS.values()]


def test_an_assertion_outside_of_the_function_is_no_grade():
    found = ran("assert False\ndef v(env):\n    return 1")
    assert (found.score, found.error) == (None, "AssertionError: ")


def test_one_that_does_not_end_is_killed():
    found = ran("while True: pass", limits=VerifierLimits(wall_s=0.5))
    assert (found.score, found.error) == (None, "the verifier did not finish within 0.5 s")


def test_one_that_prints_megabytes_is_cut_and_still_heard():
    found = ran("for _ in range(3000): print('x' * 10_000)\nreturn 1")
    assert (found.score, len(found.stdout)) == (1.0, 256 * 1024)


def test_half_characters_are_replaced():
    found = ran("print('a\\ud800b')\nreturn final_answer == '\\ud801'", final_answer="\ud801")
    assert (found.score, found.stdout) == (1.0, "a?b\n")


def test_a_judge_that_failed_is_no_verdict():
    assert ran("print('JUDGE ERROR: no answer')\nreturn 0").score is None


def test_cancelled_it_leaves_no_process(monkeypatch):
    started: list[asyncio.subprocess.Process] = []
    start = process.started

    async def main() -> None:
        is_up = asyncio.Event()

        async def noted(module: str) -> asyncio.subprocess.Process:
            started.append(await start(module))
            is_up.set()
            return started[-1]

        monkeypatch.setattr(process, "started", noted)
        running = asyncio.create_task(run_verifier("def v(env):\n    while True: pass", SEED, SEED))
        await is_up.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert started[0].returncode == -9


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's filter is Linux's")
def test_the_kernel_refuses_where_python_would_not():
    """Without the audit hook: what gets past Python stands before the filter."""
    program = """
import ctypes, os, socket
from palestra.sandbox.compute_only import jail
assert jail._filter_syscalls(2**30, 5)
for name, tried in (("open", lambda: os.open("/etc/passwd", 0)), ("socket", socket.socket), ("fork", os.fork),
                    ("exec", lambda: os.execv("/bin/true", ["true"])), ("kill", lambda: os.kill(os.getpid(), 0))):
    try:
        tried()
        os.write(1, (name + " worked ").encode())
    except PermissionError:
        os.write(1, (name + " refused ").encode())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "open refused socket refused fork refused exec refused kill refused "
