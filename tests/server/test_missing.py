"""Which numbers of a model are missed after a restart, and when that is its end."""

from __future__ import annotations

from typing import Any

from palestra.server.core.futures import RequestKind, TrainFuture
from palestra.server.core.training.models import TrackedModel
from palestra.store.journal.journal import Position
from palestra.types import LoraConfig


def restarted(*in_journal: int, snapshot_seq: int = -1, settled: tuple[int, ...] = ()) -> TrackedModel:
    nobody: Any = None
    model = TrackedModel("m", "s", "o", "b", LoraConfig(), nobody, snapshot_seq, next_seq=snapshot_seq + 1)
    for n in in_journal:
        at = Position(1, n, 1)
        kind = RequestKind.FORWARD
        model.add(TrainFuture(str(n), "o", b"", model_id="m", seq_id=n, kind=kind, reply={}, request_at=at))
    model.settled.update(settled)
    return model


def test_what_was_acknowledged_and_is_not_in_the_journal_is_missing() -> None:
    model = restarted(0, 1, 3, settled=(2,))
    model.find_missing(5)
    assert model.missing == [4, 5]
    model.take_ready()
    assert model.next_seq == 6  # the client goes on behind it
    assert model.why_lost(5) is None
    assert "lost request 5," in (model.why_lost(4) or "")
    assert "lost requests 4 to 5," in (model.why_lost(-1) or "")


def test_what_came_early_is_not_missing_nor_what_the_snapshots_have() -> None:
    model = restarted(4, 6, snapshot_seq=3)
    model.find_missing(4)
    assert model.missing == []
    assert model.why_lost(3) is None


def test_a_worker_behind_the_journal_has_lost_the_model() -> None:
    model = restarted(4, snapshot_seq=3)
    model.find_missing(4)
    assert "the journal begins after request 3" in (model.why_lost(2) or "")
