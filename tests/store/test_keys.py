"""Keys: told once, kept as a hash, gone when revoked."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from sqlalchemy import Connection

from palestra.cli import main
from palestra.store import KeyExists, Store
from palestra.store.queries import keys
from palestra.store.records import Key, NewKey, Rights


def create(store: Store, name: str, rights: Rights = Rights.TRAINER) -> NewKey:
    return store.write_now(lambda conn: keys.create_key(conn, name=name, owner="me", rights=rights, now=1.0))


def find(store: Store, text: str) -> Key | None:
    return store.read_now(lambda conn: keys.find_key(conn, text, now=3.0))


def revoke(store: Store, which: int | str) -> Key | None:
    return store.write_now(lambda conn: keys.revoke_key(conn, which, now=2.0))


def test_a_key_is_found_by_its_text_and_not_stored_in_it(tables_store: Store) -> None:
    new = create(tables_store, "laptop", Rights.ADMIN)
    assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", new.text)
    assert find(tables_store, new.text) == new.key
    assert new.text[4:] not in str(msgspec.to_builtins(new.key))
    for wrong in ["", "tml-", new.text[:-1], new.text.upper(), new.key.key_hash]:
        assert find(tables_store, wrong) is None


def test_revoked_by_number_or_name(tables_store: Store) -> None:
    first, second = create(tables_store, "a"), create(tables_store, "b")
    assert (first.key.key_id, second.key.key_id) == (1, 2)
    assert revoke(tables_store, 1) == msgspec.structs.replace(first.key, revoked_at=2.0)
    assert find(tables_store, first.text) is None
    assert revoke(tables_store, "a") is None
    assert revoke(tables_store, "b") is not None
    assert revoke(tables_store, 7) is None
    assert tables_store.read_now(keys.list_keys) == []
    assert [k.key_id for k in tables_store.read_now(lambda conn: keys.list_keys(conn, revoked=True))] == [1, 2]


def test_the_last_use_of_a_key_is_kept_and_never_goes_back(tables_store: Store) -> None:
    used, unused = create(tables_store, "used"), create(tables_store, "unused")
    for at in (5.0, 3.0):
        tables_store.write_now(lambda conn, at=at: keys.touch_keys(conn, {used.key.key_id: at, 99: at}))
    tables_store.write_now(lambda conn: keys.touch_keys(conn, {}))
    assert [one.last_used_at for one in tables_store.read_now(keys.list_keys)] == [5.0, None]
    assert find(tables_store, unused.text) == unused.key


def test_a_name_in_use_is_refused_and_numbers_are_not_used_twice(tables_store: Store) -> None:
    create(tables_store, "a")
    with pytest.raises(KeyExists, match="key 1 already has the name 'a'"):
        create(tables_store, "a")
    revoke(tables_store, "a")
    assert create(tables_store, "a").key.key_id == 2


def test_server_and_cli_may_create_keys_at_once(database_url: str) -> None:
    with Store.open(database_url) as server, Store.open(database_url, lock=False) as cli:

        def many(store: Store, prefix: str) -> None:
            for i in range(10):
                create(store, f"{prefix}{i}")

        threads = [threading.Thread(target=many, args=(s, p)) for s, p in [(server, "server"), (cli, "cli")]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        def ids(conn: Connection) -> list[int]:
            return [key.key_id for key in keys.list_keys(conn)]

        assert server.read_now(ids) == list(range(1, 21))


def test_the_list_says_so_when_the_last_key_is_revoked(tmp_path: Path) -> None:
    """The door is closed then, unlike before the first key."""

    def key(*args: str) -> str:
        return CliRunner().invoke(main, ["key", *args, "--state", str(tmp_path)]).stdout

    key("create", "--name", "ann")
    key("revoke", "ann")
    assert key("list") == "all keys are revoked, so the server cannot be used; to make one: palestra key create\n"
    assert "ann" in key("list", "--all")


def test_a_rotated_key_has_two_texts_for_a_while_and_an_expired_one_none(tables_store: Store) -> None:
    store, first = tables_store, create(tables_store, "laptop")

    def rotate(now: float) -> NewKey:
        made = store.write_now(lambda conn: keys.rotate_key(conn, "laptop", now=now, grace_s=10.0))
        assert made is not None
        return made

    def is_good(key: NewKey, now: float) -> bool:
        found = store.read_now(lambda conn: keys.find_key(conn, key.text, now=now))
        return found is not None and found.key_id == first.key.key_id

    second = rotate(100.0)
    assert [is_good(first, now) for now in (105.0, 110.0)] == [True, False]
    assert is_good(second, 1e9)
    third = rotate(102.0)
    assert [is_good(key, 103.0) for key in (first, second, third)] == [False, True, True]
    short = store.write_now(
        lambda conn: keys.create_key(conn, name="short", owner="me", rights=Rights.TRAINER, now=1.0, expires_at=5.0)
    )
    assert [find_at(store, short.text, now) is not None for now in (4.9, 5.0)] == [True, False]
    assert store.read_now(lambda conn: keys.valid_key_ids(conn, 4.0)) == {1, 2}
    assert store.read_now(lambda conn: keys.valid_key_ids(conn, 5.0)) == {1}
    assert store.write_now(lambda conn: keys.rotate_key(conn, 2, now=6.0, grace_s=0.0)) is None
    anew = store.write_now(  # the name of an expired key is free
        lambda conn: keys.create_key(conn, name="short", owner="me", rights=Rights.TRAINER, now=6.0)
    )
    for key in (anew, short):  # the one in use is meant first
        gone = store.write_now(lambda conn: keys.revoke_key(conn, "short", now=7.0))
        assert gone is not None
        assert gone.key_id == key.key.key_id


def find_at(store: Store, text: str, now: float) -> Key | None:
    return store.read_now(lambda conn: keys.find_key(conn, text, now=now))
