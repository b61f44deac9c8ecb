"""A full disk: `/readyz` says so, nobody waits for ever, and with room again everything goes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker

from tests.server.conftest import NAME, Server
from tests.server.raw import Raw, datum, ok, refused
from tests.server.test_faults import batch

pytestmark = pytest.mark.slow

DISK = "96m"  # more than the server wants free
NO_SPACE = os.strerror(errno.ENOSPC)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real one, small enough to fill."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def server(disk: Path, micro_model: Path) -> Iterator[Server]:
    with Server(disk / "server", micro_model, write_wait_s=3.0, poll_hold_s=0.5) as server:
        yield server.start()


@contextmanager
def full(disk: Path) -> Iterator[None]:
    file = disk / "fill"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 4096):
        with suppress(OSError):
            while os.write(descriptor, bytes(size)):
                pass
    os.close(descriptor)
    try:
        yield
    finally:
        file.unlink()


def big() -> Any:
    """More than may be left of a page."""
    return datum(length=1500)


def ready(server: Server) -> httpx.Response:
    return server.http().get("/readyz")


def test_a_server_on_a_full_disk_is_not_ready_and_says_why(disk: Path, server: Server) -> None:
    assert ready(server).json() == {"ready": True, "waiting_for": [], "reasons": []}
    with full(disk):
        server.until(lambda: ready(server).status_code == 503)
        said = ready(server).json()
        assert said["ready"] is False
        (reason,) = said["reasons"]
        assert reason.startswith("state folder, checkpoints, database: the disk is full (0 KiB free")
        assert str(disk) not in ready(server).text  # anybody may ask
    server.until(lambda: ready(server).status_code == 200)


def test_a_server_does_not_start_where_it_would_never_be_ready(disk: Path, micro_model: Path) -> None:
    with full(disk):
        command = [sys.executable, "-m", "palestra.cli", "serve", "--model", str(micro_model), "--port", "0"]
        command += ["--state", str(disk / "other")]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: cannot write where the config says ({disk / 'other'}): state folder")
    assert "the disk is full (0 KiB free, 65536 KiB needed); free some space" in done.stderr


def test_a_request_that_cannot_be_kept_is_asked_to_come_again_and_then_refused_by_name(
    disk: Path, server: Server
) -> None:
    api = Raw(server)
    model = api.model()
    with full(disk):
        answers = [model.send_pass(big(), seq_id=1)]
        while answers[-1].status_code == 503:
            answers.append(model.send_pass(big(), seq_id=1))
    assert (answers[0].status_code, answers[0].headers["retry-after"]) == (503, "5")
    assert NO_SPACE in answers[0].json()["detail"]
    assert NO_SPACE in refused(answers[-1], 424)
    assert api.result(model.send_pass(big(), seq_id=2))["metrics"]  # the number that was refused is not waited for
    assert api.result(model.step(seq_id=3))["metrics"]


def test_a_client_on_a_full_disk_hears_of_it_and_goes_on_when_there_is_room(disk: Path, server: Server) -> None:
    model = server.client().create_lora_training_client(base_model=NAME, rank=4, seed=1)
    before = model.forward(batch(0), "cross_entropy").result(timeout=60).metrics
    much = [one for number in range(40) for one in batch(number)]
    with full(disk), pytest.raises(tinker.APIStatusError, match=NO_SPACE):
        model.forward_backward(much, "cross_entropy").result(timeout=100)
    assert model.forward(batch(0), "cross_entropy").result(timeout=60).metrics == before


def test_what_the_database_does_not_take_is_refused_by_name(disk: Path, server: Server) -> None:
    """Its file has some room of its own: so until that is used up."""
    api, tags = Raw(server), ["x" * 100] * 20
    answers = []
    with full(disk):
        while not answers or answers[-1].status_code == 200:
            answers.append(api.post("create_session", tags=tags, sdk_version="0.36.0"))
        chat = {"model": NAME, "messages": [{"role": "user", "content": "x" * 1000}], "max_tokens": 4}
        chatted = api.http.post("/v1/chat/completions", json=chat)
    assert answers[-1].status_code == 503
    assert "disk is full" in answers[-1].json()["detail"], answers[-1].text
    assert "disk is full" in chatted.json()["error"]["message"], chatted.text


def test_waiting_for_an_engine_that_cannot_start_ends_and_the_result_is_there_later(disk: Path, server: Server) -> None:
    api = Raw(server)
    model = api.model()
    os.kill(server.worker_pid, signal.SIGSTOP)
    submitted = ok(model.send_pass())
    with full(disk):
        server.kill_worker()
        server.until(lambda: api.retrieve(submitted["request_id"]).status_code != 408, timeout_s=100)
        said = refused(api.retrieve(submitted["request_id"]), 424, said="the engine cannot be started")
    assert NO_SPACE in said
    server.until(lambda: api.retrieve(submitted["request_id"]).status_code == 200, timeout_s=100)
    assert api.result(submitted)["metrics"]


def test_a_save_on_a_full_disk_names_it(disk: Path, server: Server) -> None:
    model = server.client().create_lora_training_client(base_model=NAME, rank=16, seed=1)
    expected = pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match=f"{NO_SPACE}|disk is full")
    with full(disk), expected:
        model.save_state("x").result(timeout=100)
    assert model.save_state("y").result(timeout=100).path
