"""Kept samplers and opened checkpoints: bounded memory, files and back, waiting and gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from palestra.types import LoraConfig
from palestra.types.engine import Blame, KeptSampler, SavedAdapter, SaveWeights


@pytest.fixture
def small(tmp_path: Path, get_backend: Callable[..., Any], desk: Any) -> Iterator[Any]:
    """Memory for three samplers."""
    backend = get_backend(micro_batch_tokens=64)
    probe = backend.create(LoraConfig(rank=4, seed=0))
    row = backend.frozen_row(probe).nbytes
    backend.free(probe)
    made = type(desk)(tmp_path / "small", backend, memory_bytes=3 * row)
    made.row = row
    yield made
    made.files.close()


def keep_many(desk: Any, n: int) -> tuple[list[KeptSampler], list[list[float]]]:
    """n samplers with a step between each two, and what the first and last few of them say while fresh."""
    desk.create("a")
    kept, said = [], []
    for i in range(n):
        desk.step("a", seed=i)
        kept.append(desk.keep("a", f"s{i}"))
        said.append(desk.logprobs(kept[-1]) if i < 3 or i > n - 3 else [])
        desk.run()
    return kept, said


def check_bounded(desk: Any, n: int) -> None:
    peak = 0
    make_room = desk.shelf.make_room

    def watched() -> None:
        nonlocal peak
        make_room()
        peak = max(peak, desk.shelf.bytes_in_memory)

    desk.shelf.make_room = watched
    kept, said = keep_many(desk, n)
    assert peak <= 2 * desk.shelf.memory_bytes + desk.row
    assert desk.backend.pool.size_bytes <= 16 * desk.row
    assert len(list(desk.shelf.folder.iterdir())) >= n - 4
    for i in (0, n - 1, 1, n - 2, 2):
        assert desk.logprobs(kept[i]) == said[i]
    assert said[0] != said[1]
    assert desk.backend.pool.size_bytes <= 16 * desk.row


def test_memory_of_kept_samplers_is_bounded(small: Any) -> None:
    check_bounded(small, 30)


@pytest.mark.slow
def test_500_samplers_of_one_model_take_constant_memory(small: Any) -> None:
    check_bounded(small, 500)


def test_a_spool_file_is_written_once(small: Any) -> None:
    kept, _ = keep_many(small, 8)
    small.run()
    inodes = {f.name: f.stat().st_ino for f in small.shelf.folder.iterdir()}
    for _ in range(2):
        for sampler in kept:
            small.logprobs(sampler)
    assert {f.name: f.stat().st_ino for f in small.shelf.folder.iterdir()}.items() >= inodes.items()


def test_samplers_of_the_same_weights_count_once(small: Any) -> None:
    small.create("a")
    small.step("a")
    for i in range(20):
        small.keep("a", f"s{i}")
    small.run()
    assert small.shelf.bytes_in_memory == 0
    small.step("a")
    small.run()
    assert small.shelf.bytes_in_memory == small.row
    assert not list(small.shelf.folder.iterdir())


def test_dropped_samplers_leave_neither_memory_nor_files(small: Any) -> None:
    kept, _ = keep_many(small, 8)
    small.shelf.drop([k.sampler_id for k in kept] + ["unknown"])
    small.run()
    assert (small.shelf.bytes_in_memory, list(small.shelf.folder.iterdir())) == (0, [])
    name = small.sample(kept[0])
    small.run()
    outcome = small.outcome(name)
    assert (outcome.blame, "no longer exists" in outcome.message) == (Blame.USER, True)


def test_a_sampler_can_be_dropped_while_a_sample_uses_it(desk: Any) -> None:
    desk.create("a")
    kept = desk.keep("a", "s")
    desk.run()
    name = desk.sample(kept, max_tokens=20)
    desk.samples.quantum(0.0)
    desk.shelf.drop(["s"])
    desk.run()
    assert len(desk.outcome(name).sequences[0].tokens) == 20
    assert not desk.samples.has_work


def test_a_sample_waits_for_its_sampler(desk: Any) -> None:
    desk.create("a")
    desk.step("a")
    name = desk.sample(KeptSampler(sampler_id="s", model_id="a", seq_id=3))
    assert (desk.samples.has_work, desk.samples.waiting) == (False, 1)
    kept = desk.keep("a", "s")
    desk.run()
    assert desk.outcome(name).sequences[0].logprobs == desk.logprobs(kept)


def test_a_sample_for_a_sampler_that_will_never_be_fails(desk: Any) -> None:
    desk.create("a", "bb")
    never = [
        desk.sample(KeptSampler(sampler_id="s", model_id="unknown", seq_id=3)),
        desk.sample(KeptSampler(sampler_id="s", model_id="a", seq_id=0)),
        desk.sample(KeptSampler(sampler_id="t", model_id="a", seq_id=1)),
        desk.sample(KeptSampler(sampler_id="t", model_id="bb", seq_id=1)),
    ]
    desk.train("a", desk.a_pass(1))  # number 1 is something else
    desk.drop("bb")
    desk.run()
    for name in never:
        outcome = desk.outcome(name)
        assert (outcome.blame, "no longer exists" in outcome.message) == (Blame.USER, True)


def test_kept_samplers_outlive_their_model_and_the_process(desk: Any, tmp_path: Path, get_backend: Any) -> None:
    desk.create("a")
    desk.step("a")
    old = desk.keep("a", "old")
    desk.step("a")
    today = desk.keep("a", "today")
    said = [desk.logprobs(old), desk.logprobs(today)]
    desk.drop("a")
    desk.run()
    assert [desk.logprobs(old), desk.logprobs(today)] == said
    later = type(desk)(tmp_path, get_backend(micro_batch_tokens=64))
    assert [later.logprobs(old), later.logprobs(today)] == said
    later.files.close()


def test_cancelled_samples_say_nothing_more(desk: Any) -> None:
    desk.create("a")
    names = [
        desk.sample(max_tokens=50),
        desk.sample(KeptSampler(sampler_id="s", model_id="a", seq_id=9)),
        desk.sample(max_tokens=3),
    ]
    desk.samples.quantum(0.0)
    for name in names[:2]:
        desk.samples.cancel(name)
    desk.samples.cancel("unknown")
    desk.run()
    assert [m.request_id for m in desk.sent[1:]] == [names[2]]
    assert desk.samples.waiting == 0


def test_only_as_many_samples_are_begun_as_fit(desk: Any) -> None:
    names = [desk.sample(n=40, max_tokens=4) for _ in range(8)]
    desk.samples.quantum(0.0)
    assert desk.samples.waiting == 4  # 40 sequences each: four of them pass the bound of twice 64
    desk.run()
    assert all(len(desk.outcome(n).sequences) == 40 for n in names)


def test_samples_of_many_adapters_at_once_stay_within_memory(small: Any) -> None:
    kept, said = keep_many(small, 12)
    names = [small.sample(k) for k in kept]
    peak = 0
    while small.samples.has_work:
        small.samples.quantum(0.0)
        small.shelf.make_room()
        peak = max(peak, small.backend.pool.size_bytes)
    assert peak <= 20 * small.row  # stacks grow by halves, and the trained model has four rows
    small.run()
    for i in (0, 1, 2, 10, 11):
        assert small.outcome(names[i]).sequences[0].logprobs == pytest.approx(said[i], abs=1e-5)


def test_a_checkpoint_folder_is_sampled_and_read_again_when_it_changes(small: Any, tmp_path: Path) -> None:
    small.create("a")
    said = []
    for i in range(2):
        small.step("a", seed=i)
        small.train("a", SaveWeights(folder=str(tmp_path / f"c{i}"), optimizer=False))
        small.run()
        said.append(small.logprobs(SavedAdapter(folder=str(tmp_path / f"c{i}"))))
    assert said[0] != said[1]
    (tmp_path / "c0").rename(tmp_path / "gone")
    (tmp_path / "c1").rename(tmp_path / "c0")
    assert small.logprobs(SavedAdapter(folder=str(tmp_path / "c0"))) == said[1]
    assert not list(small.shelf.folder.iterdir())


def test_a_missing_or_damaged_checkpoint_is_the_callers_mistake(desk: Any, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 32, "target_modules": ["q_proj"]}))
    (damaged / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0")
    names = [desk.sample(SavedAdapter(folder=str(f))) for f in (tmp_path / "missing", damaged)]
    base = desk.sample()
    desk.run()
    assert [desk.outcome(n).blame for n in names] == [Blame.USER] * 2
    assert desk.outcome(base).sequences


def test_a_spool_that_cannot_be_written_loses_nothing(small: Any) -> None:
    small.shelf.folder.rmdir()
    small.shelf.folder.write_text("in the way")
    kept, said = keep_many(small, 6)
    for i in (0, 1, 2, 5):
        assert small.logprobs(kept[i]) == said[i]


def test_a_damaged_spool_file_is_our_trouble(small: Any) -> None:
    kept, _ = keep_many(small, 8)
    small.run()
    (small.shelf.folder / "s0.sampler").write_bytes(b"nonsense")
    name = small.sample(kept[0])
    small.run()
    assert small.outcome(name).blame is Blame.SERVER
    assert "weights of sampler 's0' are lost" in small.outcome(name).message


def test_bad_samples_fail_alone(desk: Any) -> None:
    bad, good = desk.sample(temperature=-1.0), desk.sample()
    desk.run()
    assert (desk.outcome(bad).blame, "temperature" in desk.outcome(bad).message) == (Blame.USER, True)
    assert desk.outcome(good).sequences


def test_an_owner_with_one_sampler_gets_half_of_the_batch_beside_one_with_many(desk: Any) -> None:
    models = [f"a{i}" for i in range(4)]
    desk.create(*models, rank=1)
    kept = [desk.keep(name, f"s-{name}") for name in models]
    desk.run()

    def send(owner: str, weights: Any, n: int) -> None:
        sample = desk.a_sample(weights, n, max_tokens=3)
        salted = msgspec.structs.replace(sample.request, cache_salt=owner)
        desk.samples.add(msgspec.structs.replace(sample, request=salted, request_id=f"{owner}-{sample.request_id}"))

    before = len(desk.sent)
    for sampler in kept * 10:
        send("hers", sampler, 8)
    for _ in range(160):
        send("his", None, 1)
    desk.samples.quantum(0.0)
    assert desk.samples._rows_of == {"hers": 64, "his": 64}
    assert len(desk.samples._pinned) == 4  # her models take turns
    desk.run()
    assert len(desk.sent) - before == 40 + 160
