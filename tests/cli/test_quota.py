"""`palestra quota`: limits of owners beside a server, and of all other owners."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.store import Store
from palestra.store.queries.quotas import effective_quota, list_quotas


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def palestra(*args: object) -> Result:
    return CliRunner().invoke(main, list(map(str, args)), prog_name="palestra")


def answer(*args: object):
    result = palestra(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_limits_are_set_listed_and_removed():
    assert answer("quota", "set", "ann", "models=4", "tokens_per_day=2M")["tokens_per_day"] == 2_000_000
    assert answer("quota", "set", "ann", "checkpoint_bytes=1.5GiB", "models=none")["models"] is None
    answer("key", "create", "--name", "bob", "--owner", "team", "--quota", "models=2", "--expires", "30d")
    listed = {one["owner"]: one for one in answer("quota", "list")}
    assert listed["ann"]["checkpoint_bytes"] == 3 << 29
    assert listed["ann"]["tokens_per_day"] == 2_000_000
    assert listed["team"]["models"] == 2
    assert answer("key", "list")[0]["expires_at"] is not None
    assert "1,610,612,736" in palestra("quota", "list").stdout
    answer("quota", "delete", "ann")
    assert [one["owner"] for one in answer("quota", "list")] == ["team"]
    answer("quota", "set", "team", "models=none")
    assert answer("quota", "list") == []


def test_what_an_owner_has_not_is_what_everybody_has():
    palestra("quota", "set", "*", "models=1", "pending_samples=5")
    palestra("quota", "set", "ann", "models=3")
    assert "all other owners" in palestra("quota", "list").stdout
    with Store.open("sqlite:///.palestra/palestra.db") as store:
        quotas = {one.owner: one for one in store.read_now(list_quotas)}
    assert [effective_quota(quotas, name).models for name in ("ann", "bob")] == [3, 1]
    assert [effective_quota(quotas, name).pending_samples for name in ("ann", "bob")] == [5, 5]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["quota", "set", "ann", "model=4"], 2, "unknown limit 'model'; did you mean"),
        (["quota", "set", "ann", "models=few"], 2, "models: 'few' is not an amount"),
        (["quota", "set", "ann", "pending_bytes=0"], 2, "pending_bytes: the least is 1"),
        (["quota", "delete", "nobody"], 3, "'nobody' has no limits of its own"),
        (["key", "create", "--quota", "pending_samples=0"], 2, "pending_samples: the least is 1"),
        (["key", "create", "--expires", "soon"], 2, "'soon' is not a duration"),
        (["usage", "--server", "http://127.0.0.1:1"], 4, "does not answer"),
        (["usage", "--since", "soon"], 2, "--since: 'soon' is neither a day"),
    ],
)
def test_what_cannot_be_done_is_said(args, code, message):
    answer("key", "create", "--name", "ann")
    result = palestra(*args)
    assert result.exit_code == code, result.output
    assert message in result.stderr
