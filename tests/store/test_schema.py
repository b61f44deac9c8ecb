"""Migrations lead to the tables we declare, on both databases."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, Table, inspect, select, text

from palestra.store import Store, StoreError, StoreLocked, StoreTooNew, schema, tables
from palestra.store.dialects import database_of
from palestra.store.queries.episodes import load_all
from palestra.store.queries.settings import get_setting, setting_once


def differences(conn: Connection) -> list[object]:
    options = {"compare_type": True, "compare_server_default": True}
    return list(compare_metadata(MigrationContext.configure(conn, opts=options), tables.metadata))


def test_new_and_migrated_databases_have_the_declared_tables(database_url: str) -> None:
    engine = database_of(database_url).writer()
    with engine.connect() as conn:
        with conn.begin():
            schema.bring_up_to_date(conn)
            new, declared = reflected(conn), differences(conn)
            for table in new:
                conn.execute(text(f"DROP TABLE {table} {'CASCADE' if engine.name == 'postgresql' else ''}"))
        with conn.begin():
            schema.migrate(conn)
            assert schema.is_current(conn)
            assert reflected(conn) == new
            assert declared == differences(conn) == []
    engine.dispose()


def reflected(conn: Connection) -> dict[str, object]:
    """Everything that the database knows about its tables: Alembic does not compare names of constraints."""
    found = inspect(conn)
    looks = (
        *(found.get_columns, found.get_pk_constraint, found.get_foreign_keys),
        *(found.get_unique_constraints, found.get_check_constraints, found.get_indexes),
    )
    return {table: [in_order(look(table)) for look in looks] for table in sorted(found.get_table_names())}


def in_order(parts: Any) -> list[str]:
    return sorted(map(str, parts if isinstance(parts, list) else [parts]))


def test_versions_are_those_of_the_migrations() -> None:
    script = ScriptDirectory(str(schema.MIGRATIONS))
    assert [step.revision for step in script.walk_revisions()] == schema.VERSIONS[::-1]


def test_alembic_is_imported_for_older_databases_only(tmp_path: Path) -> None:
    opened = f"""import sys
from palestra.store import Store
for _ in range(2):
    Store.open("sqlite:///{tmp_path}/x.db").close_now()
assert "alembic" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", opened], check=True, timeout=100)


def test_migrating_again_changes_nothing(store: Store) -> None:
    store.write_now(lambda conn: setting_once(conn, "a", lambda: "b"))
    assert store.read_now(schema.is_current)
    store.write_now(schema.migrate)
    assert store.read_now(lambda conn: get_setting(conn, "a")) == "b"


def test_a_store_opens_again_with_its_content(database_url: str) -> None:
    for expected in [None, "kept"]:
        with Store.open(database_url) as store:
            assert store.read_now(lambda conn: get_setting(conn, "x")) == expected
            store.write_now(lambda conn: setting_once(conn, "x", lambda: "kept"))


def test_a_database_with_a_log_of_episodes_opens_and_has_them_in_its_tables(database_url: str) -> None:
    """As a server of version 0007 left it."""
    left = json.loads((Path(__file__).parent / "data" / "episode_log_0007.json").read_text())
    engine = database_of(database_url).writer()
    with engine.connect() as conn:
        with conn.begin():
            schema.migrate(conn, "0007")
        with conn.begin():
            for name, rows in left["tables"].items():
                table = Table(name, MetaData(), autoload_with=conn)
                for row in rows:
                    conn.execute(table.insert().values({column: stored(column, row[column]) for column in row}))
    engine.dispose()
    with Store.open(database_url) as store:
        saved = msgspec.to_builtins(store.read_now(load_all))
        assert store.read_now(differences) == []
    assert {name: sorted(map(repr, rows)) for name, rows in saved.items()} == {
        name: sorted(map(repr, rows)) for name, rows in left["after"].items()
    }


def stored(column: str, value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"])
    return bool(value) if column.startswith("is_") else value


def test_a_newer_database_is_refused(database_url: str) -> None:
    with Store.open(database_url) as store:
        store.write_now(lambda conn: conn.execute(text("UPDATE alembic_version SET version_num = '9999'")))
    with pytest.raises(StoreTooNew, match="newer than this program") as error:
        Store.open(database_url)
    assert "\n" not in str(error.value)


def test_a_second_server_is_refused_and_the_cli_is_not(database_url: str) -> None:
    with Store.open(database_url) as server:
        with pytest.raises(StoreLocked, match="another server uses the database"):
            Store.open(database_url)
        with Store.open(database_url, lock=False) as cli:
            cli.write_now(lambda conn: setting_once(conn, "by", lambda: "cli"))
        assert server.read_now(lambda conn: get_setting(conn, "by")) == "cli"
        with pytest.raises(StoreLocked):  # the cli took nothing with it
            Store.open(database_url)
    Store.open(database_url).close_now()


def test_the_cli_may_come_first(database_url: str) -> None:
    with Store.open(database_url, lock=False) as cli, Store.open(database_url) as server:
        cli.write_now(lambda conn: setting_once(conn, "by", lambda: "cli"))
        assert server.read_now(lambda conn: get_setting(conn, "by")) == "cli"


def test_the_cli_does_not_migrate_under_a_running_server(database_url: str) -> None:
    with Store.open(database_url) as server:
        server.write_now(lambda conn: conn.execute(text("DELETE FROM alembic_version")))
        with pytest.raises(StoreLocked):
            Store.open(database_url, lock=False)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "not a database URL"),
        ("mysql://host/db", "unknown kind of database"),
        ("sqlite://", "needs a file"),
        ("sqlite:////proc/no/such.db", "cannot use the database file"),
        ("postgresql://nobody@127.0.0.1:1/none", "cannot open the database"),
    ],
)
def test_a_database_that_cannot_be_opened_says_why_in_one_line(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as error:
        Store.open(url)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_database_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"something else entirely" * 100)
    with pytest.raises(StoreError, match="not a database"):
        Store.open(f"sqlite:///{tmp_path}/x.db")


def test_database_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/x.db") as store:
        store.write_now(lambda conn: setting_once(conn, "secret", lambda: "s"))
        assert {file.stat().st_mode & 0o077 for file in tmp_path.glob("x.db*")} == {0}


def test_durability_settings_hold_on_the_writing_connection(tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path}/x.db") as store:
        for pragma, value in [("synchronous", 2), ("journal_mode", "wal"), ("foreign_keys", 1)]:
            found = store.write_now(lambda conn, p=pragma: conn.execute(text(f"PRAGMA {p}")).scalar_one())
            assert found == value


def test_setting_is_made_once(store: Store) -> None:
    made = iter(["first", "second"])
    assert store.write_now(lambda conn: setting_once(conn, "secret", lambda: next(made))) == "first"
    assert store.write_now(lambda conn: setting_once(conn, "secret", lambda: next(made))) == "first"
    assert store.read_now(lambda conn: conn.execute(select(tables.settings.c.value)).scalars().all()) == ["first"]
