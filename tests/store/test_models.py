"""Models and samplers: created once, settled forward only, listed by owner."""

from __future__ import annotations

import msgspec
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from palestra.store import Store
from palestra.store.queries import models, samplers
from palestra.store.queries.sessions import insert_session
from palestra.store.records import ModelRow, ModelStatus, SamplerRow, SamplerStatus, SessionRow
from palestra.types import LoraConfig


def model(model_id: str, at: float = 0.0, **fields: object) -> ModelRow:
    new = ModelRow(
        model_id=model_id,
        session_id="s",
        owner="me",
        base_model="qwen",
        lora=LoraConfig(rank=8, seed=3, train_mlp=False),
        created_at=at,
        last_request_at=at,
    )
    return msgspec.structs.replace(new, **fields)


def sampler(sampler_id: str, **fields: object) -> SamplerRow:
    new = SamplerRow(sampler_id=sampler_id, session_id="s", owner="me", base_model="qwen", created_at=0.0)
    return msgspec.structs.replace(new, **fields)


@pytest.fixture
def store(tables_store: Store) -> Store:
    def fill(conn: Connection) -> None:
        for session_id, project in [("s", None), ("t", "p")]:
            session = SessionRow(
                session_id=session_id, owner="me", created_at=0.0, last_heartbeat_at=0.0, project_id=project
            )
            insert_session(conn, session)

    tables_store.write_now(fill)
    return tables_store


def test_repeated_creation_keeps_the_first(store: Store) -> None:
    first = model("s:train:0", 1.0, user_metadata={"renderer": "qwen"})
    assert store.write_now(lambda conn: models.insert_model(conn, first)) == first
    again = model("s:train:0", 2.0, base_model="other")
    assert store.write_now(lambda conn: models.insert_model(conn, again)) == first
    assert store.read_now(lambda conn: models.get_model(conn, "s:train:0")) == first


def test_a_model_needs_its_session(store: Store) -> None:
    with pytest.raises(IntegrityError):
        store.write_now(lambda conn: models.insert_model(conn, model("m", session_id="nobody's")))


def test_snapshots_and_requests_advance_and_never_go_back(store: Store) -> None:
    def work(conn: Connection) -> list[tuple[int, float]]:
        for name in ("a", "b"):
            models.insert_model(conn, model(name))
        models.advance_snapshots(conn, {"a": 7, "b": 0, "unknown": 3})
        models.advance_snapshots(conn, {"a": 4, "b": 1 << 40})
        models.touch_models(conn, {"a": 3.0, "b": 4.0})
        models.touch_models(conn, {"a": 2.0})
        models.advance_snapshots(conn, {})
        models.touch_models(conn, {})
        found = [models.get_model(conn, name) for name in ("a", "b")]
        return [(m.snapshot_seq, m.last_request_at) for m in found if m is not None]

    assert store.write_now(work) == [(7, 3.0), (1 << 40, 4.0)]


def test_lists_by_owner_project_session_and_status(store: Store) -> None:
    def fill(conn: Connection) -> None:
        for i in range(6):
            owner, session = ("me", "s") if i % 2 else ("you", "t")
            models.insert_model(conn, model(f"m{i}", float(i), owner=owner, session_id=session))
        models.set_model_status(conn, "m1", ModelStatus.READY)
        models.set_model_status(conn, "m2", ModelStatus.FAILED, error="out of memory")
        models.mark_corrupted(conn, "m3")

    store.write_now(fill)
    mine = store.read_now(lambda conn: models.list_models(conn, owner="me", limit=2))
    assert ([m.model_id for m in mine.items], mine.total) == (["m5", "m3"], 3)
    assert mine.items[1].corrupted
    in_project = store.read_now(lambda conn: models.list_models(conn, project_id="p", limit=1, offset=1))
    assert ([m.model_id for m in in_project.items], in_project.total) == (["m2"], 3)
    assert store.read_now(models.list_models).total == 6
    of_session = store.read_now(lambda conn: models.models_of_session(conn, "t"))
    assert [m.model_id for m in of_session] == ["m0", "m2", "m4"]
    assert of_session[1].error == "out of memory"
    ended = store.read_now(lambda conn: models.models_in(conn, [ModelStatus.READY, ModelStatus.FAILED]))
    assert [m.model_id for m in ended] == ["m1", "m2"]
    assert not store.write_now(lambda conn: models.set_model_status(conn, "unknown", ModelStatus.READY))


def test_samplers_come_once_and_leave_a_record(store: Store) -> None:
    kept = sampler("kept", model_id="m", seq_id=7)
    saved = sampler("saved", model_path="tinker://m/weights/x", folder="/x")

    def fill(conn: Connection) -> None:
        assert samplers.insert_sampler(conn, kept) == kept
        assert samplers.insert_sampler(conn, sampler("kept", seq_id=9)) == kept
        assert samplers.insert_sampler(conn, sampler("again", model_id="m", seq_id=7)) == kept
        samplers.insert_sampler(conn, saved)
        samplers.insert_sampler(conn, sampler("base"))

    store.write_now(fill)
    store.write_now(lambda conn: samplers.drop_samplers(conn, ["saved", "base", "unknown"]))
    store.write_now(lambda conn: samplers.drop_samplers(conn, []))
    assert store.read_now(samplers.live_samplers) == [kept]
    assert [s.status for s in store.read_now(lambda conn: samplers.samplers_of_session(conn, "s"))] == [
        SamplerStatus.GONE,
        SamplerStatus.LIVE,
        SamplerStatus.GONE,
    ]
    assert store.read_now(lambda conn: samplers.get_sampler(conn, "unknown")) is None
