"""`palestra key`: a key is shown once, works beside a server, and is gone when revoked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.store import Store
from palestra.store.queries.keys import find_key


def key(*args: object) -> Result:
    return CliRunner().invoke(main, ["key", *map(str, args)], prog_name="palestra")


def answer(*args: object):
    result = key(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_key_is_made_listed_and_revoked():
    made = answer("create", "--name", "ann", "--right", "admin")
    assert made["key"].startswith("tml-")
    assert (made["name"], made["owner"], made["right"]) == ("ann", "ann", "admin")
    answer("create", "--name", "bob", "--owner", "team")
    listed = answer("list")
    assert [(one["name"], one["owner"], one["right"]) for one in listed] == [
        ("ann", "ann", "admin"),
        ("bob", "team", "trainer"),
    ]
    assert answer("revoke", "ann")["revoked_at"] is not None
    assert answer("revoke", listed[1]["id"])["name"] == "bob"
    assert answer("list") == []
    assert len(answer("list", "--all")) == 2


def test_the_text_of_a_key_is_shown_once_and_nothing_that_leads_to_it():
    made = key("create", "--name", "ann")
    text = made.stdout.strip()
    assert text.startswith("tml-")  # alone on stdout: KEY=$(palestra key create)
    assert "only its hash is stored" in made.stderr
    later = key("list").output + key("list", "--all", "--json").output + key("revoke", "ann").output
    assert text not in later
    assert "hash" not in later
    assert "ann" in later


def test_the_first_key_says_whom_it_locks_out():
    first = key("create", "--name", "ann")
    assert "this is the first key" in first.stderr
    assert "401" in first.stderr
    assert "--owner local" in first.stderr
    assert "first key" not in key("create", "--name", "bob").stderr
    key("revoke", "ann")
    key("revoke", "bob")
    assert "first key" not in key("create", "--name", "cid").stderr  # the door was closed already


def test_the_first_key_says_so_in_json_too(tmp_path):
    assert "first key" in answer("create", "--state", tmp_path / "s")["note"]
    assert "note" not in answer("create", "--state", tmp_path / "s")


def test_a_key_made_beside_a_running_server_is_known_to_it(tmp_path):
    url = f"sqlite:///{tmp_path}/s/palestra.db"
    with Store.open(url) as store:
        made = answer("create", "--state", "s")
        found = store.read_now(lambda conn: find_key(conn, made["key"], now=0.0))
        assert found is not None
        assert found.name == made["name"] == made["owner"]
        answer("revoke", made["id"], "--database", url)
        assert store.read_now(lambda conn: find_key(conn, made["key"], now=0.0)) is None


def test_the_servers_config_file_says_where_the_keys_are():
    Path("serve.yaml").write_text("state: there\n")
    answer("create", "-c", "serve.yaml")
    assert Path("there/palestra.db").is_file()


def test_a_number_means_an_id_and_else_a_name():
    answer("create", "--name", "7")
    assert answer("revoke", "7")["id"] == 1


def test_names_made_up_differ():
    assert answer("create")["name"] != answer("create")["name"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["revoke", "nobody"], 3, "no key in use is called 'nobody'; to see them: palestra key list"),
        (["create", "--name", "ann"], 1, "already has the name 'ann'"),
        (["list", "--state", "elsewhere"], 2, "elsewhere/palestra.db; name the server's with --state DIR"),
        (["list", "--database", "mysql://x"], 2, "unknown kind of database 'mysql'; there are: sqlite, postgresql"),
        (["list", "-c", "no.yaml"], 2, "no.yaml: cannot be read as a config"),
    ],
)
def test_what_cannot_be_done_is_one_line(args, code, message):
    answer("create", "--name", "ann")
    result = key(*args)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not Path("elsewhere").exists()


def test_a_list_without_live_keys_says_that_nobody_gets_in():
    answer("create", "--name", "ann")
    key("revoke", "ann")
    assert (
        key("list").stdout == "all keys are revoked, so the server cannot be used; to make one: palestra key create\n"
    )


def test_unknown_right_is_a_usage_error():
    result = key("create", "--right", "king")
    assert result.exit_code == 2
    assert "trainer" in result.output
