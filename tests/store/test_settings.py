"""Settings: made once, or replaced, and found by how their names begin."""

from __future__ import annotations

from palestra.store import Store
from palestra.store.queries.settings import delete_settings, get_setting, put_setting, setting_once, settings_under


def test_a_setting_is_made_once_or_replaced(tables_store: Store) -> None:
    def write(name: str, value: str) -> None:
        tables_store.write_now(lambda conn: put_setting(conn, name, value))

    assert tables_store.write_now(lambda conn: setting_once(conn, "secret", lambda: "a")) == "a"
    assert tables_store.write_now(lambda conn: setting_once(conn, "secret", lambda: "b")) == "a"
    write("engine:alice", "1")
    write("engine:alice", "2")
    write("engine:%", "3")
    write("engineer", "4")
    assert tables_store.read_now(lambda conn: get_setting(conn, "engine:alice")) == "2"
    assert tables_store.read_now(lambda conn: settings_under(conn, "engine:")) == {"engine:alice": "2", "engine:%": "3"}
    assert tables_store.read_now(lambda conn: settings_under(conn, "engine:%")) == {"engine:%": "3"}
    tables_store.write_now(lambda conn: delete_settings(conn, ["engine:%", "nothing"]))
    assert tables_store.read_now(lambda conn: settings_under(conn, "engine")) == {"engine:alice": "2", "engineer": "4"}
