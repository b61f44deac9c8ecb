"""A worker that shares no folder with the server: its files travel over the encrypted link, and the loss of its machine
loses nothing that the server has a copy of."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from safetensors.numpy import load_file

from palestra import __version__
from palestra.server.core.workers.files import WorkerFiles
from palestra.server.core.workers.link import WorkerFrame, WorkerLink
from palestra.server.core.workers.link_security import LinkNetwork
from palestra.server.core.workers.supervisor import RemoteWorker, WorkerSupervisor, known_facts
from palestra.server.core.workers.watchdog import RestartReason, WatchdogTimeouts
from palestra.server.core.workers.worker_hosts import LocalHost, LocalWorker, environment_of
from palestra.types import AdamParams, Datum, LoraConfig, TensorData
from palestra.types.engine import (
    CreateModel,
    FileArea,
    FilePart,
    FileStored,
    GetFilePart,
    Hello,
    KeepSampler,
    LoadWeights,
    Operation,
    OptimStep,
    Pass,
    RanksMeeting,
    SaveWeights,
    Snapshotted,
    Train,
    Trained,
    WorkerConfig,
)
from palestra.util.log_files import open_log
from palestra.util.model_fingerprint import model_fingerprint
from palestra.util.processes import PIPE, spawn_blocking
from tests.ports import free_port

WAIT_S = 60.0


OTHER_CLOCKS = """
import os, time
days = [90, -90][int(os.environ["NUMBER"])]
now, since = time.time, time.monotonic
time.time = lambda: now() + days * 86400
time.monotonic = lambda: since() + 1e6 + days * 10_000
"""
"""Clocks of the machines: the first is ahead of the server by three months, the second behind."""


class OtherMachine(LocalHost):
    """A host whose processes know nothing but what they are sent, and a folder of their own."""

    def __init__(self, network: LinkNetwork, folder: Path):
        super().__init__()
        self.network, self.number, self._clocks = network, 0, folder / "clocks"
        self.followers: list[subprocess.Popen[bytes]] = []
        self._clocks.mkdir(exist_ok=True)
        (self._clocks / "sitecustomize.py").write_text(OTHER_CLOCKS)

    async def start(self, config: WorkerConfig, log_file: Path) -> LocalWorker:
        key = self.network.admit("w", config.life)
        config = msgspec.structs.replace(config, client_key=key, state=f"states/w/{self.number}")
        if config.devices:
            ports = [free_port(), free_port()]
            secret_key = self.network.rank_key("w", config.life)
            meeting = RanksMeeting(host="127.0.0.1", calls_port=ports[0], store_port=ports[1], secret_key=secret_key)
            config = msgspec.structs.replace(config, meeting=meeting)
        environment = os.environ | environment_of(config) | {"OMP_NUM_THREADS": "1", "NUMBER": str(self.number)}
        environment["PYTHONPATH"] = f"{self._clocks}:{environment.get('PYTHONPATH', '')}"
        command = [sys.executable, "-m", "palestra.engine"]
        with open_log(log_file) as out:
            for rank in range(1, len(config.devices)):
                self.followers.append(
                    spawn_blocking(command, stdin=PIPE, env=environment | {"PALESTRA_FOLLOWER": str(rank)}, output=out)
                )
            child = spawn_blocking(command, env=environment, output=out)
        return LocalWorker(child.pid, child)


class Everything:
    """Remembers what the worker says."""

    def __init__(self) -> None:
        self.hellos: list[Hello] = []
        self.messages: list[Any] = []
        self.news = asyncio.Event()

    def on_hello(self, worker: WorkerSupervisor, hello: Hello) -> None:
        self.hellos.append(hello)
        self.news.set()

    def on_hello_again(self, worker: WorkerSupervisor, hello: Hello) -> None:
        return

    def on_message(self, worker: WorkerSupervisor, frame: WorkerFrame) -> None:
        self.messages.append(frame.message)
        self.news.set()

    def on_exit(self, worker: WorkerSupervisor, ending: RestartReason) -> None:
        return

    async def until(self, find: Callable[[], Any]) -> Any:
        async with asyncio.timeout(WAIT_S):
            while not (found := find()):
                self.news.clear()
                await self.news.wait()
        return found


class Machines:
    """A server with its folders, and another machine with its own."""

    def __init__(self, folder: Path, model: Path, **options: Any):
        self.server, self.node, self.heard = folder / "server", folder / "node", Everything()
        self.network = LinkNetwork("127.0.0.1", "secret")
        folder.mkdir(exist_ok=True)
        self.host = OtherMachine(self.network, folder)
        state, security = self.server / "worker-w", self.network.security("w")
        state.mkdir(parents=True, exist_ok=True)
        if known := known_facts(state):
            self.network.admit("w", known["life"])
        config = WorkerConfig(
            address=self.network.address(state),
            model="/not/on/this/machine",
            state=str(state),
            server_key=security.public_key,
            is_remote=True,
            version=__version__,
            node_folder=str(self.node),
            fingerprint=model_fingerprint(model),
            threads=1,
            device="cpu",
            snapshot_every_s=0.05,
            snapshot_copy_s=0.1,
            **options,
        )
        files = WorkerFiles(state, model, self.server / "checkpoints")
        self.handle = WorkerSupervisor(
            "w",
            config,
            self.heard,
            log_file=folder / "worker.log",
            patience=WatchdogTimeouts(0, 0, 0),
            write_wait_s=1,
            remote=RemoteWorker(self.host, security, files),
        )
        self._seq = -1

    async def train(self, operation: Operation) -> Trained:
        self._seq += 1
        return await self.train_again(self._seq, operation)

    async def train_again(self, seq: int, operation: Operation) -> Trained:
        train = Train(request_id=f"r{seq}-{len(self.heard.hellos)}", model_id="m", seq_id=seq, operation=operation)
        self.handle.link.send(train)
        return await self.heard.until(
            lambda: [m for m in self.heard.messages if isinstance(m, Trained) and m.request_id == train.request_id]
        )

    async def copied(self, seq: int) -> None:
        """Until the journal would not be needed up to this request."""
        await self.heard.until(
            lambda: any(isinstance(m, Snapshotted) and m.covered_seq >= seq for m in self.heard.messages)
        )

    async def lose_node(self) -> None:
        """The machine is gone with all that was on it; the worker begins on an empty one."""
        lives = len(self.heard.hellos)
        os.kill(self.heard.hellos[-1].pid, 9)
        shutil.rmtree(self.node)
        self.host.number += 1
        await self.heard.until(lambda: len(self.heard.hellos) > lives)


def a_pass() -> Pass:
    tokens = np.arange(20, dtype="<i8") % 50
    targets = TensorData(data=np.roll(tokens, -1).tobytes(), dtype="int64", shape=(20,))
    return Pass(data=[Datum.of_tokens(tokens.tolist(), target_tokens=targets)], loss="cross_entropy")


REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED


def bits(file: Path) -> dict[str, bytes]:
    return {key: value.tobytes() for key, value in load_file(file).items()}


STEP = OptimStep(adam=AdamParams(learning_rate=1e-2))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_lost_machine_is_replaced_from_the_copies_at_the_server(tmp_path: Path, micro_model: Path) -> None:
    async def run() -> None:
        machines = Machines(tmp_path, micro_model)
        heard, checkpoints = machines.heard, machines.server / "checkpoints"
        await machines.handle.start()
        await machines.train(CreateModel(lora=LoraConfig(rank=4, seed=1)))
        await machines.train(a_pass())
        await machines.train(KeepSampler(sampler_id="before"))
        await machines.train(STEP)
        await machines.train(KeepSampler(sampler_id="after"))
        await machines.train(SaveWeights(folder=str(checkpoints / "a"), optimizer=True))
        assert (checkpoints / "a" / "adapter_model.safetensors").is_file()
        assert (machines.node / "models" / machines.handle.config.fingerprint / "config.json").is_file()
        await machines.copied(5)
        await machines.lose_node()
        (state,) = heard.hellos[-1].models
        assert (state.model_id, state.applied_seq, state.covered_seq) == ("m", 5, 5)
        assert set(heard.hellos[-1].sampler_ids) == {"before", "after"}
        await machines.train(LoadWeights(folder=str(checkpoints / "a"), optimizer=True))
        await machines.train(SaveWeights(folder=str(checkpoints / "b"), optimizer=True))
        for name in ("adapter_model.safetensors", "optimizer.safetensors"):
            assert bits(checkpoints / "a" / name) == bits(checkpoints / "b" / name)
        await machines.handle.stop()
        assert not list((machines.server / "worker-w").rglob("*.partial"))
        machines.network.close()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_restarted_server_goes_on_with_a_worker_elsewhere(tmp_path: Path, micro_model: Path) -> None:
    async def run() -> None:
        first = Machines(tmp_path, micro_model)
        await first.handle.start()
        await first.train(CreateModel(lora=LoraConfig(rank=4, seed=1)))
        await first.handle.abandon()
        await asyncio.to_thread(first.network.close)
        second = Machines(tmp_path, micro_model)
        await second.handle.start()
        assert second.handle.is_adopted
        (hello,) = second.heard.hellos
        assert hello.worker_id == first.heard.hellos[0].worker_id
        assert [model.applied_seq for model in hello.models] == [0]
        await second.handle.stop()
        second.network.close()

    asyncio.run(run())


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_ranks_that_meet_over_the_network_have_the_bits_of_one_process(tmp_path: Path, micro_model: Path) -> None:
    async def run(folder: Path, **options: Any) -> dict[str, bytes]:
        machines = Machines(folder, micro_model, gradient_shards=4, micro_batch_tokens=20, **options)
        saved = machines.server / "checkpoints" / "a"
        await machines.handle.start()
        await machines.train(CreateModel(lora=LoraConfig(rank=4, seed=1)))
        for _ in range(3):
            await machines.train(Pass(data=a_pass().data * 5, loss="cross_entropy"))
            await machines.train(STEP)
        await machines.train(SaveWeights(folder=str(saved), optimizer=True))
        if followers := list(machines.host.followers):
            await machines.lose_node()  # rank 0 alone: the others notice
            assert [follower.wait(WAIT_S) for follower in followers] == [0]
        await machines.handle.stop()
        for follower in machines.host.followers:
            assert follower.wait(WAIT_S) == 0
        machines.network.close()
        return bits(saved / "adapter_model.safetensors")

    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    expected = asyncio.run(run(tmp_path / "one"))
    assert asyncio.run(run(tmp_path / "two", devices=("cpu", "cpu"))) == expected


def test_nobody_connects_without_the_key_of_the_present_life(tmp_path: Path) -> None:
    async def run() -> None:
        network = LinkNetwork("127.0.0.1", "secret")
        security = network.security("w")
        link = WorkerLink(network.address(tmp_path), security)
        asked = GetFilePart(area=FileArea.STATE, path="x", offset=0)
        monitors: list[zmq.Socket] = []

        def connect(secret_key: str | None) -> zmq.Socket:
            one = zmq.Context.instance().socket(zmq.DEALER)
            one.setsockopt(zmq.LINGER, 0)
            if secret_key is not None:
                one.curve_serverkey = security.public_key.encode()
                one.curve_secretkey = secret_key.encode()
                one.curve_publickey = zmq.curve_public(secret_key.encode())
            monitors.append(one.get_monitor_socket(REFUSED))
            one.connect(link.address)
            one.send_multipart([b"", msgspec.msgpack.encode(asked)])
            return one

        old, new = network.admit("w", "first life"), network.admit("w", "second life")
        strangers = [connect(None), connect(old), connect(zmq.curve_keypair()[1].decode())]
        friend = connect(new)
        receiving = asyncio.create_task(link.receive())
        frame = await asyncio.wait_for(receiving, WAIT_S)
        link.reply(frame.sender, FileStored(transfer_id="heard"))
        assert await asyncio.to_thread(friend.poll, 10_000)
        receiving = asyncio.create_task(link.receive())
        for stranger, monitor in zip(strangers, monitors, strict=False):
            assert await asyncio.to_thread(monitor.poll, 10_000), "it was not refused"
            assert not stranger.poll(0)
        assert not receiving.done()
        receiving.cancel()
        for one in (*strangers, friend):
            one.disable_monitor()
            one.close()
        link.close()
        network.close()

    asyncio.run(run())


def test_a_link_over_the_network_is_encrypted_or_refused() -> None:
    with pytest.raises(ValueError, match="would not be encrypted"):
        WorkerLink("tcp://127.0.0.1:1")
    config = WorkerConfig(address="tcp://127.0.0.1:1", model="m", state="s")
    command = [sys.executable, "-m", "palestra.engine"]
    environment = os.environ | {"PALESTRA_WORKER": msgspec.json.encode(config).decode()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "would not be encrypted" in done.stderr


def test_a_worker_reads_and_writes_nothing_but_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    files = WorkerFiles(tmp_path / "state", tmp_path / "model", tmp_path / "checkpoints")

    async def run() -> None:
        for area, path in ((FileArea.STATE, "../secret"), (FileArea.CHECKPOINTS, str(tmp_path / "secret"))):
            part = await files.answer(GetFilePart(area=area, path=path, offset=0))
            assert isinstance(part, FilePart)
            assert part.error
            assert not part.data
            sent = FilePart(area=area, path=path, offset=0, data=b"x", transfer_id="t", digest="0")
            assert (await files.store(sent)).error
        assert (tmp_path / "secret").read_text() == "secret"
        model = FilePart(area=FileArea.MODEL, path="config.json", offset=0, data=b"x", transfer_id="t", digest="0")
        assert (await files.store(model)).error
        for area, path in ((FileArea.STATE, "worker.json"), (FileArea.CHECKPOINTS, "loose")):
            digest = hashlib.sha256(b"x").hexdigest()
            sent = FilePart(area=area, path=path, offset=0, data=b"x", transfer_id=path, digest=digest)
            assert "is not a file that a worker sends" in (await files.store(sent)).error

    asyncio.run(run())
