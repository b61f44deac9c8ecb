"""Snapshots: when they are taken, what they hold, what comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from palestra.engine.files import FileDamaged, id_of, name_of, read_tensors, write_tensors
from palestra.types import LoraConfig
from palestra.types.engine import CreateModel, Snapshotted, Trained


@pytest.fixture
def desks(tmp_path: Path, get_backend: Callable[..., Any], desk: Any) -> Iterator[Callable[..., Any]]:
    """Each of them a life of a worker on the same state folder."""
    made: list[Any] = []

    def make(**options: Any) -> Any:
        made.append(type(desk)(tmp_path / "lives", get_backend(micro_batch_tokens=64), **options))
        made[-1].snapshots.restore()
        return made[-1]

    yield make
    for one in made:
        one.files.close()


def script(desk: Any) -> list[Any]:
    return [
        CreateModel(lora=LoraConfig(rank=4, seed=1)),
        desk.a_pass(4, seed=1),
        desk.optim,
        desk.a_pass(5, seed=2),
        desk.a_pass(3, seed=3),
        desk.optim,
        desk.a_pass(2, seed=4),
        desk.a_pass(2, seed=5, forward_only=True),
        desk.optim,
    ]


def test_going_on_from_a_snapshot_gives_the_same_bits_at_every_request(desks: Callable[..., Any]) -> None:
    undisturbed = desks()
    operations = script(undisturbed)
    for operation in operations:
        undisturbed.train("a", operation)
    undisturbed.run()
    for cut in range(1, len(operations)):
        life = desks()
        for operation in operations[:cut]:
            life.train("b", operation)
        life.run()
        life.snapshots.take_all()
        next_life = desks()
        model = next_life.table.models["b"]
        assert (model.received_seq, model.applied_seq, max(model.snapshots)) == (cut - 1,) * 3
        for operation in operations[cut:]:
            next_life.train("b", operation)
        next_life.run()
        assert next_life.weights("b").tobytes() == undisturbed.weights("a").tobytes(), cut
        before, after = (d.backend.image(d.table.models[n].weights) for d, n in ((undisturbed, "a"), (next_life, "b")))
        assert all((before.tensors[k] == after.tensors[k]).all() for k in before.tensors)
        assert before.steps == after.steps
        next_life.drop("b")
        next_life.run()


def test_a_stop_in_the_middle_of_a_pass_keeps_the_state_before_it(desks: Callable[..., Any]) -> None:
    life, undisturbed = desks(), desks()
    for one in (life, undisturbed):
        one.create("a")
        one.train("a", one.a_pass(4, seed=1))
        one.run()
        one.train("a", one.a_pass(9, seed=2))
    for _ in range(3):  # forward, backward, forward
        life.training.quantum()
    life.snapshots.take_all()
    next_life = desks()
    assert next_life.table.models["a"].received_seq == 1
    next_life.train("a", next_life.a_pass(9, seed=2))
    for one in (next_life, undisturbed):
        one.train("a", one.optim)
        one.run()
    assert next_life.weights("a").tobytes() == undisturbed.weights("a").tobytes()


def test_results_nobody_stored_come_back_with_the_model(desks: Callable[..., Any]) -> None:
    life = desks()
    life.create("a")
    request = life.train("a", life.a_pass(2))
    life.run()
    life.table.stored(["a/0"])
    life.snapshots.take_all()
    result = life.table.unstored[request]
    assert list(desks().table.unstored.values()) == [result]


def test_kept_samplers_come_back_whether_they_are_todays_weights_or_not(desks: Callable[..., Any]) -> None:
    life = desks()
    life.create("a")
    life.step("a", seed=1)
    old = life.keep("a", "model:old/1")
    life.step("a", seed=2)
    today = life.keep("a", "today")
    said = [life.logprobs(old), life.logprobs(today)]
    life.snapshots.take_all()
    assert [f.name for f in life.shelf.folder.iterdir()] == ["model%3Aold%2F1.sampler"]
    next_life = desks()
    assert set(next_life.shelf.kept) == {"model:old/1", "today"}
    next_life.step("a", seed=3)
    next_life.run()
    assert [next_life.logprobs(old), next_life.logprobs(today)] == said
    next_life.snapshots.take_all()
    assert len(list(next_life.shelf.folder.iterdir())) == 2
    assert [desks().logprobs(k) for k in (old, today)] == said


def test_a_snapshot_is_not_taken_without_the_samplers_it_needs(desks: Callable[..., Any]) -> None:
    life = desks()
    life.create("a")
    life.keep("a", "s")
    life.step("a")
    life.run()
    life.shelf.folder.rmdir()
    life.shelf.folder.write_text("in the way")
    life.snapshots.take_all()
    assert not list(life.snapshots.folder.iterdir())
    assert life.table.models["a"].snapshots == [-1, -1]
    assert life.table.models["a"].is_changed


def test_one_is_due_after_a_time_or_many_bytes(desks: Callable[..., Any]) -> None:
    life = desks(every_s=1000.0)
    life.create("a")
    life.snapshots.take_due()
    assert life.files.pending == 0
    assert 0 < life.snapshots.next_s <= 1000
    life.snapshots.every_bytes = 10
    life.table.models["a"].bytes_since_snapshot = 10
    life.train("a", life.a_pass(1))
    life.run()
    assert life.sent[-1] == Snapshotted(model_id="a", seq_id=1, covered_seq=-1, file="models/a.snapshot")
    assert 0 < life.snapshots.next_s <= 1000  # until the second one, if nothing changes
    life.train("a", life.a_pass(1))
    life.run()
    assert isinstance(life.sent[-1], Trained)
    life.table.models["a"].snapshot_at = time.monotonic() - 1001
    life.snapshots._scan_at = 0.0
    assert life.snapshots.next_s < 0
    life.snapshots.take_due()
    life.run()
    assert life.sent[-1] == Snapshotted(model_id="a", seq_id=2, covered_seq=1, file="models/a@2.snapshot")


def test_one_that_took_long_to_write_is_followed_by_a_rest_for_other_files(desks: Callable[..., Any]) -> None:
    life = desks(every_s=1000.0)
    life.create("a")
    model, life.snapshots.every_bytes = life.table.models["a"], 1
    model.bytes_since_snapshot = 1
    life.train("a", life.a_pass(1))
    life.run()
    assert 0 < model.snapshot_write_s < 1
    model.snapshot_write_s = 100.0
    model.bytes_since_snapshot = 1
    life.train("a", life.a_pass(1))
    life.run()
    assert isinstance(life.sent[-1], Trained)
    assert 390 < life.snapshots.next_s <= 400


def test_a_model_at_rest_is_written_once_more_and_its_requests_are_needed_no_longer(desks: Callable[..., Any]) -> None:
    life = desks(every_s=0.001)
    life.create("a")
    life.train("a", life.a_pass(1))
    life.run()
    while life.snapshots.next_s < 1e9:
        life.snapshots.take_due()
        life.run()
    taken = [m for m in life.sent if isinstance(m, Snapshotted)]
    assert [m.seq_id for m in taken[-2:]] == [1, 1]
    assert [m.covered_seq for m in taken] == sorted(m.covered_seq for m in taken)
    assert taken[-1].covered_seq == 1
    assert len(list(life.snapshots.folder.iterdir())) == 2


def test_a_dropped_model_leaves_no_snapshot_even_if_one_is_being_written(desks: Callable[..., Any]) -> None:
    life = desks()
    life.create("a")
    life.snapshots.take(life.table.models["a"])
    life.drop("a")
    life.create("a")  # the name may be used again
    life.run()
    assert not list(life.snapshots.folder.iterdir())
    assert not any(isinstance(m, Snapshotted) for m in life.sent)
    assert not desks().table.models


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of a tensor": lambda file: flip(file, -1000),
    "a bit of the head": lambda file: flip(file, 60),
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-40]),
    "empty": lambda file: file.write_bytes(b""),
    "gone": Path.unlink,
    "another format": lambda file: rewrite(file, lambda head: head.replace('"format":1', '"format":99')),
    "another shape": lambda file: rewrite(file, weights=lambda weights: weights[:-1]),
}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def rewrite(file: Path, head: Callable[[str], str] = str, weights: Callable[[Any], Any] = lambda same: same) -> None:
    tensors, metadata = read_tensors(file)
    write_tensors(file, {**tensors, "weights": weights(tensors["weights"])}, head(metadata))


def newest_first(life: Any) -> list[Path]:
    return sorted(life.snapshots.folder.glob("*.snapshot"), key=lambda f: f.stat().st_mtime_ns, reverse=True)


@pytest.fixture
def two_snapshots(desks: Callable[..., Any]) -> Any:
    """A life that ended behind the second of them, with what the first one has."""
    life = desks()
    life.create("b")
    for seed in (1, 2):
        life.train("b", life.a_pass(1, seed=seed))
        life.run()
        life.snapshots.take_all()
        life.images = [*getattr(life, "images", []), life.backend.image(life.table.models["b"].weights)]
    return life


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_older_snapshot_serves_when_the_newest_is_damaged(
    damage: str, two_snapshots: Any, desks: Callable[..., Any]
) -> None:
    assert two_snapshots.table.models["b"].covered_seq == 1  # what is behind the older one is not forgotten
    DAMAGES[damage](newest_first(two_snapshots)[0])
    life = desks()
    model = life.table.models["b"]
    assert (model.received_seq, model.applied_seq, model.covered_seq) == (1, 1, -1)
    image, older = life.backend.image(model.weights), two_snapshots.images[0]
    assert {name: tensor.tobytes() for name, tensor in image.tensors.items()} == {
        name: tensor.tobytes() for name, tensor in older.tensors.items()
    }


def test_the_place_of_a_damaged_snapshot_is_taken_by_the_next_one(
    two_snapshots: Any, desks: Callable[..., Any]
) -> None:
    flip(newest_first(two_snapshots)[0], -1)
    life = desks()
    life.train("b", life.a_pass(1, seed=2))
    life.run()
    life.snapshots.take_all()
    assert life.table.models["b"].covered_seq == 1
    assert len(newest_first(life)) == 2
    flip(newest_first(life)[1], -1)
    assert desks().table.models["b"].applied_seq == 2


def test_a_model_without_a_whole_snapshot_does_not_come_back_and_the_others_do(desks: Callable[..., Any]) -> None:
    life = desks()
    life.create("a", "b")
    life.snapshots.take_all()
    life.step("a")
    life.run()
    life.snapshots.take_all()
    for file in newest_first(life):
        if not file.name.startswith("b"):
            flip(file, -1)
    (life.snapshots.folder / "left.snapshot.partial").write_bytes(b"half")
    assert list(desks().table.models) == ["b"]
    assert sorted(f.name for f in life.snapshots.folder.iterdir()) == [
        "a.snapshot.bad",
        "a@2.snapshot.bad",
        "b.snapshot",
    ]


def test_snapshots_from_before_there_were_checksums_are_read(desks: Callable[..., Any]) -> None:
    life = desks()
    life.create("a")
    old = life.keep("a", "old")
    life.step("a", seed=1)
    life.run()
    life.snapshots.take_all()
    said, weights = life.logprobs(old), life.weights("a").tobytes()
    for file in (life.snapshots.folder / "a.snapshot", life.shelf.folder / "old.sampler"):
        tensors, metadata = read_tensors(file)
        save_file(tensors, file, metadata={"palestra": metadata})
    next_life = desks()
    assert next_life.weights("a").tobytes() == weights
    assert next_life.logprobs(old) == said
    next_life.step("a", seed=2)
    next_life.run()
    next_life.snapshots.take_all()
    assert next_life.table.models["a"].covered_seq == 3
    flip(newest_first(next_life)[0], -1)
    assert desks().weights("a").tobytes() == weights


def test_no_changed_byte_of_a_file_goes_unnoticed(tmp_path: Path) -> None:
    tensors = {"weights": np.arange(6, dtype=np.float32).reshape(2, 3), "unstored": np.frombuffer(b"abc", np.uint8)}
    write_tensors(tmp_path / "x", tensors, '{"seq_id":7}')
    whole = (tmp_path / "x").read_bytes()
    for at, byte in enumerate(whole):
        for changed in {byte ^ 1, 0x20 if at % 8 == 0 else byte} - {byte}:
            (tmp_path / "y").write_bytes(whole[:at] + bytes([changed]) + whole[at + 1 :])
            try:
                found, metadata = read_tensors(tmp_path / "y")
            except FileDamaged:
                continue
            assert metadata == '{"seq_id":7}', (at, changed)  # where it means nothing, such as a space
            assert {n: (t.shape, t.tobytes()) for n, t in found.items()} == {
                n: (t.shape, t.tobytes()) for n, t in tensors.items()
            }, (at, changed)


def test_a_failed_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        write_tensors(tmp_path / "nowhere" / "x", {}, "")
    with pytest.raises(FileDamaged):
        read_tensors(tmp_path / "nowhere" / "x")


@pytest.mark.parametrize("identity", ["plain", "a:b/c", "..", ".hidden", "ü ", "%2F", "a" * 200])
def test_ids_are_file_names_and_back(identity: str) -> None:
    assert id_of(name_of(identity)) == identity
    assert "/" not in name_of(identity)
    assert not name_of(identity).startswith(".")


def test_ids_that_are_no_file_names_are_refused() -> None:
    for identity in ("", "ü" * 100):
        with pytest.raises(ValueError, match="file name"):
            name_of(identity)
