"""One name for one thing, in all commands there are and in those to come."""

from __future__ import annotations

import re

import pytest

from tests.cli.tree import COMMANDS, GROUPS, TREE, options, palestra

# An address or a key that is not a server's of ours: a model's, as NeMo Gym calls them, and our own for others to use.
OTHER_ADDRESSES = {"--endpoint-proxy", "--model-url", "--public-url", "--host"}
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


NOT_OURS = {"--out", "--backend", "--seconds", "--inputs", "--force", "--wait-s", "--timeout-s", "--max-tasks", "--dir"}
"""Second names of --output, --sandbox, --timeout, --input, --overwrite, --wait, --limit and a folder's own."""
TWO_KINDS = {
    "--agent": "a name; in `gym new` that an agent is made",
    "--resume": "a run; for a gym's files, whose name is --output, a flag",
    "--solution": "what is played; in `platform task show` that it is shown",
}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_one_thing_has_one_name(path):
    names = options(COMMANDS[path])
    assert not {*names} & NOT_OURS
    assert not [name for name in names if name.endswith("-s")]  # the metavar says that these are seconds
    if "--state" in names:
        assert names["--state"].metavar == "DIR"
    if "--runs" in names:
        assert names["--runs"].metavar == "DIR"


def test_one_name_has_one_kind_of_value():
    kinds: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for name, option in options(command).items():
            is_number = option.type.name.startswith(("integer", "float", "duration"))
            kind = "flag" if option.is_flag else "number" if is_number else "text"
            kinds.setdefault(name, set()).add(kind)
    assert {name for name, found in kinds.items() if len(found) > 1} == {*TWO_KINDS}


def test_what_is_listed_and_shown_are_groups_of_one_noun():
    listed = {path[-1] for path in COMMANDS if len(path) == 2 and path[-1].endswith("s")}
    assert listed == {"datasets", "stats", "status", "messages"} & listed  # no plural lists what `list` would


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
        (
            ("episode", "list", "--state", "ended", "--server", DEAD),
            ("episode", "list", "--in-state", "ended", "--server", DEAD),
            "--state is now called --in-state",
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
    ("command", "old", "new"),
    [(("eval",), "--tasks", "--limit"), (("sandbox", "run", "true"), "--seconds", "--timeout")],
)
def test_a_value_under_an_old_name_is_checked_as_under_the_new(command, old, new):
    said = palestra(*command, old, "many").stderr
    assert said.startswith(f"warning: {old} is now called {new}")
    assert f"Invalid value for '{new}': 'many' is not a valid" in said
    assert f"{old} " not in palestra(*command[:2], "--help").stdout


def test_a_command_of_two_words_is_found_by_its_old_name():
    for old, new in (("agent tasks", "agent task list"), ("platform apps mail", "platform app show mail")):
        first, second = palestra(*old.split()), palestra(*new.split())
        assert "is now called" in first.stderr
        assert (first.stdout, first.exit_code) == (second.stdout, second.exit_code)


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
