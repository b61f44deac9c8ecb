"""A training request that ends the worker is named and given up; everybody else goes on, nobody innocent is blamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st
from tinker import types

from palestra.server.core.futures import RequestKind, TrainFuture
from palestra.server.core.training.dispatch import GIVE_UP_DEATHS, SUSPECT_DEATHS, WorkerDispatcher
from palestra.server.core.training.models import TrackedModel
from palestra.store.journal.journal import Position
from palestra.types import AdamParams, LoraConfig
from palestra.types.engine import OptimStep, OwnModel, Skip, Train, decode_to_worker, encode_message
from tests.server.test_faults import KILLS, Run, batch, train, weights

MakeServer = Callable[..., Any]
POISON = 400  # a token that other data does not have
SEGFAULT = f"""
    import signal
    from palestra.engine.torch_backend import TorchBackend
    backward = TorchBackend.backward
    plan = TorchBackend.plan

    def plan_or_mark(self, model, request):
        if any({POISON} in chunk.tokens for datum in request.data for chunk in datum.chunks):
            self.is_poisoned = True
        return plan(self, model, request)

    def backward_or_die(self, forward):
        backward(self, forward)
        if hasattr(self, "is_poisoned"):
            os.kill(os.getpid(), signal.SIGSEGV)

    TorchBackend.plan, TorchBackend.backward = plan_or_mark, backward_or_die
"""


def poison() -> list[types.Datum]:
    inputs: Any = {"target_tokens": [6, 7], "weights": [1.0, 1.0]}
    return [types.Datum(model_input=types.ModelInput.from_ints([5, POISON]), loss_fn_inputs=inputs)]


def two_steps(client: tinker.ServiceClient, between: list[types.Datum] | None = None) -> tuple[Any, Any]:
    """Sent at once, with something between the passes of the second; returns the model and that one's future."""
    model = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=3)
    adam, odd = types.AdamParams(learning_rate=1e-2), None
    futures: list[Any] = [model.forward_backward(batch(0), "cross_entropy"), model.optim_step(adam)]
    futures.append(model.forward_backward(batch(1), "cross_entropy"))
    if between is not None:
        odd = model.forward_backward(between, "cross_entropy")
    futures += [model.forward_backward(batch(2), "cross_entropy"), model.optim_step(adam)]
    for future in futures:
        future.result(timeout=110)
    return model, odd


def checkpoint(server: Any, model: Any, name: str) -> dict[str, np.ndarray]:
    return weights(server, Run(path=model.save_state(name).result(timeout=60).path))


@pytest.mark.slow
def test_a_request_that_ends_the_worker_is_given_up_and_everybody_goes_on(make_server: MakeServer) -> None:
    server = make_server("models.0.snapshot_every_s=100000", start=False)
    server.sabotage(SEGFAULT)
    server.start()
    calm, _ = two_steps(server.client())
    expected = checkpoint(server, calm, "calm")
    other = server.client().create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=5)
    sampler = server.client().create_sampling_client(base_model="Qwen/Qwen3-8B")
    samples = [
        sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, types.SamplingParams(max_tokens=100))
        for _ in range(20)
    ]
    others = [other.forward_backward(batch(i, 1), "cross_entropy") for i in range(5)]

    model, odd = two_steps(server.client(), poison())

    with pytest.raises(tinker.RequestFailedError, match=r"killed the worker 3 times.*given up"):
        odd.result(timeout=60)
    assert all(other.result(timeout=60).metrics for other in others)
    assert all(len(sample.result(timeout=60).sequences) == 1 for sample in samples)
    assert f'reason="died"}} {SUSPECT_DEATHS + GIVE_UP_DEATHS}.0' in server.metrics()
    assert_close(checkpoint(server, model, "after"), expected)  # as if it had never been asked for

    KILLS["both"](server)  # nothing has a snapshot: all of it is replayed
    assert_close(checkpoint(server, model, "replayed"), expected)
    with pytest.raises(tinker.RequestFailedError, match="given up"):
        odd.result(timeout=60)
    assert len(train(server.client(), 2).losses) == 4
    assert "palestra_worker_restarts_total{" not in server.metrics()
    assert server.stop() == 0


@pytest.mark.slow
def test_a_replay_that_ends_the_worker_costs_its_model_and_nobody_else(make_server: MakeServer) -> None:
    """It was done once, so its client cannot be told that it failed: the model is lost, loudly."""
    server = make_server("models.0.snapshot_every_s=100000", start=False)
    server.sabotage(
        SEGFAULT.replace('hasattr(self, "is_poisoned")', 'hasattr(self, "is_poisoned") and os.path.exists("on")')
    )
    server.start()
    client = server.client()
    model, _ = two_steps(client, poison())
    other, _ = two_steps(client)
    (server.folder / "on").touch()
    server.kill_worker()
    with pytest.raises(Exception, match=r"state lost: .*no saved checkpoint"):
        model.forward(batch(0), "cross_entropy").result(timeout=100)
    assert server.rest().get_training_run(model.model_id).result().corrupted
    assert other.forward_backward(batch(3), "cross_entropy").result(timeout=60).metrics


@pytest.mark.slow
def test_what_failed_once_has_no_effect_at_a_replay_either(make_server: MakeServer) -> None:
    """The files of a load were not there, and are when the worker's next life comes to it."""
    server = make_server("models.0.snapshot_every_s=100000")
    client = server.client()
    saved, _ = two_steps(client)
    path = saved.save_state("end").result(timeout=60).path
    model = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=3)
    before = model.forward(batch(0), "cross_entropy").result(timeout=60).metrics["loss:sum"]
    (folder,) = server.checkpoints.glob("*/weights/end@*")
    aside = folder.rename(folder.with_name("aside"))
    with pytest.raises(tinker.RequestFailedError):
        model.load_state(path).result(timeout=60)
    aside.rename(folder)
    KILLS["worker"](server)
    assert model.forward(batch(0), "cross_entropy").result(timeout=60).metrics["loss:sum"] == before


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Not to the bit: other tenants share the batches."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], rtol=1e-3, atol=1e-6, err_msg=name)


# The lane alone, with a worker that does as the test says


class FakeWorker:
    """Its own link; what it was sent in this life."""

    def __init__(self) -> None:
        self.link, self.is_up, self.sent = self, True, []

    def send_encoded(self, payload: bytes) -> None:
        self.sent.append(decode_to_worker(payload))

    def send(self, message: OwnModel) -> None:
        """Whose a model is; no request."""


class Bench:
    """Models without snapshots: every life of the worker begins with all requests."""

    def __init__(self, *lengths: int):
        self.worker, self.wide = FakeWorker(), 0
        self.models: dict[str, TrackedModel] = {}
        self.lane = WorkerDispatcher(cast(Any, self.worker), cast(Any, self), self.models, self._on_wide)
        for name, length in zip("abcdef", lengths, strict=False):
            lora = LoraConfig(rank=4)
            model = self.models[name] = TrackedModel(name, "s", "o", "m", lora, cast(Any, self.worker))
            for seq_id in range(length):
                model.add(a_future(name, seq_id))
            model.take_ready()

    def _on_wide(self, _: object) -> None:
        self.wide += 1

    def message_of(self, future: TrainFuture) -> bytes:
        assert future.message is not None
        return future.message

    def live(self, deadly: set[str], at_most: int) -> TrainFuture | None:
        """One life: answers `at_most` requests in the order they come, or dies of a deadly one before."""
        self.worker.sent.clear()
        for model in self.models.values():
            self.lane.meet(model, -1)
        self.lane.dispatch()
        while at_most > 0 and self.worker.sent:
            train = self.worker.sent.pop(0)
            if train.request_id in deadly and not isinstance(train.operation, Skip):
                break
            at_most -= 1
            self.answer(train)
        self.worker.is_up = False
        try:
            return self.lane.on_exit()
        finally:
            self.worker.is_up = True

    def answer(self, train: Train) -> None:
        future = self.models[train.model_id].futures[train.seq_id]
        future.finish(b"")
        self.lane.landed(train.request_id)

    def give_up(self, future: TrainFuture) -> None:
        future.is_failed = True
        future.finish(b"")

    @property
    def undone(self) -> set[str]:
        return {f.request_id for m in self.models.values() for f in m.futures.values() if not f.is_done}


def a_future(model_id: str, seq_id: int) -> TrainFuture:
    request_id = f"{model_id}{seq_id}"
    operation = OptimStep(adam=AdamParams())
    message = Train(request_id=request_id, model_id=model_id, seq_id=seq_id, operation=operation)
    return TrainFuture(
        request_id,
        "o",
        b"",
        model_id=model_id,
        seq_id=seq_id,
        kind=RequestKind.FORWARD,
        reply={},
        message=encode_message(message),
        request_at=cast(Position, seq_id),
    )


lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@given(lengths, st.data())
def test_only_deadly_requests_are_given_up_and_all_others_are_answered(lengths: list[int], data: st.DataObject):
    bench = Bench(*lengths)
    everything = sorted(bench.undone)
    deadly = data.draw(st.sets(st.sampled_from(everything), max_size=2))
    given_up: set[str] = set()
    for _ in range(2 + (SUSPECT_DEATHS + GIVE_UP_DEATHS) * len(deadly)):
        guilty = bench.live(deadly - given_up, at_most=10_000)
        if guilty is not None:
            bench.give_up(guilty)
            given_up.add(guilty.request_id)
    assert given_up == deadly
    assert not bench.undone
    assert not bench.lane.is_quarantined


short_lives = st.lists(st.integers(0, 30), max_size=SUSPECT_DEATHS + GIVE_UP_DEATHS - 1)


@given(lengths, st.lists(short_lives, max_size=10))
def test_kills_from_outside_blame_nobody_who_is_answered_now_and_then(lengths: list[int], kills: list[list[int]]):
    bench = Bench(*lengths)
    for moments in kills:
        for moment in moments:
            assert bench.live(set(), at_most=moment) is None
        assert bench.live(set(), at_most=10_000) is None


def test_while_the_lane_is_narrow_one_request_is_in_flight():
    bench = Bench(3, 3)
    for _ in range(SUSPECT_DEATHS):
        bench.live(set(), at_most=0)
        assert len(bench.worker.sent) == 6
    assert bench.lane.is_quarantined
    for model in bench.models.values():
        bench.lane.meet(model, -1)
    bench.worker.sent.clear()
    bench.lane.dispatch()
    order = []
    while len(bench.worker.sent) == 1:
        train = bench.worker.sent.pop()
        order.append(train.request_id)
        bench.answer(train)
    assert sorted(order) == ["a0", "b0"]  # the two that were first in their lines
    assert (bench.wide, bench.lane.is_quarantined) == (1, False)
    assert sorted(t.request_id for t in bench.worker.sent) == ["a1", "a2", "b1", "b2"]
