"""A server in a few lines: a real ROUTER that starts real workers, speaks the protocol and remembers everything."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from numpy.typing import NDArray
from safetensors.numpy import load_file

from palestra.engine.checkpoint_folders import LocalCheckpoints
from palestra.engine.files import FileThread
from palestra.engine.queues import ModelTable, QueuedModel
from palestra.engine.sampler_cache import SamplerCache
from palestra.engine.sampling import SamplingExecutor
from palestra.engine.snapshots import Snapshots
from palestra.engine.stats import Counters
from palestra.engine.torch_backend import TorchBackend
from palestra.engine.torch_trainer import TorchConfig
from palestra.engine.training import TrainingExecutor
from palestra.types import AdamParams, Datum, LoraConfig, SampleRequest, SamplingParams, TensorData
from palestra.types.engine import (
    BaseModel,
    CreateModel,
    EngineFailure,
    Hello,
    KeepSampler,
    KeptSampler,
    Operation,
    OptimStep,
    Pass,
    Sample,
    Sampled,
    SampleWeights,
    SaveWeights,
    Snapshotted,
    Stats,
    ToWorker,
    Train,
    Trained,
    TrainOutcome,
    Welcome,
    WorkerConfig,
    WorkerHeartbeat,
    decode_from_worker,
    encode_message,
)
from tests.waiting import source_of
from tests.warm_start import WarmProcess, start_engine

WAIT_S = 60.0


class Data:
    """What both drivers send, and how files are compared."""

    optim = OptimStep(adam=AdamParams(learning_rate=1e-2))

    @staticmethod
    def a_pass(n: int = 3, *, seed: int = 0, length: int = 20, shared: int = 0, **options: Any) -> Pass:
        """`shared`: with how many tokens all data begin, beside their own `length`."""
        rng = np.random.default_rng(seed)
        prompt = rng.integers(0, 100, shared)
        data = [a_datum(int(rng.integers(length // 2, length + 1)), rng, prompt) for _ in range(n)]
        return Pass(**{"data": data, "loss": "cross_entropy", **options})

    @staticmethod
    def a_sample(weights: SampleWeights | None = None, n: int = 1, **params: Any) -> Sample:
        params = {"max_tokens": 8, "temperature": 0.0, "stop_token_ids": (), "seed": 0, **params}
        request = SampleRequest(prompt=(3, 1, 4, 1, 5), num_samples=n, params=SamplingParams(**params))
        return Sample(request_id=f"sample-{uuid.uuid4().hex[:8]}", weights=weights or BaseModel(), request=request)

    @staticmethod
    def same_files(a: Path, b: Path) -> bool:
        """To the bit."""
        for name in ("adapter_model.safetensors", "optimizer.safetensors"):
            x, y = load_file(a / name), load_file(b / name)
            if x.keys() != y.keys() or any(x[k].tobytes() != y[k].tobytes() for k in x):
                return False
        return True


def a_datum(length: int, rng: np.random.Generator, prompt: NDArray[np.int64]) -> Datum:
    tokens = np.concatenate([prompt, rng.integers(0, 100, length + 1)])
    return Datum.of_tokens(
        tokens[:-1].tolist(),
        target_tokens=TensorData(data=tokens[1:].astype("<i8").tobytes(), dtype="int64", shape=(len(tokens) - 1,)),
    )


class Driver(Data):
    """What a server does, without its memory for anything but what the test asks."""

    def __init__(self, folder: Path, model: Path, **options: Any):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # A socket's path is short; a test's folder is not.
        self.config = WorkerConfig(
            address=f"ipc:///tmp/palestra-test-{uuid.uuid4().hex[:12]}",
            model=str(model),
            state=str(folder / "state"),
            **options,
        )
        self.context = zmq.Context()
        self.process: WarmProcess | subprocess.Popen[bytes] | None = None
        self.log = folder / "worker.log"
        self.hellos: list[Hello] = []
        self.beats: list[WorkerHeartbeat] = []
        self.results: dict[str, Trained] = {}
        self.sampled: dict[str, Sampled] = {}
        self.sampled_at: dict[str, float] = {}
        self.trained_at: dict[str, float] = {}
        self.snapshots: dict[str, int] = {}
        self.stats: list[Stats] = []
        self.others: list[Any] = []
        self.requests: dict[str, list[Train]] = {}
        self.peer, self.epoch = b"", b""
        self.open()

    # The server's life

    def open(self) -> None:
        self.socket = self.context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self.socket.setsockopt(option, 0)
        self.socket.bind(self.config.address)

    def die(self) -> None:
        """As a server that is killed: nothing it knew is left but its requests."""
        self.socket.close()
        self.hellos, self.results, self.sampled, self.peer = [], {}, {}, b""

    # The worker's life

    def start(self, **environment: str) -> Hello:
        config = msgspec.json.encode(self.config).decode()
        with self.log.open("ab") as out:
            variables = os.environ | {"PALESTRA_WORKER": config, "OMP_NUM_THREADS": "1"} | environment
            self.process = start_engine(output=out, env=variables)
        return self.welcome()

    def welcome(self) -> Hello:
        n = len(self.hellos)
        self.until(lambda: len(self.hellos) > n)
        hello = self.hellos[-1]
        self.peer, self.epoch = hello.worker_id.encode(), uuid.uuid4().hex.encode()
        self.send(Welcome(epoch=self.epoch.decode()))
        return hello

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.peer = b""

    def restart(self) -> Hello:
        """A new worker after the old one died; everything behind its snapshots is sent again."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        hello = self.start()
        self.replay(hello)
        return hello

    def replay(self, hello: Hello) -> None:
        received = {m.model_id: m.received_seq for m in hello.models}
        for result in hello.unstored:
            self.results.setdefault(result.request_id, result)
        for model_id, requests in self.requests.items():
            for train in requests:
                if train.seq_id > received.get(model_id, -1):
                    self.send(train)

    def wait_exit(self) -> int:
        assert self.process is not None
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            self.pump(0.05)
        return self.process.wait(1)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.socket.close()
        self.context.term()

    # Messages

    def send(self, message: ToWorker) -> None:
        self.socket.send_multipart([self.peer, self.epoch, encode_message(message)])

    def pump(self, wait_s: float) -> None:
        """Hears what there is, waiting for the first."""
        while self.socket.poll(wait_s * 1000):
            wait_s = 0
            peer, epoch, frame = self.socket.recv_multipart()
            message = decode_from_worker(frame)
            if isinstance(message, Hello):
                self.hellos.append(message)
            elif isinstance(message, WorkerHeartbeat):
                self.beats.append(message)
            elif peer == self.peer and epoch == self.epoch:
                self._hear(message)

    def _hear(self, message: Any) -> None:
        match message:
            case Trained():
                self.results[message.request_id] = message
                self.trained_at[message.request_id] = time.monotonic()
            case Sampled():
                self.sampled[message.request_id] = message
                self.sampled_at[message.request_id] = time.monotonic()
            case Snapshotted():
                self.snapshots[message.model_id] = message.seq_id
            case Stats():
                self.stats.append(message)
            case _:
                self.others.append(message)

    def until(self, is_true: Callable[[], bool], wait_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + wait_s
        while not is_true():
            assert time.monotonic() < deadline, f"waited for {source_of(is_true)}: {self.log.read_text()[-3000:]}"
            assert self.process is None or self.process.poll() is None, self.log.read_text()[-3000:]
            self.pump(0.1)

    # Requests

    def train(self, model_id: str, operation: Operation) -> str:
        """Numbered, remembered, sent."""
        requests = self.requests.setdefault(model_id, [])
        seq = requests[-1].seq_id + 1 if requests else 0
        train = Train(request_id=f"{model_id}/{seq}", model_id=model_id, seq_id=seq, operation=operation)
        requests.append(train)
        if self.peer:
            self.send(train)
        return train.request_id

    def result(self, request_id: str) -> TrainOutcome:
        self.until(lambda: request_id in self.results)
        return self.results[request_id].outcome

    def run(self, model_id: str, operation: Operation) -> Any:
        return self.result(self.train(model_id, operation))

    def create(self, model_id: str, *, rank: int = 4, seed: int = 7, **options: Any) -> Any:
        return self.run(model_id, CreateModel(lora=LoraConfig(rank=rank, seed=seed), **options))

    def step(self, model_id: str, n: int = 3, *, seed: int = 0) -> list[str]:
        """A pass and an optimizer step."""
        return [self.train(model_id, self.a_pass(n, seed=seed)), self.train(model_id, self.optim)]

    def save(self, model_id: str, name: str, *, optimizer: bool = True) -> Path:
        folder = self.folder / name
        outcome = self.run(model_id, SaveWeights(folder=str(folder), optimizer=optimizer))
        assert not isinstance(outcome, EngineFailure), outcome
        return folder

    def keep(self, model_id: str, sampler_id: str) -> KeptSampler:
        seq = int(self.train(model_id, KeepSampler(sampler_id=sampler_id)).rsplit("/", 1)[1])
        return KeptSampler(sampler_id=sampler_id, model_id=model_id, seq_id=seq)

    def sample(self, weights: SampleWeights | None = None, *, n: int = 1, **params: Any) -> str:
        sample = self.a_sample(weights, n, **params)
        self.send(sample)
        return sample.request_id

    def answer(self, name: str) -> Any:
        self.until(lambda: name in self.sampled)
        return self.sampled[name].outcome

    def logprobs(self, weights: SampleWeights | None = None) -> list[float]:
        outcome = self.answer(self.sample(weights))
        assert not isinstance(outcome, EngineFailure), outcome
        return outcome.sequences[0].logprobs


@pytest.fixture
def drivers(tmp_path: Path, micro_model: Path) -> Iterator[Callable[..., Driver]]:
    """`drivers(model, **worker options)`: not started yet; without a model on the micro Qwen3."""
    made: list[Driver] = []

    def make(model: Path = micro_model, **options: Any) -> Driver:
        options = {"cache_tokens": 4096, "max_rank": 32, **options}
        made.append(Driver(tmp_path / f"driver{len(made)}", model, **options))
        return made[-1]

    yield make
    for driver in made:
        driver.close()
        for address in (driver.config.address, f"{driver.config.address}.ranks"):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        shutil.rmtree(driver.folder, ignore_errors=True)


@pytest.fixture
def driver(drivers: Callable[..., Driver]) -> Driver:
    """With a worker that runs."""
    made = drivers()
    made.start()
    return made


class Desk(Data):
    """The worker's parts without its process and its link: quanta are run by hand."""

    def __init__(self, folder: Path, backend: Any, *, memory_bytes: int = 1 << 30, every_s: float = 1e9):
        self.backend, self.sent = backend, []
        self.counters, self.table = Counters(), ModelTable(self.sent.append)
        self.files = FileThread(lambda: None)
        self.shelf = SamplerCache(backend, self.files, folder / "samplers", memory_bytes=memory_bytes)
        common = (backend, self.table, self.shelf)
        self.samples = SamplingExecutor(*common, self.counters, self.sent.append, max_rows=64, placed_folder=str)
        self.snapshots = Snapshots(
            *common,
            self.files,
            self.counters,
            self.sent.append,
            folder / "models",
            every_s=every_s,
            every_bytes=1 << 40,
        )
        checkpoints = LocalCheckpoints(self.files)
        self.training = TrainingExecutor(*common, checkpoints, self.counters, max_models=64, on_applied=self._applied)

    def _applied(self, model: QueuedModel) -> None:
        self.samples.recheck(model.model_id)
        self.snapshots.on_applied(model)

    def train(self, model_id: str, operation: Operation) -> str:
        model = self.table.models.get(model_id)
        seq = model.received_seq + 1 if model else 0
        train = Train(request_id=f"{model_id}/{seq}", model_id=model_id, seq_id=seq, operation=operation)
        self.table.accept(train, 0)
        return train.request_id

    def create(self, *model_ids: str, rank: int = 4) -> None:
        for model_id in model_ids:
            self.train(model_id, CreateModel(lora=LoraConfig(rank=rank, seed=len(model_id))))
        self.run()

    def run(self) -> None:
        while self.training.has_work or self.samples.has_work or self.files.pending:
            if self.training.has_work:
                self.training.quantum()
            if self.samples.has_work:
                self.samples.quantum(0.01)
            if not self.training.has_work:
                self.files.wait()
            self.files.collect()
            self.shelf.make_room()

    def step(self, model_id: str, seed: int = 0) -> None:
        self.train(model_id, self.a_pass(1, seed=seed, length=6))
        self.train(model_id, self.optim)

    def keep(self, model_id: str, sampler_id: str) -> KeptSampler:
        seq = int(self.train(model_id, KeepSampler(sampler_id=sampler_id)).rsplit("/", 1)[1])
        return KeptSampler(sampler_id=sampler_id, model_id=model_id, seq_id=seq)

    def sample(self, weights: SampleWeights | None = None, **params: Any) -> str:
        sample = self.a_sample(weights, **params)
        self.samples.add(sample)
        return sample.request_id

    def logprobs(self, weights: SampleWeights | None = None) -> list[float]:
        """What a greedy sample says about the weights."""
        name = self.sample(weights)
        self.run()
        outcome = self.outcome(name)
        assert not isinstance(outcome, EngineFailure), outcome
        return outcome.sequences[0].logprobs

    def drop(self, model_id: str) -> None:
        """As `Worker` does it."""
        model = self.table.drop(model_id)
        self.shelf.orphan(model_id)
        self.snapshots.drop(model)
        self.backend.free(model.weights)
        self.samples.recheck(model_id)

    def outcome(self, request_id: str) -> Any:
        found = [m for m in self.sent if getattr(m, "request_id", None) == request_id]
        assert len(found) == 1, f"{request_id}: {found}"
        return found[0].outcome

    def weights(self, model_id: str) -> np.ndarray:
        return self.backend.image(self.table.models[model_id].weights).tensors["weights"]


@pytest.fixture(scope="session")
def get_backend(micro_model: Path) -> Callable[..., Any]:
    """`get_backend(cls, **options)`: a backend of the test's own."""

    def get(cls: type = TorchBackend, **options: Any) -> Any:
        return cls(TorchConfig(model=str(micro_model), cache_tokens=4096, **options))

    return get


@pytest.fixture
def desk(tmp_path: Path, get_backend: Callable[..., Any]) -> Iterator[Desk]:
    made = Desk(tmp_path, get_backend(micro_batch_tokens=64))
    yield made
    made.files.close()
