"""A gradient summed by shards: close to the direct sum, the same bits after a crash, never mixed by accident."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from palestra.engine.files import read_tensors, write_tensors
from palestra.engine.snapshots import StateRefused
from palestra.types import LoraConfig
from palestra.types.engine import Pass
from tests.engine.conftest import Desk
from tests.engine.test_recovery import kill_and_compare


@pytest.fixture
def make_desk(get_backend: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(gradient_shards: int, name: str = "") -> Desk:
        backend = get_backend(micro_batch_tokens=32, gradient_shards=gradient_shards)
        made.append(Desk(tmp_path / (name or f"gradient_shards{gradient_shards}"), backend))
        return made[-1]

    yield make
    for desk in made:
        desk.files.close()


def gradient(desk: Desk, model_id: str) -> np.ndarray:
    return desk.backend.image(desk.table.models[model_id].weights).tensors["grads"]


def passes(desk: Desk, *sizes: int) -> None:
    desk.create("a")
    for seed, n in enumerate(sizes):
        desk.train("a", desk.a_pass(n, seed=seed))
        desk.run()


def test_a_request_of_one_micro_batch_has_the_bits_of_the_direct_sum(make_desk):
    one, eight = make_desk(1), make_desk(8)
    for desk in (one, eight):
        passes(desk, 1)
    assert np.array_equal(gradient(one, "a"), gradient(eight, "a"))


@pytest.mark.parametrize("gradient_shards", [pytest.param(2, marks=pytest.mark.slow), 8])
def test_gradient_shards_agree_with_the_direct_sum(make_desk, gradient_shards):
    one, many = make_desk(1), make_desk(gradient_shards)
    for desk in (one, many):
        passes(desk, 30, 3, 11)
    assert [m.outcome for m in one.sent] == [m.outcome for m in many.sent]
    expected = gradient(one, "a")
    np.testing.assert_allclose(gradient(many, "a"), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_trees_stay_whole_and_no_rank_has_more_rows_by_more_than_one_tree(get_backend):
    """Small groups and large ones: a rank that had the first half of them would have half as many rows as the other."""
    backend = get_backend(micro_batch_tokens=128, gradient_shards=4)
    sizes = [(2 + n % 2, 40 + 40 * (n % 2)) for n in range(12)]
    groups = [Desk.a_pass(n, seed=i, shared=shared) for i, (n, shared) in enumerate(sizes)]
    data = [datum for group in groups for datum in group.data]
    owners = [n for n, group in enumerate(groups) for _ in group.data]
    plan = backend.plan(backend.create(LoraConfig(rank=4)), Pass(data=data, loss="cross_entropy"))
    parts_of = [{part for part, batch in enumerate(plan) for i in batch.numbers if owners[i] == n} for n in range(12)]
    assert [len(parts) for parts in parts_of] == [1] * 12
    rows = [part.tokens for part in plan]
    assert sum(rows) < 0.6 * sum(len(datum.chunks[0].tokens) for datum in data)
    for ranks in (2, 4):
        loads = [0] * ranks
        for part in plan:
            loads[part.gradient_shard % ranks] += part.tokens
        assert max(loads) - min(loads) <= max(rows), (loads, rows)


def test_a_failed_request_leaves_the_gradient_of_those_before(make_desk, monkeypatch):
    desk = make_desk(8)
    passes(desk, 20)
    before = gradient(desk, "a")
    backward, calls = desk.backend.trainer.backward, []

    def fail_later(done: Any) -> None:
        backward(done)
        calls.append(done)
        if len(calls) == 5:
            raise RuntimeError("broken on purpose")

    monkeypatch.setattr(desk.backend.trainer, "backward", fail_later)
    desk.train("a", desk.a_pass(20, seed=5))
    desk.run()
    assert "broken on purpose" in desk.sent[-1].outcome.message
    assert np.array_equal(gradient(desk, "a"), before)


def test_state_folder_of_another_number_of_gradient_shards_is_refused_and_kept(make_desk):
    desk = make_desk(8, "state")
    passes(desk, 3)
    desk.snapshots.take_all()
    other = make_desk(4, "state")
    with pytest.raises(
        StateRefused, match=r"the model a was trained with gradient_shards=8.*models\.0\.gradient_shards=8"
    ):
        other.snapshots.restore()
    other.snapshots.allow_shard_mismatch = True
    other.snapshots.restore()
    assert np.array_equal(gradient(other, "a"), gradient(desk, "a"))


def test_a_state_folder_from_before_the_key_was_renamed_opens(make_desk):
    desk = make_desk(8, "state")
    passes(desk, 3)
    desk.snapshots.take_all()
    desk.files.close()
    for file in desk.snapshots.folder.iterdir():
        tensors, metadata = read_tensors(file)
        assert '"gradient_shards":8' in metadata
        write_tensors(file, tensors, metadata.replace('"gradient_shards":8', '"strands":8'))
    again = make_desk(8, "state")
    again.snapshots.restore()
    assert np.array_equal(gradient(again, "a"), gradient(desk, "a"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_workers_with_gradient_shards_killed_at_any_moment_end_at_the_same_bits(
    drivers: Callable[..., Any], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    kill_and_compare(drivers, rng.uniform(0.0, 0.4, 6).tolist(), rounds=6, gradient_shards=8)
