"""What ended long ago and has no checkpoint leaves the database; everything else stays."""

from __future__ import annotations

from palestra.store import Store
from palestra.store.queries.checkpoints import begin_checkpoint, complete_checkpoint
from palestra.store.queries.models import get_model, insert_model
from palestra.store.queries.purge import purge
from palestra.store.queries.samplers import get_sampler, insert_sampler
from palestra.store.queries.sessions import get_session, insert_session
from palestra.store.records import (
    CheckpointKind,
    ModelRow,
    ModelStatus,
    PendingSave,
    SamplerRow,
    SamplerStatus,
    SessionRow,
)
from palestra.store.records import SessionStatus as Status
from palestra.types import LoraConfig

OLD, NOW = 100.0, 1000.0


def _fill(conn, name: str, *, status: Status, model: ModelStatus, at: float, saved: bool = False) -> None:
    insert_session(conn, SessionRow(session_id=name, owner="o", created_at=at, last_heartbeat_at=at, status=status))
    run = f"{name}:train:0"
    lora = LoraConfig(rank=4)
    insert_model(
        conn,
        ModelRow(
            model_id=run,
            session_id=name,
            owner="o",
            base_model="b",
            lora=lora,
            created_at=at,
            last_request_at=at,
            status=model,
        ),
    )
    gone = SamplerStatus.GONE if status != Status.ACTIVE else SamplerStatus.LIVE
    insert_sampler(
        conn,
        SamplerRow(
            sampler_id=f"{name}:sample:0", session_id=name, owner="o", base_model="b", created_at=at, status=gone
        ),
    )
    if saved:
        save = PendingSave(
            request_id=name,
            model_id=run,
            kind=CheckpointKind.WEIGHTS,
            name="c",
            seq_id=1,
            folder=f"/{name}",
            created_at=at,
        )
        begin_checkpoint(conn, save, owner="o", base_model="b", lora=lora)
        complete_checkpoint(conn, name, size_bytes=1, now=at)


def test_only_what_ended_long_ago_without_a_checkpoint_goes(store: Store) -> None:
    def work(conn) -> None:
        _fill(conn, "old", status=Status.FINISHED, model=ModelStatus.UNLOADED, at=OLD)
        _fill(conn, "new", status=Status.FINISHED, model=ModelStatus.UNLOADED, at=NOW)
        _fill(conn, "alive", status=Status.ACTIVE, model=ModelStatus.READY, at=OLD)
        _fill(conn, "saved", status=Status.EXPIRED, model=ModelStatus.UNLOADED, at=OLD, saved=True)
        purge(conn, 500.0)

    store.write_now(work)
    for name, stays in (("old", False), ("new", True), ("alive", True), ("saved", True)):
        assert (store.read_now(lambda c, n=name: get_session(c, n)) is not None) == stays, name
        assert (store.read_now(lambda c, n=name: get_model(c, f"{n}:train:0")) is not None) == stays, name
    assert store.read_now(lambda c: get_sampler(c, "old:sample:0")) is None
    assert store.read_now(lambda c: get_sampler(c, "alive:sample:0")) is not None
