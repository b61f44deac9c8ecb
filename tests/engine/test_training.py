"""Passes, steps, joining, and who fails: the worker's parts by hand, with the real compute core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palestra.engine.backend import BackendBroken
from palestra.engine.torch_backend import TorchBackend
from palestra.engine.torch_trainer import token_budget
from palestra.model import AdapterPool, Trainer, TrainItem, encode, load_model
from palestra.types import AdamParams, Datum, LoraConfig
from palestra.types.engine import (
    Blame,
    Created,
    CreateModel,
    EngineFailure,
    KeepSampler,
    Loaded,
    LoadWeights,
    OptimStep,
    Pass,
    Saved,
    SaveWeights,
    Train,
    Trained,
)


class Faulty(TorchBackend):
    """Breaks down where it is told to: at the n-th forward or backward that holds a certain model."""

    fails_at: tuple[str, int, Any] | None = None

    def forward(self, parts: Any, *, train: bool) -> Any:
        result = super().forward(parts, train=train)  # it has added to gradients by then
        self._maybe("forward", parts)
        self.last = parts
        return result

    def backward(self, forward: Any) -> None:
        super().backward(forward)
        self._maybe("backward", self.last)

    def _maybe(self, what: str, parts: Any) -> None:
        if self.fails_at is None:
            return
        kind, countdown, adapter = self.fails_at
        if kind == what and any(d.adapter is adapter for p in parts for d in p.data):
            if countdown == 0:
                raise RuntimeError("a cable came loose")
            self.fails_at = (kind, countdown - 1, adapter)


@pytest.fixture
def faulty(tmp_path: Path, get_backend: Callable[..., Any], desk: Any) -> Iterator[Any]:
    made = type(desk)(tmp_path / "faulty", get_backend(Faulty, micro_batch_tokens=64))
    yield made
    made.files.close()


def alone(folder: Path, operations: list[Any], budget: int, seed: int) -> np.ndarray:
    """The weights after these passes and steps in the compute core itself."""
    model = load_model(folder)
    pool = AdapterPool(model.spec)
    trainer = Trainer(model.decoder, pool, token_budget=budget)
    adapter = pool.create(LoraConfig(rank=4, seed=seed))
    for operation in operations:
        if isinstance(operation, OptimStep):
            trainer.optim_step({adapter: operation.adam})
        else:
            trainer.forward_backward([TrainItem(adapter, d, operation.loss) for d in operation.data])
    return adapter.row("weights").numpy().copy()


def test_a_lone_tenant_gets_the_bits_of_the_compute_core(desk: Any, micro_model: Path) -> None:
    operations = [desk.a_pass(9, seed=1), desk.a_pass(2, seed=2), desk.optim, desk.a_pass(5, seed=3), desk.optim]
    desk.create("a")
    for operation in operations:
        desk.train("a", operation)
    desk.run()
    assert desk.weights("a").tobytes() == alone(micro_model, operations, 64, seed=1).tobytes()


def test_groups_that_share_their_prompts_get_what_they_get_without_sharing(
    tmp_path: Path, get_backend: Callable[..., Any], desk: Any
) -> None:
    """In batches that tenants share, and with prompts that no micro-batch holds together with all their answers."""
    rng, rows, weights = np.random.default_rng(5), [], []
    prompts = {name: rng.integers(0, 100, length).tolist() for name, length in (("a", 24), ("bb", 40))}

    def answers(name: str) -> Pass:
        tokens = [prompts[name] + rng.integers(0, 100, n).tolist() for n in (9, 12, 20, 15)]
        wanted = [np.array([0.0] * len(prompts[name]) + [1.0] * (len(one) - len(prompts[name]))) for one in tokens]
        data = [
            Datum.of_tokens(one, target_tokens=encode(np.array([*one[1:], 0])), weights=encode(w.astype(np.float32)))
            for one, w in zip(tokens, wanted, strict=True)
        ]
        return Pass(data=data, loss="cross_entropy")

    operations = {name: [answers(name), desk.optim] for name in prompts}
    for shares in (True, False):
        desk = type(desk)(tmp_path / str(shares), get_backend(micro_batch_tokens=64, share_prefixes=shares))
        desk.create(*prompts)
        for name, todo in operations.items():
            for operation in todo:
                desk.train(name, operation)
        desk.run()
        rows.append(desk.counters.tokens_trained)
        weights.append([desk.weights(name) for name in prompts])
        desk.files.close()
    assert rows[0] < 0.8 * rows[1]
    for ours, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_joined_tenants_get_what_they_get_alone(desk: Any, micro_model: Path) -> None:
    names = ["a", "bb", "ccc", "dddd"]
    desk.create(*names)
    work = {
        n: [desk.a_pass(3 + i, seed=i, length=8), desk.optim, desk.a_pass(2, seed=9 + i), desk.optim]
        for i, n in enumerate(names)
    }
    for n, operations in work.items():
        for operation in operations:
            desk.train(n, operation)
    desk.run()
    assert desk.counters.train_batch_models > 1.5 * desk.counters.train_batches
    assert desk.counters.optim_steps == 8
    for n, operations in work.items():
        np.testing.assert_allclose(desk.weights(n), alone(micro_model, operations, 64, seed=len(n)), atol=1e-5)


def test_a_pass_returns_its_own_data_in_order_with_metrics(desk: Any, micro_model: Path) -> None:
    desk.create("a", "bb")
    request = desk.a_pass(8, seed=4)
    ids = [desk.train("a", request), desk.train("bb", desk.a_pass(5, seed=5))]
    desk.run()
    result = desk.outcome(ids[0])
    assert [o.shape for o in result.outputs] == [(len(d.chunks[0].tokens),) for d in request.data]
    total = sum(np.frombuffer(o.logprobs, "<f4").sum() for o in result.outputs)
    assert result.metrics["loss:sum"] == pytest.approx(-total, rel=1e-5)
    assert len(desk.outcome(ids[1]).outputs) == 5


def test_a_short_request_is_done_before_a_long_one_of_somebody_else(desk: Any) -> None:
    desk.create("a", "bb")
    long, short = desk.train("a", desk.a_pass(40)), desk.train("bb", desk.a_pass(1))
    desk.run()
    done = [m.request_id for m in desk.sent if m.request_id in (long, short)]
    assert done == [short, long]


@pytest.mark.parametrize(
    ("countdown", "kind"),
    [
        pytest.param(0, "forward", marks=pytest.mark.slow),
        pytest.param(0, "backward", marks=pytest.mark.slow),
        (1, "forward"),
        (1, "backward"),
    ],
)
def test_a_breakdown_fails_the_guilty_alone_and_its_gradient_is_as_before(
    faulty: Any, micro_model: Path, kind: str, countdown: int
) -> None:
    faulty.create("a", "bb", "ccc")
    first = {n: faulty.a_pass(3, seed=len(n)) for n in ("a", "bb", "ccc")}
    for n, operation in first.items():
        faulty.train(n, operation)
    faulty.run()
    guilty = faulty.table.models["bb"].weights
    before = faulty.backend.image(guilty).tensors["grads"].copy()
    faulty.backend.fails_at = (kind, countdown, guilty)
    second = {n: faulty.train(n, faulty.a_pass(6, seed=10 + len(n))) for n in ("a", "bb", "ccc")}
    faulty.run()
    failure = faulty.outcome(second["bb"])
    assert isinstance(failure, EngineFailure)
    assert (failure.blame, "cable" in failure.message) == (Blame.SERVER, True)
    assert faulty.backend.image(guilty).tensors["grads"].tobytes() == before.tobytes()
    faulty.backend.fails_at = None
    for n in ("a", "bb", "ccc"):
        faulty.train(n, faulty.optim)
    faulty.run()
    for n in ("a", "ccc"):
        expected = alone(micro_model, [first[n], faulty.a_pass(6, seed=10 + len(n)), faulty.optim], 64, seed=len(n))
        np.testing.assert_allclose(faulty.weights(n), expected, atol=1e-5)
    expected = alone(micro_model, [first["bb"], faulty.optim], 64, seed=2)
    np.testing.assert_allclose(faulty.weights("bb"), expected, atol=1e-5)


def test_a_pass_that_runs_out_of_memory_is_tried_again_with_less(
    faulty: Any, micro_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First activations are recomputed, then micro-batches are cut, once; what fits neither way fails."""
    faulty.create("a")
    backend, forwards = faulty.backend, []
    fits = {"forwards": 3}

    def maybe(what: str, parts: Any) -> None:
        if what == "forward":
            forwards.append((backend.trainer.checkpointing, backend.token_budget))
            if len(forwards) < fits["forwards"]:
                raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(backend, "_maybe", maybe)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    operation = faulty.a_pass(6)
    faulty.train("a", operation)
    faulty.train("a", faulty.optim)
    faulty.run()
    assert forwards[:3] == [(False, 64), (True, 64), (True, 32)]
    wanted = alone(micro_model, [operation, faulty.optim], 32, seed=1)
    np.testing.assert_allclose(faulty.weights("a"), wanted, atol=1e-5)
    forwards.clear()
    fits["forwards"] = 100
    failed = faulty.train("a", faulty.a_pass(2))
    faulty.run()
    assert "no room" in faulty.outcome(failed).message
    assert len(forwards) == 1


def test_a_pass_planned_before_micro_batches_were_cut_is_planned_anew(
    faulty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.create("a", "bb")

    def maybe(what: str, parts: Any) -> None:
        if what == "forward" and sum(part.tokens for part in parts) > 32:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(faulty.backend, "_maybe", maybe)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    requests = [faulty.train(n, faulty.a_pass(6, seed=len(n))) for n in ("a", "bb")]
    faulty.run()
    assert not any(isinstance(faulty.outcome(request), EngineFailure) for request in requests)


def test_a_dead_device_answers_nobody(faulty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process replays: a failure now would be kept as the result."""
    faulty.create("a")
    faulty.backend.fails_at = ("forward", 0, faulty.table.models["a"].weights)
    monkeypatch.setattr(faulty.backend, "is_broken", lambda error: True)
    request = faulty.train("a", faulty.a_pass(1))
    with pytest.raises(BackendBroken, match="cable"):
        faulty.run()
    assert all(m.request_id != request for m in faulty.sent)


def test_bad_requests_fail_alone_and_say_why(desk: Any) -> None:
    desk.create("a", "bb")
    bad = {
        desk.train("a", desk.a_pass(1, loss="cross_entropi")): "did you mean",
        desk.train("a", desk.a_pass(1, data=[])): "no data",
        desk.train("a", desk.a_pass(1, loss="ppo", config={"clip_low_threshold": "low"})): "number",
        desk.train("a", desk.a_pass(1, loss="ppo")): "needs the loss input",
        desk.train("a", desk.a_pass(1, length=5000)): "context",
        desk.train("a", OptimStep(adam=AdamParams(beta1=2.0))): "beta1",
        desk.train("a", LoadWeights(folder="/nowhere", optimizer=False)): "no such file",
        desk.train("a", CreateModel(lora=LoraConfig())): "already exists",
        desk.train("a", KeepSampler(sampler_id="x" * 300)): "characters",
        desk.train("zz", CreateModel(lora=LoraConfig(rank=1000))): "rank",
        desk.train("zz", desk.optim): "not loaded",
        desk.train("yy", CreateModel(lora=LoraConfig(), load_from="/nowhere")): "no such file",
    }
    good = [desk.train("a", desk.a_pass(2)), desk.train("bb", desk.a_pass(2))]
    desk.run()
    for request_id, words in bad.items():
        outcome = desk.outcome(request_id)
        assert isinstance(outcome, EngineFailure), request_id
        assert outcome.blame is Blame.USER
        assert words in outcome.message
    assert not any(isinstance(desk.outcome(r), EngineFailure) for r in good)


def test_a_model_that_is_not_here_is_the_callers_mistake(desk: Any) -> None:
    desk.table.accept(Train(request_id="r", model_id="who", seq_id=5, operation=desk.optim), 0)
    assert desk.outcome("r").blame is Blame.USER
    desk.table.stored(["r"])
    assert not desk.table.unstored


def test_a_model_that_could_not_be_created_is_forgotten_once_all_is_stored(desk: Any) -> None:
    desk.train("a", CreateModel(lora=LoraConfig(rank=1000)))
    desk.train("a", desk.optim)
    desk.run()
    desk.table.stored(["a/0", "a/1"])
    assert not desk.table.models


def test_a_repeated_number_is_applied_once_and_answered_again_until_stored(desk: Any) -> None:
    desk.create("a")
    desk.train("a", desk.a_pass(2))
    request = desk.train("a", desk.optim)
    again = Train(request_id=request, model_id="a", seq_id=2, operation=desk.optim)
    desk.table.accept(again, 0)  # still queued
    desk.run()
    assert desk.backend.image(desk.table.models["a"].weights).steps == 1
    desk.table.accept(again, 0)  # done, not stored
    desk.table.stored([request])
    desk.table.accept(again, 0)  # stored
    desk.run()
    answers = [m for m in desk.sent if isinstance(m, Trained) and m.request_id == request]
    assert len(answers) == 2
    assert answers[0] is answers[1]
    assert desk.counters.optim_steps == 1


def test_numbers_may_have_gaps(desk: Any) -> None:
    desk.create("a")
    desk.table.accept(Train(request_id="later", model_id="a", seq_id=7, operation=desk.a_pass(1)), 0)
    desk.run()
    assert desk.outcome("later").metrics["positions:sum"] > 0
    assert desk.table.models["a"].applied_seq == 7


def test_a_model_dropped_in_the_middle_of_a_joined_pass_disturbs_nobody(desk: Any, micro_model: Path) -> None:
    desk.create("a", "bb")
    operation = desk.a_pass(2, seed=3)
    gone, stays = desk.train("a", desk.a_pass(2)), desk.train("bb", operation)
    desk.train("bb", desk.optim)
    desk.training.quantum()
    desk.backend.free(desk.table.drop("a").weights)
    desk.run()
    assert all(m.request_id != gone for m in desk.sent)
    assert len(desk.outcome(stays).outputs) == 2
    expected = alone(micro_model, [operation, desk.optim], 64, seed=2)
    np.testing.assert_allclose(desk.weights("bb"), expected, atol=1e-5)
    assert (desk.table.queued, len(desk.table.ready)) == (0, 0)


def test_forward_only_leaves_no_gradient_and_gives_the_same_logprobs(desk: Any) -> None:
    desk.create("a")
    ids = [desk.train("a", desk.a_pass(4, forward_only=True)), desk.train("a", desk.a_pass(4))]
    desk.training.quantum()
    desk.training.quantum()
    assert "grads" not in desk.backend.image(desk.table.models["a"].weights).tensors
    desk.run()
    assert desk.outcome(ids[0]) == desk.outcome(ids[1])


def test_save_then_load_goes_on_where_it_was(desk: Any, tmp_path: Path) -> None:
    desk.create("a")
    for operation in (desk.a_pass(2), desk.optim):
        desk.train("a", operation)
    folder = str(tmp_path / "checkpoint")
    save = desk.train("a", SaveWeights(folder=folder, optimizer=True))
    again = desk.train("a", SaveWeights(folder=folder, optimizer=True))  # as in a replay
    for operation in (desk.a_pass(2, seed=1), desk.optim):
        desk.train("a", operation)
    desk.run()
    outcome = desk.outcome(save)
    assert isinstance(outcome, Saved)
    assert outcome.size_bytes == sum(f.stat().st_size for f in Path(folder).iterdir())
    assert desk.outcome(again) == outcome
    lora = LoraConfig(rank=4, seed=99)
    created = desk.train("bb", CreateModel(lora=lora, load_from=folder, load_optimizer=True))
    loaded = [desk.train("ccc", CreateModel(lora=lora)), desk.train("ccc", LoadWeights(folder=folder, optimizer=True))]
    for name in ("bb", "ccc"):
        for operation in (desk.a_pass(2, seed=1), desk.optim):
            desk.train(name, operation)
            desk.run()  # one at a time: alone in its batches, so the bits are those of "a"
    assert [desk.outcome(r) for r in (created, *loaded)] == [Created(), Created(), Loaded()]
    assert desk.weights("bb").tobytes() == desk.weights("ccc").tobytes() == desk.weights("a").tobytes()


def test_a_checkpoint_of_another_shape_is_refused(desk: Any, tmp_path: Path) -> None:
    desk.create("a")
    desk.train("a", SaveWeights(folder=str(tmp_path / "checkpoint"), optimizer=False))
    desk.run()
    lora = LoraConfig(rank=8, seed=0)
    refused = [
        desk.train("bb", CreateModel(lora=lora, load_from=str(tmp_path / "checkpoint"))),
        desk.train("a", LoadWeights(folder=str(tmp_path / "checkpoint"), optimizer=True)),
    ]
    desk.run()
    assert "rank 4" in desk.outcome(refused[0]).message
    assert "optimizer state" in desk.outcome(refused[1]).message


def test_a_folder_that_cannot_be_written_is_the_servers_trouble(desk: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    desk.create("a")
    save = desk.train("a", SaveWeights(folder=str(tmp_path / "file" / "checkpoint"), optimizer=False))
    after = desk.train("a", desk.a_pass(1))
    desk.run()
    failure = desk.outcome(save)
    assert (failure.blame, "could not be written" in failure.message) == (Blame.SERVER, True)
    assert desk.outcome(after).outputs


def test_what_a_killed_process_left_of_a_checkpoint_is_removed(desk: Any, tmp_path: Path) -> None:
    left = tmp_path / ".my[1] save.12345.partial"
    left.mkdir()
    (left / "adapter_config.json").write_text("{")
    desk.create("a")
    desk.train("a", SaveWeights(folder=str(tmp_path / "my[1] save"), optimizer=False))
    desk.run()
    assert (tmp_path / "my[1] save").is_dir()
    assert not left.exists()


def test_requests_of_a_model_wait_for_its_files_and_others_do_not(desk: Any, tmp_path: Path) -> None:
    desk.create("a", "bb")
    save = desk.train("a", SaveWeights(folder=str(tmp_path / "checkpoint"), optimizer=True))
    waits, goes_on = desk.train("a", desk.a_pass(1)), desk.train("bb", desk.a_pass(1))
    while desk.training.has_work:
        desk.training.quantum()
    assert [m.request_id for m in desk.sent[2:]] == [goes_on]
    desk.run()
    assert [m.request_id for m in desk.sent[3:]] == [save, waits]


def test_the_token_budget_depends_on_the_model_alone() -> None:
    sizes = {4_000_000: 512, 64_000_000: 128, 1_000_000_000: 128, 100_000: 2048}
    for parameters, tokens in sizes.items():
        assert token_budget(parameters, "cpu") == tokens
    assert token_budget(4_000_000, "cuda") == 8192


def test_an_owner_with_one_model_gets_half_of_the_turns_beside_one_with_a_hundred(desk: Any) -> None:
    hers, his = [f"a{i}" for i in range(100)], "b"
    desk.training.max_models = 101
    for name in (*hers, his):
        desk.table.set_owner(name, name[0])
    desk.create(*hers, his, rank=1)
    lead = []
    begin = desk.table.next
    desk.table.next = lambda: lead.append(model := begin()) or model
    for name in hers:
        desk.train(name, desk.a_pass(2, length=64))  # two micro-batches: nobody else fits in
    long = desk.train(his, desk.a_pass(16, length=64))
    while not any(m.request_id == long for m in desk.sent):
        desk.training.quantum()
    owners = [model.owner for model in lead]
    assert abs(owners.count("a") - owners.count("b")) <= 1
    assert len({model.model_id for model in lead if model.owner == "a"}) == owners.count("a")  # each of hers in turn
