"""Quotas on rows hold in the transaction that adds them."""

from __future__ import annotations

import pytest

from palestra.store import Store
from palestra.store.errors import QuotaExceeded
from palestra.store.queries import checkpoints, models
from palestra.store.queries.quotas import (
    check_checkpoint_bytes,
    insert_model_within,
    list_quotas,
    set_quota,
    stored_bytes,
)
from palestra.store.queries.sessions import insert_session
from palestra.store.records import (
    CheckpointKey,
    CheckpointKind,
    CheckpointRow,
    CheckpointStatus,
    ModelRow,
    ModelStatus,
    PendingSave,
    SessionRow,
)
from palestra.types import LoraConfig

LORA = LoraConfig(rank=4)


@pytest.fixture
def store(tables_store: Store) -> Store:
    session = SessionRow(session_id="s", owner="ann", created_at=0.0, last_heartbeat_at=0.0)
    tables_store.write_now(lambda c: insert_session(c, session))
    return tables_store


def model(name: str, owner: str = "ann") -> ModelRow:
    about = {"session_id": "s", "base_model": "b", "lora": LORA, "created_at": 0.0, "last_request_at": 0.0}
    return ModelRow(model_id=name, owner=owner, **about)


def test_an_owner_has_as_many_models_in_training_as_it_may(store: Store) -> None:
    def add(name: str, limit: int | None, owner: str = "ann") -> ModelRow:
        return store.write_now(lambda c: insert_model_within(c, model(name, owner), limit))

    add("a", 2)
    add("b", 2)
    with pytest.raises(QuotaExceeded, match=r"'ann' has 2 models in training, and its quota allows 2"):
        add("c", 2)
    assert add("a", 2) == model("a")  # it is there already
    add("d", 2, owner="bob")
    store.write_now(lambda c: models.set_model_status(c, "a", ModelStatus.UNLOADED))
    add("c", 2)
    add("e", None)


def test_checkpoints_count_by_owner_and_what_one_replaces_does_not(store: Store) -> None:
    def key(name: str, model_id: str = "a") -> CheckpointKey:
        return CheckpointKey(model_id, CheckpointKind.WEIGHTS, name)

    def keep(name: str, size: int, owner: str = "ann", model_id: str = "a") -> None:
        row = CheckpointRow(
            model_id=model_id,
            kind=CheckpointKind.WEIGHTS,
            name=name,
            owner=owner,
            status=CheckpointStatus.COMPLETED,
            folder=name,
            base_model="b",
            lora=LORA,
            request_id=name,
            seq_id=0,
            created_at=0.0,
            size_bytes=size,
        )
        store.write_now(lambda c: checkpoints.add_checkpoint(c, row))

    def check(name: str, limit: int | None, size: int | None = None) -> bool:
        try:
            store.write_now(lambda c: check_checkpoint_bytes(c, key(name), "ann", limit, size_bytes=size))
        except QuotaExceeded:
            return False
        return True

    store.write_now(lambda c: models.insert_model(c, model("a")))
    assert check("first", 1)  # of which nobody knows the size
    assert not check("first", 1, size=2)
    keep("first", 100)
    keep("other", 1000, owner="bob", model_id="x")
    assert store.read_now(stored_bytes) == {"ann": 100, "bob": 1000}
    assert check("second", None)
    assert check("second", 200)
    assert not check("second", 199)  # it will be as large as the first
    assert not check("second", 100)
    assert check("first", 100)  # it takes the place of itself
    save = PendingSave(
        request_id="r", model_id="a", kind=CheckpointKind.WEIGHTS, name="n", seq_id=1, folder="f", created_at=0.0
    )
    assert not store.read_now(lambda c: checkpoints.is_begun(c, save))
    store.write_now(lambda c: checkpoints.begin_checkpoint(c, save, owner="ann", base_model="b", lora=LORA))
    assert store.read_now(lambda c: checkpoints.is_begun(c, save))
    assert not check("second", 299)  # one more is being written
    assert check("second", 300)


def test_limits_that_nobody_could_wait_for_are_refused(store: Store) -> None:
    for limits in ({"pending_samples": 0}, {"models": -1}):
        with pytest.raises(ValueError, match="the least is"):
            store.write_now(lambda c, limits=limits: set_quota(c, "ann", limits))
    assert store.read_now(list_quotas) == []
