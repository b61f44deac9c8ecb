"""Sessions: created once, kept alive by heartbeats, ended once, found again."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest
from sqlalchemy import Connection

from palestra.store import Store
from palestra.store.queries import sessions
from palestra.store.queries.checkpoints import begin_checkpoint, complete_checkpoint
from palestra.store.queries.models import insert_model
from palestra.store.queries.session_search import search_sessions
from palestra.store.records import (
    CheckpointKind,
    ModelRow,
    PendingSave,
    SearchCursor,
    SessionRow,
    SessionSearch,
    SessionStatus,
    StatusFilter,
)
from palestra.types import LoraConfig


def session(session_id: str, at: float = 0.0, **fields: object) -> SessionRow:
    return msgspec.structs.replace(
        SessionRow(session_id=session_id, owner="me", created_at=at, last_heartbeat_at=at), **fields
    )


def insert(store: Store, *new: SessionRow) -> None:
    store.write_now(lambda conn: [sessions.insert_session(conn, s) for s in new])


def found(store: Store, **search: object) -> list[str]:
    page = store.read_now(lambda conn: search_sessions(conn, SessionSearch(**search)))  # pyright: ignore
    return [summary.session.session_id for summary in page.sessions]


def test_repeated_creation_keeps_the_first(tables_store: Store) -> None:
    first = session("s", 1.25, tags=["a"], user_metadata={"k": [1, {"x": None}]}, display_name="n", project_id="p")
    assert tables_store.write_now(lambda conn: sessions.insert_session(conn, first)) == first
    assert tables_store.write_now(lambda conn: sessions.insert_session(conn, session("s", 9.0))) == first
    assert tables_store.read_now(lambda conn: sessions.get_session(conn, "s")) == first
    assert tables_store.read_now(lambda conn: sessions.get_session(conn, "other")) is None


def test_heartbeats_move_forward_only_and_only_the_living(tables_store: Store) -> None:
    insert(tables_store, session("a"), session("b"), session("ended"))

    def beat(conn: Connection) -> list[float]:
        sessions.expire_session(conn, "ended")
        sessions.touch_sessions(conn, {"a": 5.0, "b": 7.0, "ended": 7.0, "unknown": 7.0})
        sessions.touch_sessions(conn, {"b": 6.0})
        sessions.touch_sessions(conn, {})
        stored = [sessions.get_session(conn, name) for name in ("a", "b", "ended")]
        return [s.last_heartbeat_at for s in stored if s is not None]

    assert tables_store.write_now(beat) == [5.0, 7.0, 0.0]
    assert len(tables_store.read_now(sessions.active_sessions)) == 2


def test_the_first_end_of_a_session_is_its_end(tables_store: Store) -> None:
    insert(tables_store, session("s"))

    def end(conn: Connection) -> list[bool]:
        return [
            sessions.finish_session(conn, "s", reason="success", detail="all done"),
            sessions.finish_session(conn, "s", reason="errored", detail=None),
            sessions.expire_session(conn, "s"),
            sessions.finish_session(conn, "unknown", reason="success", detail=None),
        ]

    assert tables_store.write_now(end) == [True, False, False, False]
    stored = tables_store.read_now(lambda conn: sessions.get_session(conn, "s"))
    assert stored == session("s", status=SessionStatus.FINISHED, finish_reason="success", finish_detail="all done")


def test_lists_are_paged_newest_first_with_a_total(tables_store: Store) -> None:
    insert(tables_store, *(session(f"s{i}", float(i), owner="me" if i % 2 else "you") for i in range(10)))
    page = tables_store.read_now(lambda conn: sessions.list_sessions(conn, owner="me", limit=2, offset=1))
    assert [s.session_id for s in page.items] == ["s7", "s5"]
    assert page.total == 5
    assert tables_store.read_now(lambda conn: sessions.list_sessions(conn, offset=9)).total == 10


def test_search_by_name_or_id(tables_store: Store) -> None:
    insert(
        tables_store,
        session("s1", display_name="Nightly Run of gsm8k"),
        session("s2", display_name="a nightly 100% walk"),
        session("s3"),
    )
    assert found(tables_store, display_name="nightly") == ["s2", "s1"]
    assert found(tables_store, display_name="GSM8K night") == ["s1"]
    assert found(tables_store, display_name="100%") == ["s2"]
    assert found(tables_store, display_name="1_0") == []
    assert found(tables_store, session_id="s3") == ["s3"]
    assert found(tables_store, session_id="s3", display_name="gsm8k") == ["s3", "s1"]
    assert found(tables_store) == ["s3", "s2", "s1"]


@pytest.mark.parametrize("key", ["plain", 'quo"te', "dot.ted", "$", "bra[0]cket", "back\\slash", "", "ünï"])
def test_search_by_metadata_takes_any_key(tables_store: Store, key: str) -> None:
    insert(
        tables_store,
        session("s1", user_metadata={key: "v", "n": "1"}),
        session("s2", user_metadata={key: "w", "n": "1"}),
        session("s3", user_metadata={"n": "1"}),
    )
    assert found(tables_store, user_metadata={key: "v"}) == ["s1"]
    assert found(tables_store, user_metadata={"n": "1", key: "w"}) == ["s2"]
    assert found(tables_store, user_metadata={key: "x"}) == []


def test_search_by_owner_project_and_status(tables_store: Store) -> None:
    insert(
        tables_store,
        session("s1", owner="a", project_id="p"),
        session("s2", owner="b", status=SessionStatus.FINISHED, finish_reason="success"),
        session("s3", owner="c", status=SessionStatus.FINISHED, finish_reason="errored"),
        session("s4", owner="c", status=SessionStatus.EXPIRED, project_id="q"),
    )
    assert found(tables_store, owners=["a", "c"]) == ["s4", "s3", "s1"]
    assert found(tables_store, owners=[]) == []
    assert found(tables_store, project_ids=["p"]) == ["s1"]
    finished = StatusFilter(status=SessionStatus.FINISHED)
    errored = StatusFilter(status=SessionStatus.FINISHED, finish_reasons=["errored"])
    active = StatusFilter(status=SessionStatus.ACTIVE)
    assert found(tables_store, statuses=[finished]) == ["s3", "s2"]
    assert found(tables_store, statuses=[errored, active]) == ["s3", "s1"]
    tables_store.write_now(lambda conn: sessions.set_session_project(conn, "s2", "p"))
    assert found(tables_store, project_ids=["p"]) == ["s2", "s1"]


def test_search_pages_through_all_though_the_cursor_was_a_datetime(tables_store: Store) -> None:
    times = [1_794_000_000.1234567, 1_794_000_000.1234567, 1_794_000_000.9999999, 5.0]
    insert(tables_store, *(session(f"s{i}", time) for i, time in enumerate(times)))
    seen: list[str] = []
    cursor = None
    while True:
        search = SessionSearch(limit=1, cursor=cursor)
        page = tables_store.read_now(lambda conn, s=search: search_sessions(conn, s))
        seen += [summary.session.session_id for summary in page.sessions]
        if page.next_cursor is None:
            break
        sent = datetime.fromtimestamp(page.next_cursor.created_at, UTC).isoformat()
        cursor = SearchCursor(
            created_at=datetime.fromisoformat(sent).timestamp(), session_id=page.next_cursor.session_id
        )
        insert(tables_store, session(f"newer{len(seen)}", 2e9))  # does not disturb
    assert seen == ["s2", "s1", "s0", "s3"]


def test_summaries_count_completed_checkpoints(tables_store: Store) -> None:
    insert(tables_store, session("s1"), session("s2"))

    def fill(conn: Connection) -> None:
        lora = LoraConfig()
        for model_id in ("m1", "m2"):
            insert_model(
                conn,
                ModelRow(
                    model_id=model_id,
                    session_id="s1",
                    owner="me",
                    base_model="b",
                    lora=lora,
                    created_at=0.0,
                    last_request_at=0.0,
                ),
            )
            for seq_id in range(3):
                save = PendingSave(
                    request_id=f"{model_id}-{seq_id}",
                    model_id=model_id,
                    kind=CheckpointKind.WEIGHTS,
                    name=str(seq_id),
                    seq_id=seq_id,
                    folder=f"/{model_id}/{seq_id}",
                    created_at=0.0,
                )
                begin_checkpoint(conn, save, owner="me", base_model="b", lora=lora)
                if seq_id:
                    complete_checkpoint(conn, save.request_id, size_bytes=1 << 40, now=1.0)

    tables_store.write_now(fill)
    page = tables_store.read_now(lambda conn: search_sessions(conn, SessionSearch()))
    assert [(s.checkpoints_count, s.checkpoint_storage_bytes) for s in page.sessions] == [(0, 0), (4, 4 << 40)]
