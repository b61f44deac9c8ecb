"""What the disk damaged: an older copy serves, or the model's client is told what is lost; nobody else notices."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.server.conftest import NAME, WORKER
from tests.server.raw import Raw, datum, ok
from tests.server.test_faults import Run, assert_same_bits, batch, frail, train, undisturbed, weights

__all__ = ["frail", "undisturbed"]

pytestmark = pytest.mark.slow

MakeServer = Callable[..., Any]
ADAM = types.AdamParams(learning_rate=1e-2)
PROMPT, GREEDY = types.ModelInput.from_ints([5, 6, 7, 8]), types.SamplingParams(max_tokens=8, temperature=0.0)


def snapshots(server: Any, model_id: str = "") -> list[Path]:
    """Newest first."""
    name = model_id.replace(":", "%3A")
    files = (server.state / WORKER / "models").glob(f"{name}*.snapshot")
    return sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)


def covered(server: Any, model_id: str = "%") -> int:
    """Up to where the journal may have forgotten the requests of a model."""
    with sqlite3.connect(f"file:{server.state}/palestra.db?mode=ro", uri=True) as database:
        return database.execute("SELECT max(snapshot_seq) FROM models WHERE model_id LIKE ?", [model_id]).fetchone()[0]


def flip(file: Path, at: float = 0.5) -> None:
    """One bit, this far into the file."""
    data = bytearray(file.read_bytes())
    data[int(at * len(data))] ^= 1
    file.write_bytes(data)


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:-size])


def step(model: tinker.TrainingClient, number: int = 0) -> None:
    passed = model.forward_backward(batch(number), "cross_entropy")
    model.optim_step(ADAM).result(timeout=100)
    passed.result(timeout=100)


# Snapshots

DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": flip,
    "cut short": lambda file: cut(file, 40),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_snapshot_leaves_no_trace_in_a_models_weights(
    damage: str, make_server: MakeServer, undisturbed: tuple[Run, dict[str, np.ndarray]]
) -> None:
    """Killed, and the newest snapshot damaged: the older one and the journal behind it end at the same bits."""
    server = make_server("models.0.snapshot_every_s=0.3")

    def disturb(step: int) -> None:
        if step in (3, 6):
            server.until(lambda: covered(server) >= 0)
            server.kill_both()
            DAMAGES[damage](snapshots(server)[0])
            server.start()

    run = train(server.client(), on_step=disturb)
    assert run.losses == undisturbed[0].losses
    assert_same_bits(weights(server, run), undisturbed[1])


def test_samplers_come_back_though_the_snapshot_that_had_their_weights_is_damaged(make_server: MakeServer) -> None:
    """Stopped before and behind the sampler: one snapshot each time. The replay makes the sampler anew."""
    server = make_server("models.0.snapshot_every_s=100000")
    model = server.client().create_lora_training_client(base_model=NAME, rank=4, seed=1)
    step(model)
    assert server.stop() == 0
    server.start()
    sampler = model.save_weights_and_get_sampling_client()
    expected = sampler.sample(PROMPT, 1, GREEDY).result(timeout=60).sequences[0]
    assert server.stop() == 0
    cut(snapshots(server)[0], 40)
    server.start()
    found = sampler.sample(PROMPT, 1, GREEDY).result(timeout=100).sequences[0]
    assert (found.tokens, found.logprobs) == (expected.tokens, expected.logprobs)


def test_a_damaged_file_of_a_sampler_is_told_to_who_samples_from_it(make_server: MakeServer) -> None:
    server = make_server("models.0.snapshot_every_s=0.3")
    model = server.client().create_lora_training_client(base_model=NAME, rank=4, seed=1)
    sampler = model.save_weights_and_get_sampling_client()
    step(model)
    folder = server.state / WORKER / "samplers"
    server.until(lambda: len(list(folder.glob("*.sampler"))) == 1 and covered(server) == 3)
    server.kill_both()
    flip(next(folder.glob("*.sampler")), 0.9)
    server.start()
    with pytest.raises(tinker.RequestFailedError, match=r"weights of sampler .* are lost.*save them again"):
        sampler.sample(PROMPT, 1, GREEDY).result(timeout=60)
    step(model, 1)  # nobody else minds
    again = model.save_weights_and_get_sampling_client()
    assert again.sample(PROMPT, 1, GREEDY).result(timeout=60).sequences


def test_a_model_whose_snapshots_are_all_damaged_says_where_to_resume_and_others_go_on(make_server: MakeServer) -> None:
    server = make_server("models.0.snapshot_every_s=0.3")
    client = server.client()
    lost, other = (client.create_lora_training_client(base_model=NAME, rank=4, seed=n) for n in (1, 2))
    nothing_saved = client.create_lora_training_client(base_model=NAME, rank=4, seed=3)
    for model in (lost, other, nothing_saved):
        step(model)
    for name in ("first", "last"):
        lost.save_state(name).result(timeout=60)
    losses = other.forward(batch(1), "cross_entropy").result(timeout=60).metrics
    for model, last in ((lost, 4), (other, 3), (nothing_saved, 2)):
        server.until(lambda model=model, last=last: covered(server, model.model_id) == last)
    server.kill_both()
    for model in (lost, nothing_saved):
        for file in snapshots(server, model.model_id):
            flip(file)
    server.start()
    advice = f"state lost: .*; resume from checkpoint tinker://{lost.model_id}/weights/last"
    with pytest.raises(tinker.APIStatusError, match=advice) as refused:
        lost.forward(batch(1), "cross_entropy").result(timeout=60)
    assert refused.value.status_code == 404
    with pytest.raises(tinker.APIStatusError, match=r"state lost: .*no saved checkpoint.*start again"):
        nothing_saved.optim_step(ADAM).result(timeout=60)
    assert other.forward(batch(1), "cross_entropy").result(timeout=60).metrics == losses
    assert server.rest().get_training_run(lost.model_id).result().corrupted
    resumed = client.create_training_client_from_state_with_optimizer(f"tinker://{lost.model_id}/weights/last")
    step(resumed, 1)
    server.kill_both()
    server.start()  # the second start says the same
    with pytest.raises(tinker.APIStatusError, match=advice):
        lost.forward(batch(1), "cross_entropy").result(timeout=60)
    assert "weights/last" in Raw(server).retrieve(f"train:{lost.model_id}:99").json()["detail"]
    assert Raw(server, "tml-other").retrieve(f"train:{lost.model_id}:99").status_code == 404


# The journal


def last_segment(server: Any, which: str) -> Path:
    return max((server.state / "journal" / which).glob("*.journal"))


JOURNALS = {"requests": ("requests",), "both": ("requests", "results")}


@pytest.mark.parametrize("which", JOURNALS)
@pytest.mark.parametrize("damage", ["a bit", "cut short"])
def test_an_acknowledged_step_that_the_journal_lost_is_an_error_of_its_model(
    which: str, damage: str, make_server: MakeServer
) -> None:
    server = make_server("models.0.snapshot_every_s=100000")
    client = server.client()
    other = client.create_lora_training_client(base_model=NAME, rank=4, seed=2)
    step(other)
    model = client.create_lora_training_client(base_model=NAME, rank=4, seed=1)
    model.save_state("start").result(timeout=60)
    step(model)  # the last records of both journals
    server.kill_both()
    for name in JOURNALS[which]:
        flip(last_segment(server, name), 0.9999) if damage == "a bit" else cut(last_segment(server, name), 3)
    server.start()
    lost = f"state lost: the journal was damaged.*been acknowledged; resume from checkpoint tinker://{model.model_id}/weights/start"
    with pytest.raises(tinker.APIStatusError, match=lost):
        model.forward_backward(batch(1), "cross_entropy").result(timeout=60)
    step(other, 1)


def test_an_acknowledged_request_that_had_not_begun_is_missed_too(make_server: MakeServer) -> None:
    server = make_server("models.0.snapshot_every_s=100000")
    api = Raw(server)
    model = api.model()
    os.kill(server.worker_pid, signal.SIGSTOP)
    acknowledged = [model.send_pass(datum()).json()["request_id"], model.step().json()["request_id"]]
    server.kill_both()
    cut(last_segment(server, "requests"), 3)
    server.start()
    for request_id in acknowledged:
        answer = Raw(server).retrieve(request_id)
        assert "state lost" in answer.text, answer.text


def test_a_write_that_was_never_acknowledged_is_not_missed(make_server: MakeServer) -> None:
    server = make_server("models.0.snapshot_every_s=100000")
    model = server.client().create_lora_training_client(base_model=NAME, rank=4, seed=1)
    step(model)
    server.kill_both()
    for name in ("requests", "results"):
        file = last_segment(server, name)
        file.write_bytes(file.read_bytes() + b"\xff\0\0\0torn")
    server.start()
    step(model, 1)
    assert "lost" not in server.said()


def test_requests_that_came_early_are_not_missed(make_server: MakeServer) -> None:
    """Acknowledged out of order, as the parts of a chunked call are: the number between never was."""
    server = make_server("models.0.snapshot_every_s=100000")
    api = Raw(server)
    model = api.model()
    early = ok(model.send_pass(seq_id=2))
    server.kill_both()
    server.start()
    api = Raw(server)
    first = ok(model.send_pass(seq_id=1))
    assert api.result(early)["metrics"] == api.result(first)["metrics"]
    assert "lost" not in server.said()


def test_a_step_that_the_journal_lost_and_a_snapshot_has_is_not_missed(make_server: MakeServer) -> None:
    server = make_server("models.0.snapshot_every_s=0.5")
    model = server.client().create_lora_training_client(base_model=NAME, rank=4, seed=1)
    step(model)
    server.until(lambda: covered(server) == 2)
    model.forward(batch(1), "cross_entropy").result(timeout=60)
    expected = model.forward(batch(1), "cross_entropy").result(timeout=60).metrics["loss:sum"]
    server.until(lambda: covered(server) == 4)
    server.kill_both()
    cut(last_segment(server, "requests"), 3)
    server.start()
    assert model.forward(batch(1), "cross_entropy").result(timeout=60).metrics["loss:sum"] == expected


def test_waiting_for_a_result_that_the_journal_lost_ends_with_an_error(make_server: MakeServer) -> None:
    server = make_server("models.0.snapshot_every_s=100000")
    api = Raw(server)
    model = api.model()
    submitted = model.send_pass(datum()).json()
    api.result(submitted)
    assert server.stop() == 0  # a snapshot has the pass; its request is still in the journal
    cut(last_segment(server, "results"), 3)
    server.start()
    answer = Raw(server).result(submitted)
    assert "its result is lost" in answer["error"]
    Raw(server).result(model.step().json())
