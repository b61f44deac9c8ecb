"""Replicas from elsewhere: processes with another home and no folder of the server's join, sample, leave and die."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from click.testing import CliRunner

from palestra import __version__
from palestra.cli import main
from palestra.types.engine import Hello, ModelCard, ReplicaTicket, encode_message
from palestra.util.model_fingerprint import model_fingerprint
from tests.server.conftest import NAME, Server
from tests.server.replicas.test_faults import LONG, all_begun, are_same, count, is_busy, tokens, up
from tests.server.replicas.test_replicas import begin, trained


class RemoteReplica:
    """`palestra replica`, as on another machine: its own home and folders, and a copy of the model."""

    def __init__(self, server: Server, key: str, folder: Path, *flags: str):
        self.folder, self.log = folder, folder / "replica.log"
        shutil.copytree(server.model, folder / "model", dirs_exist_ok=True)
        command = [sys.executable, "-m", "palestra", "replica", "--server", server.url, "--key", key]
        command += ["--model", "model", "--device", "cpu", "--threads", "1", *flags]
        environment = {"HOME": str(folder), "TMPDIR": str(folder), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONPATH": str(Path(__file__).parents[3])}
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=folder, env=environment)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def open_server(make_module_server: Callable[..., Server]) -> Server:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return make_module_server("models.0.replicas=0", "models.0.threads=1", f"replica_port={port}")


@pytest.fixture
def join(open_server: Server, tmp_path: Path) -> Iterator[Callable[..., RemoteReplica]]:
    made: list[RemoteReplica] = []

    def start(*flags: str, key: str = "tml-any") -> RemoteReplica:
        (folder := tmp_path / f"machine{len(made)}").mkdir()
        made.append(RemoteReplica(open_server, key, folder, *flags))
        return made[-1]

    yield start
    for replica in made:
        replica.end()


def asked(server: Server, **changes: Any) -> Any:
    body = {"base_model": NAME, "fingerprint": model_fingerprint(server.model), "version": __version__} | changes
    return server.http().post("/engine/replicas", json=body)


def test_a_replica_with_another_model_or_version_is_refused_in_words(open_server: Server, server: Server):
    assert asked(open_server).status_code == asked(open_server, base_model=None).status_code == 200
    for changes, status, words in (
        ({"fingerprint": "other"}, 400, "the replica's base model is another"),
        ({"version": "0.0.1"}, 400, "this replica is Palestra 0.0.1"),
        ({"base_model": "nobody/none"}, 404, "choose one of the served models"),
    ):
        refused = asked(open_server, **changes)
        assert (refused.status_code, words in refused.json()["detail"]) == (status, True), refused.text
    assert "start it with replica_port" in asked(server).json()["detail"]
    assert open_server.http().get(f"/engine/adapters/{'0' * 64}").status_code == 404


def test_a_fingerprint_is_of_config_and_weights(micro_model: Path, tmp_path: Path):
    copy = shutil.copytree(micro_model, tmp_path / "copy")
    assert model_fingerprint(copy) == model_fingerprint(micro_model)
    (weights,) = copy.glob("*.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert model_fingerprint(copy) != model_fingerprint(micro_model)


def test_nobody_joins_without_a_ticket(open_server: Server):
    """A link of somebody who knows the server's public key, but made the ticket himself, is not answered."""
    admitted = asked(open_server).json()
    card = ModelCard(
        folder="", architecture="x", vocab_size=8, max_positions=8, parameters=1, dtype="float32", device="cpu"
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as link:
        link.setsockopt(zmq.IDENTITY, b"me")
        link.setsockopt(zmq.LINGER, 0)
        link.curve_publickey, link.curve_secretkey = zmq.curve_keypair()
        link.curve_serverkey = admitted["server_key"].encode()
        link.connect(f"tcp://127.0.0.1:{admitted['port']}")
        for signature in ("made up", admitted["signature"]):
            ticket = ReplicaTicket(replica_id=admitted["replica_id"], base_model=NAME, signature=signature)
            hello = Hello(pid=1, worker_id="me", card=card, models=[], sampler_ids=[], unstored=[], ticket=ticket)
            link.send_multipart([b"", encode_message(hello)])
            if signature == "made up":
                open_server.until(lambda: "without a valid ticket is ignored" in open_server.said())
                assert not link.poll(100)
        assert link.poll(10_000)  # the signed one is
    open_server.until(lambda: up(open_server) == [])  # and is gone with its connection


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_replicas_join_and_leave_while_samples_go_on(
    open_server: Server, server: Server, join: Callable[..., RemoteReplica]
):
    client, own = open_server.client(), server.client()
    expected = tokens(all_begun(trained(own).save_weights_and_get_sampling_client()))
    sampler = trained(client).save_weights_and_get_sampling_client()
    waiting = all_begun(sampler)  # there is no replica yet
    first = join()
    assert are_same(tokens(waiting), expected)
    second = join()
    open_server.until(lambda: up(open_server) == [True, True], timeout_s=60)
    futures = all_begun(sampler)
    open_server.until(lambda: is_busy(first.process.pid))
    first.process.send_signal(signal.SIGTERM)
    assert are_same(tokens(futures), expected)
    assert first.process.wait(60) == 0, first.said()
    open_server.until(lambda: up(open_server) == [True])
    retries = count(open_server, "palestra_replica_retries_total")
    assert retries == 0  # it had finished what it had
    assert not (open_server.state / open_server.worker).joinpath("replica-0").exists()
    assert are_same(tokens(all_begun(sampler)), expected)
    second.process.send_signal(signal.SIGINT)
    assert second.process.wait(60) == 0
    client.close("success").result()
    own.close("success").result()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_replica_elsewhere_may_die_and_the_server_too(open_server: Server, join: Callable[..., RemoteReplica]):
    client = open_server.client()
    sampler = trained(client).save_weights_and_get_sampling_client()
    first, second = join(), join()
    open_server.until(lambda: up(open_server) == [True, True], timeout_s=60)
    expected = tokens(all_begun(sampler))
    futures = all_begun(sampler)
    open_server.until(lambda: is_busy(first.process.pid))
    first.process.kill()
    assert are_same(tokens(futures), expected)
    open_server.until(lambda: up(open_server) == [True])
    open_server.restart()
    open_server.until(lambda: up(open_server) == [True], timeout_s=60)  # it has come back by itself
    assert are_same(tokens(all_begun(sampler)), expected)
    assert psutil.Process(second.process.pid).is_running()
    client.close("success").result()


@pytest.mark.slow
def test_joining_needs_a_key_with_the_right(make_server: Callable[..., Server], tmp_path: Path):
    server = make_server("models.0.replicas=0", require_key="always", start=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server.overrides.append(f"replica_port={free.getsockname()[1]}")
    server.start()
    trainer, right = server.make_key("t"), server.make_key("r", right="replica")
    for key in ("tml-none", trainer):
        (folder := tmp_path / key[-6:]).mkdir()
        refused = RemoteReplica(server, key, folder)
        assert refused.process.wait(60) == 1
        assert "refuses this replica: this key" in refused.said()
    (folder := tmp_path / "right").mkdir()
    replica = RemoteReplica(server, right, folder)
    try:
        server.until(lambda: "a replica is ready" in server.said(), timeout_s=60)
        sampler = server.client(key=trainer).create_sampling_client(base_model=NAME)
        assert len(begin(sampler, [1, 2], max_tokens=LONG).result().sequences[0].tokens) == LONG
        revoked = CliRunner().invoke(main, ["key", "revoke", "r", "--state", str(server.state)])
        assert revoked.exit_code == 0, revoked.output
        assert replica.process.wait(60) == 0
        server.until(lambda: "joined with is no longer valid" in server.said())
    finally:
        replica.end()
