"""What is killed comes back: the client notices a pause, and every acknowledged request counts exactly once."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tinker
from safetensors.numpy import load_file
from tinker import types

from palestra.util.log_files import MAX_LOG_BYTES
from tests.server.conftest import WORKER, created
from tests.store.conftest import new_database, postgres_server

__all__ = ["postgres_server"]

STEPS = 8
MakeServer = Callable[..., Any]


@dataclass
class Run:
    """A training run as a client sees it."""

    losses: list[float] = field(default_factory=list)
    path: str = ""


def batch(step: int, tenant: int = 0) -> list[types.Datum]:
    rng = np.random.default_rng(1000 * tenant + step)
    data = []
    for length in (24, 9, 17):
        tokens = rng.integers(5, 300, length + 1).tolist()
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * length}
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def train(
    client: tinker.ServiceClient, steps: int = STEPS, *, tenant: int = 0, on_step: Callable[[int], None] | None = None
) -> Run:
    """Two passes and a step each time, sent together; a checkpoint at the end."""
    model = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=7 + tenant)
    run = Run()
    for step in range(steps):
        passes = [model.forward_backward(batch(2 * step + i, tenant), "cross_entropy") for i in (0, 1)]
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0))
        if on_step is not None:
            on_step(step)
        run.losses += [p.result(timeout=100).metrics["loss:sum"] for p in passes]
        stepped.result(timeout=100)
    run.path = model.save_state("end").result(timeout=100).path
    return run


def weights(server: Any, run: Run) -> dict[str, np.ndarray]:
    """All numbers of the checkpoint, the optimizer's too."""
    model_id, kind, name = run.path.removeprefix("tinker://").split("/")
    (folder,) = (server.checkpoints / model_id.replace(":", "_") / kind).glob(f"{name}@*")
    found: dict[str, np.ndarray] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= {f"{file.name} {key}": value for key, value in load_file(file).items()}
    return found


def assert_same_bits(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.tobytes() == theirs[name].tobytes(), name


@pytest.fixture(scope="module")
def frail(make_module_server: MakeServer) -> Any:
    """With the usual settings; it may be killed, and runs again when a test ends."""
    return make_module_server()


@pytest.fixture(scope="module")
def undisturbed(frail: Any) -> tuple[Run, dict[str, np.ndarray]]:
    run = train(frail.client())
    return run, weights(frail, run)


@contextmanager
def repeatedly(do: Callable[[], None], *, every_s: tuple[float, float], times: int, seed: int = 0) -> Iterator[None]:
    """Beside the test, at random moments."""
    rng, ended, errors = random.Random(seed), threading.Event(), []

    def work() -> None:
        try:
            for _ in range(times):
                if ended.wait(rng.uniform(*every_s)):
                    return
                do()
        except Exception as e:  # shown by the test, not lost in the thread
            errors.append(e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not errors


def kill_worker(server: Any) -> None:
    server.wait_worker(other_than=server.kill_worker())


KILLS = {
    "worker": kill_worker,
    "server": lambda server: server.restart(),
    "both": lambda server: (server.kill_both(), server.start()),
}


@pytest.fixture(params=["files", pytest.param("database", marks=pytest.mark.slow)])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """Settings of a server whose journal is in files, or in PostgreSQL: every day `test_standby` hands such
    a journal on to another server."""
    if request.param == "files":
        yield []
        return
    with new_database("postgresql", tmp_path, request) as url:
        yield ["journal=database", f"database={url}"]


@pytest.mark.parametrize("who", ["both", *(pytest.param(one, marks=pytest.mark.slow) for one in ("worker", "server"))])
def test_a_killed_process_leaves_no_trace_in_a_lone_tenants_weights(
    who: str, journal: list[str], make_server: MakeServer, undisturbed: tuple[Run, dict[str, np.ndarray]]
) -> None:
    """Snapshots every second or so: what comes back is one of them and the journal behind it."""
    server = make_server("models.0.snapshot_every_s=0.3", *journal)
    moments = {2, 5}

    def disturb(step: int) -> None:
        if step in moments:
            KILLS[who](server)

    run = train(server.client(), on_step=disturb)
    assert run.losses == undisturbed[0].losses
    assert_same_bits(weights(server, run), undisturbed[1])
    assert server.stop() == 0


def test_samples_under_way_when_the_worker_dies_are_all_answered(frail: Any) -> None:
    server = frail
    sampler = server.client().create_sampling_client(base_model="Qwen/Qwen3-8B")
    params = types.SamplingParams(max_tokens=40, seed=5)
    prompts = [types.ModelInput.from_ints([5 + i % 50, 6, 7]) for i in range(100)]
    before = sampler.sample(prompts[0], 1, params).result(timeout=60).sequences[0].tokens
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    server.kill_worker()
    answers = [future.result(timeout=100) for future in futures]
    assert all(len(a.sequences[0].tokens) >= 1 for a in answers)
    assert answers[0].sequences[0].tokens == before


@pytest.mark.slow
def test_a_sample_that_changed_its_weights_begins_again_with_the_new_ones(frail: Any) -> None:
    """After the worker's death the server has the newer weights for it; the answer says that these drew all of it."""
    with frail.client() as client:
        model = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=7)
        old = created(model.save_weights_and_get_sampling_client())
        params = types.SamplingParams(max_tokens=1000, stop=[], seed=3)
        answer = old.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params)
        model.forward_backward(batch(0), "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        new = created(model.save_weights_and_get_sampling_client())
        names = [sampler._sampling_session_id for sampler in (old, new)]
        body = {"sampling_session_ids": names, "to": names[1]}
        assert frail.http().post("/api/v1/continue_samples", json=body).json() == {"changed": 1}
        frail.kill_worker()
        (sequence,) = answer.result().sequences
        assert len(sequence.tokens) == 1000
        found = frail.http().post("/api/v1/sequence_weights", json={"sequence_ids": [sequence.sequence_id, "x"]})
        change = {"start": 0, "sampling_session_id": names[1], "is_exact": True}
        assert found.json() == {"sequences": {sequence.sequence_id: [change]}}
        (again,) = new.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params).result().sequences
        assert again.tokens == sequence.tokens


@pytest.mark.slow
def test_samples_under_way_when_the_server_dies_are_sent_again_by_the_client(make_server: MakeServer) -> None:
    server = make_server()
    sampler = server.client().create_sampling_client(base_model="Qwen/Qwen3-8B")
    params = types.SamplingParams(max_tokens=40, seed=5)
    futures = [sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 2, params) for _ in range(50)]
    time.sleep(0.3)
    server.restart()
    answers = [future.result(timeout=100) for future in futures]
    assert [len(a.sequences) for a in answers] == [2] * 50


@pytest.mark.slow
def test_a_kept_sampler_survives_both_processes(make_server: MakeServer) -> None:
    server = make_server("models.0.snapshot_every_s=0.3")
    model = server.client().create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=1)
    model.forward_backward(batch(0), "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    old = model.save_weights_and_get_sampling_client()
    prompt, params = types.ModelInput.from_ints([5, 6, 7, 8]), types.SamplingParams(max_tokens=8, temperature=0.0)
    before = old.sample(prompt, 1, params).result(timeout=60).sequences[0]
    model.forward_backward(batch(1), "cross_entropy").result()
    model.optim_step(types.AdamParams(learning_rate=1e-1)).result()
    time.sleep(1.0)  # a snapshot falls behind it
    KILLS["both"](server)
    after = old.sample(prompt, 1, params).result(timeout=100).sequences[0]
    assert after.tokens == before.tokens
    np.testing.assert_allclose(after.logprobs or [], before.logprobs or [], atol=1e-5)


def test_a_result_read_before_the_crash_is_read_again_after_it(frail: Any) -> None:
    server = frail
    model = server.client().create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=1)
    model.forward_backward(batch(0), "cross_entropy").result()
    request_id = f"train:{model.model_id}:1"
    body = {"request_id": request_id, "allow_metadata_only": False}
    before = server.http().post("/api/v1/retrieve_future", json=body)
    KILLS["both"](server)
    after = server.http().post("/api/v1/retrieve_future", json=body)
    assert before.status_code == after.status_code == 200
    assert before.json() == after.json()


def test_a_checkpoint_cut_short_is_not_there(frail: Any) -> None:
    """Killed while it is written, again and again: what is listed is whole, what is not whole is not listed."""
    server = frail
    model = server.client().create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=64, seed=1)
    names = ["one", "two"]
    for name in names:
        future = model.save_state(name)
        time.sleep(0.005)
        kill_worker(server)
        assert future.result(timeout=100).path.endswith(name)
    listed = {c.checkpoint_id for c in server.rest().list_checkpoints(model.model_id).result().checkpoints}
    assert listed == {f"weights/{name}" for name in names}
    folders = list((server.checkpoints / model.model_id.replace(":", "_") / "weights").iterdir())
    assert all((f / "adapter_model.safetensors").exists() for f in folders if not f.name.startswith("."))


@pytest.mark.slow
@pytest.mark.parametrize("who", KILLS)
def test_kills_at_twenty_random_moments_of_a_long_run(
    who: str, journal: list[str], make_server: MakeServer, tmp_path: Path, micro_model: Path
) -> None:
    calm = make_server()
    expected = train(calm.client(), 60)
    server = make_server("models.0.snapshot_every_s=0.5", *journal)
    pace = (0.2, 1.5) if who == "worker" else (1.0, 4.0)
    with repeatedly(lambda: KILLS[who](server), every_s=pace, times=20, seed=len(who)):
        run = train(server.client(), 60, on_step=lambda _: time.sleep(0.4 if who == "worker" else 1.0))
    assert run.losses == expected.losses
    assert_same_bits(weights(server, run), weights(calm, expected))


@pytest.mark.slow
def test_among_other_tenants_every_step_counts_once(make_server: MakeServer) -> None:
    calm = make_server()
    expected = [train(calm.client(), 30, tenant=t) for t in range(4)]
    server = make_server("models.0.snapshot_every_s=0.5")
    with (
        repeatedly(lambda: kill_worker(server), every_s=(0.5, 2.0), times=8),
        ThreadPoolExecutor(4) as tenants,
    ):
        runs = list(tenants.map(lambda t: train(server.client(), 30, tenant=t), range(4)))
    for run, alone in zip(runs, expected, strict=True):
        np.testing.assert_allclose(run.losses, alone.losses, rtol=1e-4)


@pytest.mark.slow
def test_five_hundred_samples_survive_both_processes(make_server: MakeServer) -> None:
    server = make_server()
    sampler = server.client().create_sampling_client(base_model="Qwen/Qwen3-8B")
    params = types.SamplingParams(max_tokens=64)
    futures = [sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 1, params) for _ in range(500)]
    time.sleep(0.5)
    KILLS["both"](server)
    assert all(len(f.result(timeout=300).sequences) == 1 for f in futures)


@pytest.mark.slow
def test_a_result_outlives_the_request_that_a_snapshot_covered(make_server: MakeServer) -> None:
    """Each start begins a new journal file. The file of the requests goes when snapshots cover them; the answers, given
    in the server's next life, are in another file and stay."""
    server = make_server("models.0.snapshot_every_s=0.2")
    model = server.client().create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=1)
    KILLS["both"](server)
    os.kill(server.worker_pid, signal.SIGSTOP)
    passes = [model.forward_backward(batch(i), "cross_entropy") for i in range(5)]
    server.until(lambda: 'type="forward_backward"} 5.0' in server.metrics())  # acknowledged, not begun
    KILLS["both"](server)
    before = [p.result(timeout=60).metrics["loss:sum"] for p in passes]
    time.sleep(1.0)
    KILLS["both"](server)
    for seq_id, loss in enumerate(before, start=1):
        body = {"request_id": f"train:{model.model_id}:{seq_id}", "allow_metadata_only": False}
        after = server.http().post("/api/v1/retrieve_future", json=body)
        assert after.status_code == 200, seq_id
        assert after.json()["metrics"]["loss:sum"] == loss


def test_a_request_that_cannot_be_repeated_ends_its_model_loudly(make_server: MakeServer) -> None:
    """The checkpoint that was loaded was removed and the worker died before a snapshot: no silent other weights."""
    server = make_server("models.0.snapshot_every_s=100000")
    client = server.client()
    saved = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=1)
    saved.forward_backward(batch(0), "cross_entropy").result()
    saved.optim_step(types.AdamParams(learning_rate=1e-1)).result()
    path = saved.save_state("start").result().path
    model = client.create_training_client_from_state(path)
    model.forward(batch(0), "cross_entropy").result()
    shutil.rmtree(next(server.checkpoints.glob("*/weights/start@*")))
    kill_worker(server)
    with pytest.raises(Exception, match="state lost: "):
        model.forward(batch(0), "cross_entropy").result(timeout=60)
    server.until(lambda: server.rest().get_training_run(model.model_id).result().corrupted)
    with pytest.raises(Exception, match=r"state lost: .*no saved checkpoint"):  # which is looked up after the loss
        model.forward(batch(0), "cross_entropy").result(timeout=60)


@pytest.mark.slow
def test_a_deleted_checkpoint_stays_on_disk_while_a_replay_would_load_it(make_server: MakeServer) -> None:
    server = make_server("models.0.snapshot_every_s=100000", "keep_deleted_s=0", "keep_results_s=1")
    client = server.client()
    saved = client.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=1)
    saved.forward_backward(batch(0), "cross_entropy").result()
    saved.optim_step(types.AdamParams(learning_rate=1e-1)).result()
    path = saved.save_state("start").result().path
    model = client.create_training_client_from_state(path)
    before = model.forward(batch(0), "cross_entropy").result().metrics["loss:sum"]
    (folder,) = server.checkpoints.glob("*/weights/start@*")
    server.rest().delete_checkpoint_from_tinker_path(path).result()
    assert not server.rest().list_user_checkpoints().result().checkpoints
    time.sleep(3.0)  # it is swept once a second
    assert folder.is_dir()
    kill_worker(server)
    assert model.forward(batch(0), "cross_entropy").result(timeout=60).metrics["loss:sum"] == before
    assert server.stop() == 0  # with one snapshot: if that is damaged, the load is replayed
    server.start()
    time.sleep(3.0)
    assert folder.is_dir()
    assert server.stop() == 0
    server.overrides.append("models.0.snapshot_every_s=0.3")  # and now the other one
    server.start()
    server.until(lambda: not folder.exists())
    assert model.forward(batch(0), "cross_entropy").result(timeout=60).metrics["loss:sum"] == before


def test_a_restarted_server_goes_on_with_its_living_worker(frail: Any) -> None:
    worker = frail.worker_pid
    frail.restart()
    assert frail.worker_pid == worker
    assert "adopted a running worker" in frail.said()


@pytest.mark.slow
def test_a_living_worker_of_another_version_is_replaced(make_server: MakeServer) -> None:
    server = make_server()
    model = server.client().create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=1)
    server.kill()
    old, facts = server.worker_pid, server.state / WORKER / "worker.json"
    facts.write_text(json.dumps(json.loads(facts.read_text()) | {"version": "0.0.1"}))
    server.start()
    assert server.worker_pid != old
    assert not psutil.pid_exists(old)
    assert model.forward(batch(0), "cross_entropy").result(timeout=60).metrics


@pytest.mark.slow
def test_a_long_log_of_a_worker_is_set_aside(make_server: MakeServer) -> None:
    server = make_server()
    with server.worker_log.open("ab") as log:
        log.write(b"x" * (MAX_LOG_BYTES + 1))
    kill_worker(server)
    assert server.worker_log.stat().st_size < 10_000
    assert server.worker_log.with_suffix(".log.1").stat().st_size > MAX_LOG_BYTES


@pytest.mark.slow
def test_names_may_be_told_in_another_order(make_server: MakeServer) -> None:
    server = make_server(flags=("--name", "other"))
    model = server.client().create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4, seed=1)
    model.forward_backward(batch(0), "cross_entropy").result()
    assert server.stop() == 0
    server.name, server.flags = "other", ["--name", "Qwen/Qwen3-8B"]
    server.start()
    assert model.optim_step(types.AdamParams()).result(timeout=60).metrics
