"""One name for one thing, in all commands there are and in those to come."""

from __future__ import annotations

import re

import pytest

from tests.cli.tree import COMMANDS, GROUPS, TREE, options, palestra

# An address or a key that is not a server's of ours: a model's, as NeMo Gym calls them, and our own for others to use.
OTHER_ADDRESSES = {"--model-url", "--public-url", "--host"}
OTHER_KEYS = {"--model-api-key", "--tls-key"}
DEAD = "http://127.0.0.1:9"


def test_the_walk_finds_the_commands():
    for path in (("train",), ("episode", "play"), ("gym", "collect"), ("platform", "task", "list"), ("key", "revoke")):
        assert path in COMMANDS


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_a_server_is_called_server_and_its_key_is_called_key(path):
    names = options(COMMANDS[path])
    addresses = {name for name in names if re.search(r"url|uri|server|host|head|endpoint|address", name)}
    keys = {name for name in names if re.search(r"key|token$|secret|auth", name)}
    assert addresses <= {"--server"} | OTHER_ADDRESSES
    assert keys <= {"--key"} | OTHER_KEYS
    if "--server" in names:
        assert names["--server"].metavar == "URL"
        assert names["--key"].envvar in ("TINKER_API_KEY", "PALESTRA_GYM_KEY", "OPENAI_API_KEY")


def test_a_group_is_one_noun_in_the_singular():
    assert [" ".join(path) for path in GROUPS if path[-1].endswith("s")] == ["alias"]


@pytest.mark.parametrize("path", TREE, ids=" ".join)
def test_what_is_listed_shown_and_deleted_is_so_by_these_words(path):
    other_words = {"ls", "get", "describe", "drop", "remove", "rm", "del", "destroy", "purge"}
    assert not {*path} & other_words
    assert path[-1:] != ("revoke",) or path == ("key", "revoke")


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        (("episode", "list", "--url", DEAD), ("episode", "list", "--server", DEAD), "--url is now called --server"),
        (("gym", "status", "--head", DEAD), ("gym", "status", "--server", DEAD), "--head is now called --server"),
        (
            ("alias", "drop", "x", "--server", DEAD),
            ("alias", "delete", "x", "--server", DEAD),
            "`palestra alias drop` is now called `palestra alias delete`",
        ),
    ],
)
def test_an_old_name_works_and_warns(old, new, warning):
    first, second = palestra(*old), palestra(*new)
    warned, *rest = first.stderr.splitlines()
    assert warned == f"warning: {warning}; the old name will be removed"
    assert (rest, first.exit_code) == (second.stderr.splitlines(), second.exit_code)
    assert DEAD in second.stderr


@pytest.mark.parametrize(
    ("alias", "name"), [(("episodes",), ("episode",)), (("platform", "tasks"), ("platform", "task"))]
)
def test_the_plural_is_a_silent_alias_that_no_help_shows(alias, name):
    shown, same = palestra(*alias, "--help"), palestra(*name, "--help")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout == same.stdout
    assert f"│ {alias[-1]} " not in palestra(*alias[:-1], "--help").stdout


def test_the_command_line_wins_over_the_environment_by_either_name(monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:7")
    said = palestra("episode", "list").stderr
    assert "http://127.0.0.1:7 does not answer" in said
    assert said.count("is this its address (--server)?") == 1
    for name in ("--server", "--url"):
        assert f"{DEAD} does not answer" in palestra("episode", "list", name, DEAD).stderr
