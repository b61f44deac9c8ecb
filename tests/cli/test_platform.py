"""`palestra platform`: apps, tasks, playing by hand, and a server that is stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from palestra.cli.app import main
from palestra.cli.platform.play import split
from palestra.environments.platform import APPS, make_task

PUT = "keys-put_number-0b-17"
LARGEST = "keys-largest-2-3"
TOLD = "travel-cancel_and_tell-2-1"
HEADERS = {"Authorization": "Bearer mine"}


def said(*args: str, typed: str = "") -> Result:
    return CliRunner().invoke(main, ["platform", *args], input=typed)


def told(*args: str, typed: str = "") -> Any:
    result = said(*args, "--json", typed=typed)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_apps_are_listed_with_their_tools():
    assert [one["app"] for one in told("app", "list")] == list(APPS)
    keys = told("app", "show", "keys")
    assert [tool["name"] for tool in keys["tools"]] == ["list", "get", "set", "drop", "put"]
    shown = said("apps", "keys").output
    assert "set(name: string, value: integer) *" in shown
    assert "put_number" in shown
    assert "mail" in said("apps").output


def test_an_app_that_is_not_there_offers_the_nearest():
    result = said("apps", "kyes")
    assert result.exit_code == 3
    assert "did you mean keys?" in result.stderr


def test_tasks_are_chosen_by_app_difficulty_and_split():
    found = told("task", "list", "--app", "keys", "--difficulty", "0b", "--split", "eval", "--count", "2")
    assert [one["key"] for one in found] == ["keys-put_number-0b-2147483648", "keys-put_number-0b-2147483649"]
    assert {one["split"] for one in found} == {"eval"}
    assert found[0]["prompt"] in said("task", "list", "--app", "keys", "--split", "eval").output
    assert "no template matches" in said("task", "list", "--app", "keys", "--template", "nothing").stderr
    assert said("task", "list", "--first", str(2**31)).exit_code == 2


def test_a_task_is_shown_with_its_solution():
    shown = told("task", "show", LARGEST, "--solution")
    expected = make_task(LARGEST).params["wanted"]
    assert shown["solution"] == ["list {}", f"done {expected}"]
    assert "solution" not in told("task", "show", LARGEST)
    assert f"done {expected}" in said("task", "show", LARGEST, "--solution").output
    assert "is not a task key" in said("task", "show", "nothing").stderr


def test_tasks_are_exported_for_fleet(tmp_path: Path):
    file = tmp_path / "tasks.json"
    assert told("task", "export", str(file), "--app", "keys", "--count", "2")["tasks"] == 2 * len(
        APPS["keys"].templates
    )
    rows = json.loads(file.read_text())
    assert {row["env_id"] for row in rows} == {"keys"}
    assert all("def verify_" in row["verifier_func"] for row in rows)
    assert said("task", "export", str(tmp_path / "no" / "where.json"), "--app", "keys").exit_code == 2


def test_knobs_are_turned_for_all_tasks(tmp_path: Path):
    file = tmp_path / "tasks.json"
    told("task", "export", str(file), "--app", "keys", "--template", "put_number", "--count", "1", "--hint", "--noise")
    (row,) = json.loads(file.read_text())
    assert row["key"] == "keys-put_number-0b-0.hint.noise"
    assert row["prompt"] == make_task(row["key"]).prompt
    assert "Hint: use put." in row["prompt"]
    assert "def verify_keys_put_number_0b_0_hint_noise(" in row["verifier_func"]
    listed = told("task", "list", "--app", "keys", "--template", "put_number", "--count", "1", "--hint")
    assert [one["key"] for one in listed] == ["keys-put_number-0b-0.hint"]
    assert "there are hint, noise" in said("task", "show", "keys-put_number-0b-0.loud").stderr


def test_a_world_of_several_apps_is_shown_and_played():
    shown = said("apps", "travel").output
    assert "stay.cancel_booking(id: integer) *" in shown
    assert "mail.search_contacts(query: string" in shown
    assert "cancel_and_tell" in shown
    calls = [line.partition(" ") for line in told("task", "show", TOLD, "--solution")["solution"]]
    typed = "".join(f"{tool} {arguments}\n" for tool, _, arguments in calls)
    played = told("play", TOLD, typed=f"{typed}done\n")
    assert [call["tool"].partition(".")[0] for call in played["calls"]] == ["stay", "stay", "mail", "mail"]
    assert {change["table"].partition("_")[0] for change in played["changes"]} == {"mail", "stay"}
    assert played["verdict"]["score"] == 1.0
    halfway = told("play", TOLD, typed=typed.partition("mail.send")[0])["verdict"]
    assert (halfway["score"], halfway["met"]) == (0.0, ["app stay"])


def test_a_person_plays_a_task_from_a_pipe():
    value = make_task(PUT).params["value"]
    played = told("play", PUT, typed=f"list\nput value={value}\ndone\nput value=1\n")
    assert [call["tool"] for call in played["calls"]] == ["list", "put"]
    assert played["verdict"]["score"] == 1.0
    assert [change["after"] for change in played["changes"]] == [{"id": 1, "value": value}]


def test_the_end_of_the_input_is_the_end_of_the_task():
    assert told("play", PUT, typed="list")["verdict"]["score"] == 0.0
    assert told("play", PUT, typed="quit\n")["verdict"] is None


def test_an_answer_is_said_with_done():
    expected = make_task(LARGEST).params["wanted"]
    assert told("play", LARGEST, typed=f"list\ndone {expected}\n")["verdict"]["score"] == 1.0
    assert told("play", LARGEST, typed="list\ndone zzz\n")["verdict"]["score"] == 0.0


def test_what_a_person_sees_while_playing():
    result = said("play", PUT, typed="nothing\nput 3\nput value=x\nput value=1\ndiff\ntools\nhelp\nreset\ndiff\ndone\n")
    assert result.exit_code == 0
    for line in (
        make_task(PUT).prompt,
        "there is no tool 'nothing'",
        "'3' is not name=value; put(value: integer)",
        "Expected int, got str",
        "insert: a new row in numbers: id = 1, value = 1",
        "put(value: integer)  Write a number down.",
        "the end, without a verdict",
        "nothing changed",
        "score 0.0",
        "missing: a new row in numbers",
    ):
        assert line in result.output


def test_an_app_alone_draws_a_task():
    assert told("play", "keys", typed="quit\n")["key"].startswith("keys-")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a=1 b=two", ["a=1", "b=two"]),
        ('a="two words" b=3', ["a=two words", "b=3"]),
        ('to=["a b", "c]d"] subject="x y"', ['to=["a b", "c]d"]', "subject=x y"]),
        ("ids=[] a=1", ["ids=[]", "a=1"]),
        ("note=a#b", ["note=a#b"]),
        ("", []),
    ],
)
def test_words_of_a_line(text: str, words: list[str]):
    assert split(text) == words


@pytest.mark.parametrize("line", ['put value="', "put to=[1", "put {"])
def test_a_line_that_cannot_be_read_is_told_so(line: str):
    assert "this line cannot be read" in said("play", PUT, typed=f"{line}\nquit\n").output


def test_two_servers_do_not_share_a_folder_or_a_port(tmp_path: Path):
    from palestra.environments.platform.pool import InstancePool

    with InstancePool(folder=tmp_path):
        result = said("serve", "--port", "0", "--state", str(tmp_path))
    assert result.exit_code == 1
    assert "another platform uses" in result.stderr
    assert "cannot listen" in said("serve", "--host", "192.0.2.1", "--state", str(tmp_path)).stderr


@contextmanager
def running(folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "palestra.cli", "platform", "serve", "--port", "0", "--state", str(folder), *more]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as ran:
        try:
            assert ran.stdout is not None
            lines = [ran.stdout.readline()]
            while lines[-1] and "ready at" not in lines[-1]:
                lines.append(ran.stdout.readline())
            yield ran, "".join(lines)
        finally:
            if ran.poll() is None:
                ran.kill()


def address(said: str) -> str:
    return said.partition("ready at ")[2].partition(";")[0]


def put(url: str, instance_id: str, value: int) -> httpx.Response:
    params = {"name": "put", "arguments": {"value": value}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    return httpx.post(f"{url}/i/{instance_id}/mcp", json=message)


@pytest.mark.e2e
def test_a_server_that_is_stopped_goes_on_and_one_that_is_killed_ends_its_instances(tmp_path: Path):
    with running(tmp_path) as (server, said_):
        url = address(said_)
        made = httpx.post(f"{url}/v1/env/instances", json={"env_key": "keys"}, headers=HEADERS).json()["instance_id"]
        token = httpx.get(f"{url}/v1/runner-auth/token", headers=HEADERS).json()
        assert put(url, made, 7).status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    with running(tmp_path) as (server, said_):
        url = address(said_)
        assert httpx.get(f"{url}/v1/runner-auth/token", headers=HEADERS).json() == token
        assert put(url, made, 8).status_code == 200
        query = {"query": "SELECT value FROM numbers ORDER BY id"}
        path = f"{url}/i/{made}/api/v1/env/resources/sqlite/current/query"
        assert httpx.post(path, json=query, headers=HEADERS).json()["rows"] == [[7], [8]]
        server.kill()
        server.wait(30)
    with running(tmp_path) as (server, said_):
        url = address(said_)
        found = httpx.get(f"{url}/v1/env/instances/{made}", headers=HEADERS).json()
        assert (found["status"], "lost in a crash" in found["reason"]) == ("error", True)
        assert put(url, made, 9).status_code == 410


@pytest.mark.e2e
def test_what_is_played_over_openenv_ends_with_the_server(tmp_path: Path):
    with running(tmp_path) as (server, said_):
        url = address(said_)
        message = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
        assert "result" in httpx.post(f"{url}/openenv/keys/mcp", json=message).json()
        with connect(f"{url.replace('http', 'ws', 1)}/openenv/keys/ws", proxy=None) as player:
            player.send('{"type": "reset"}')
            assert "observation" in str(player.recv(timeout=30))
            assert len(httpx.get(f"{url}/v1/env/instances").json()) == 2
            server.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed):
                player.recv(timeout=30)
        assert server.wait(30) == 0
    with running(tmp_path) as (_, said_):
        found = httpx.get(f"{address(said_)}/v1/env/instances?status=stopped").json()
        assert [one["reason"] for one in found] == ["closed by its owner"] * 2


@pytest.mark.e2e
def test_beyond_loopback_there_is_a_key(tmp_path: Path):
    with running(tmp_path, "--host", "0.0.0.0") as (_, said_):
        url = address(said_).replace("0.0.0.0", "127.0.0.1")
        key = said_.partition("shown this once): ")[2].split()[0]
        assert httpx.get(f"{url}/v1/account").status_code == 401
        assert httpx.get(f"{url}/v1/account", headers={"Authorization": f"Bearer {key}"}).status_code == 200
