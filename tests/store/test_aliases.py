"""Aliases: each owner's own, moved and counted."""

from __future__ import annotations

from palestra.store import Store
from palestra.store.queries import aliases
from palestra.store.records import Alias


def put(store: Store, model: str, *, owner: str = "alice", name: str = "policy", now: float = 1.0) -> Alias:
    return store.write_now(lambda conn: aliases.put_alias(conn, owner=owner, name=name, model=model, now=now))


def drop(store: Store, *, owner: str, name: str = "policy") -> None:
    store.write_now(lambda conn: aliases.drop_alias(conn, owner=owner, name=name))


def found(store: Store) -> list[tuple[str, str, str, int]]:
    return [(a.owner, a.name, a.model, a.version) for a in store.read_now(aliases.list_aliases)]


def test_moves_are_counted_and_a_repeated_one_is_none(tables_store: Store) -> None:
    first = put(tables_store, "base", now=1.0)
    assert first == Alias(owner="alice", name="policy", model="base", created_at=1.0, updated_at=1.0, version=1)
    moved = put(tables_store, "s:sample:0", now=2.0)
    assert (moved.version, moved.created_at, moved.updated_at) == (2, 1.0, 2.0)
    assert put(tables_store, "s:sample:0", now=3.0) == moved
    assert tables_store.read_now(aliases.list_aliases) == [moved]


def test_a_name_is_its_owners_and_begins_anew_after_a_drop(tables_store: Store) -> None:
    for owner in ("alice", "bob"):
        put(tables_store, f"{owner}'s", owner=owner)
    put(tables_store, "other", name="a")
    put(tables_store, "moved")
    drop(tables_store, owner="bob", name="a")  # not his
    assert found(tables_store) == [
        ("alice", "a", "other", 1),
        ("alice", "policy", "moved", 2),
        ("bob", "policy", "bob's", 1),
    ]
    drop(tables_store, owner="alice")
    assert put(tables_store, "again").version == 1
    assert ("bob", "policy", "bob's", 1) in found(tables_store)


def test_aliases_are_there_when_the_store_opens_again(database_url: str) -> None:
    with Store.open(database_url) as store:
        kept = put(store, "base")
    with Store.open(database_url) as store:
        assert store.read_now(aliases.list_aliases) == [kept]
