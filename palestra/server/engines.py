"""Engines of the served models: a worker for each, and the runner of its samples."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from palestra.config.serve import ModelConfig, ReplicasConfig, ServeConfig, replica_config, worker_config
from palestra.server.core.checkpoints.adapter_transfers import AdapterTransfers
from palestra.server.core.samples.requests import SamplingRequests
from palestra.server.core.samples.runners import SampleRunner, WorkerRunner
from palestra.server.core.telemetry.metrics import Metrics
from palestra.server.core.workers.link import address_in
from palestra.server.core.workers.served_models import ServedModels
from palestra.server.core.workers.supervisor import RemoteWorker, WorkerError, WorkerListener, WorkerSupervisor
from palestra.server.core.workers.watchdog import WatchdogTimeouts
from palestra.server.core.workers.worker_hosts import LocalHost
from palestra.server.replicas.engine_runner import EngineRunner
from palestra.server.replicas.replica_port import ReplicaPort
from palestra.types.engine import Sampled, WorkerConfig, encode_message


class PreloadedWorkers:
    """Processes that have loaded the models of a standby, and wait until it takes over."""

    def __init__(self) -> None:
        self._hosts: dict[str, LocalHost] = {}
        """Where they are to be started, by their state folders."""

    def start(self, config: ServeConfig) -> None:
        for model in config.models:
            own, log_file = _settings_of(config, model)
            if own.devices:
                continue  # ranks of a group meet in the state folder, which may be the active server's
            Path(own.state).mkdir(parents=True, exist_ok=True)
            host = self._hosts[own.state] = LocalHost()
            host.preload(own, log_file)

    def host(self, state: str) -> LocalHost | None:
        return self._hosts.get(state)

    def end(self) -> None:
        """Ends preloaded workers that no supervisor has taken over."""
        for host in self._hosts.values():
            host.drop_preloaded()


class WorkerCluster(Protocol):
    """Machines on which workers run."""

    def place(self, config: WorkerConfig, model: ModelConfig) -> tuple[WorkerConfig, RemoteWorker]:
        """Returns the configuration of a worker there, and what the server needs for it."""
        ...


async def open_cluster(config: ServeConfig, secret: str, stack: AsyncExitStack) -> WorkerCluster | None:
    """Joins the Ray cluster on which workers are to run, if there is one. Raises WorkerError."""
    if config.ray is None:
        return None
    try:
        from palestra.server.core.workers.ray_workers import RayWorkers
    except ModuleNotFoundError as e:
        raise WorkerError(f"ray needs {e.name}; to install it: pip install 'palestra[ray]'") from None
    return await RayWorkers.open(config, config.ray, secret, stack)


def make_workers(
    config: ServeConfig, listener: WorkerListener, preloaded: PreloadedWorkers, cluster: WorkerCluster | None
) -> ServedModels:
    patience, workers = _patience(config), dict[str, WorkerSupervisor]()
    for model in config.models:
        own, log_file = _settings_of(config, model)
        state = own.state
        if any(worker.config.state == state for worker in workers.values()):
            name = Path(state).name
            raise WorkerError(f"two models would share the state folder {name}; give one of them another name")
        own, remote = _placed(own, model, cluster)
        worker = WorkerSupervisor(
            model.name[0],
            own,
            listener,
            log_file=log_file,
            patience=patience,
            write_wait_s=config.write_wait_s,
            remote=remote,
            host=preloaded.host(state),
        )
        workers.update(dict.fromkeys(model.name, worker))
    return ServedModels(workers)


def _settings_of(config: ServeConfig, model: ModelConfig) -> tuple[WorkerConfig, Path]:
    """Returns the settings of a model's worker, and its log file."""
    name = _folder_name(config.state, model.name)
    settings = worker_config(config, model, address_in(config.state, name), config.state / name)
    return settings, config.state / "logs" / f"{name}.log"


def _placed(
    config: WorkerConfig, model: ModelConfig, cluster: WorkerCluster | None
) -> tuple[WorkerConfig, RemoteWorker | None]:
    return (config, None) if cluster is None else cluster.place(config, model)


def replica_key(secret: str) -> str:
    """Returns the key of the samplers that the server starts itself. It is the same after a restart."""
    return hmac.digest(secret.encode(), b"palestra replicas", "sha256").hex()


def open_replica_port(
    config: ServeConfig,
    secret: str,
    served: ServedModels,
    runners: Mapping[WorkerSupervisor, SampleRunner],
    is_valid_key: Callable[[int], bool],
) -> ReplicaPort | None:
    """Opens the port at which replicas elsewhere join, if there is to be one. Raises WorkerError if it is taken."""
    if config.replica_port is None:
        return None

    def find(base_model: str) -> EngineRunner | None:
        worker = served.by_name.get(base_model)
        runner = runners.get(worker) if worker is not None else None
        return runner if isinstance(runner, EngineRunner) else None

    host = config.replica_host or config.host
    port = ReplicaPort(secret, find, _patience(config), is_valid_key)
    try:
        port.open(host, config.replica_port)
    except OSError as e:
        raise WorkerError(f"cannot listen on {host}:{config.replica_port} ({e}); choose another replica_port") from None
    return port


def _patience(config: ServeConfig) -> WatchdogTimeouts:
    return WatchdogTimeouts(
        start_s=config.worker_start_s, silence_s=config.worker_silence_s, stall_s=config.worker_stall_s
    )


async def start_engine(worker: WorkerSupervisor, runner: SampleRunner) -> None:
    if isinstance(runner, EngineRunner):  # both load the same model, and neither needs the other for it
        await asyncio.gather(worker.start(), runner.start())
    else:
        await worker.start()
        await runner.start()


class RunnerFactory:
    def __init__(
        self,
        config: ServeConfig,
        sampling: SamplingRequests,
        adapters: AdapterTransfers,
        metrics: Metrics,
        cluster: WorkerCluster | None,
        *,
        is_held: Callable[[WorkerSupervisor], bool],
        own_url: str,
        own_key: str,
    ):
        """`is_held` says whether samples of a worker have to wait because of training. With `own_url` and `own_key`
        samplers on this machine fetch adapters."""
        self._config, self._adapters, self._metrics, self._cluster = config, adapters, metrics, cluster
        self._sampling, self._is_held, self._own_url, self._own_key = sampling, is_held, own_url, own_key

    def make(self, worker: WorkerSupervisor, model: ModelConfig) -> SampleRunner:
        if model.sampler == "vllm":
            return self._vllm_runner(worker, model)
        if model.replicas is None:
            return WorkerRunner(worker, self._is_held)
        return self._engine_runner(worker, model, model.replicas)

    def _vllm_runner(self, worker: WorkerSupervisor, model: ModelConfig) -> SampleRunner:
        from palestra.server.vllm.process import AdapterSource
        from palestra.server.vllm.runner import VllmRunner

        return VllmRunner(
            worker,
            model,
            self._metrics,
            self._adapters,
            AdapterSource(self._own_url, self._own_key),
            self._config.state,
            on_sampled=self._on_sampled,
            on_streamed=self._sampling.on_streamed,
        )

    def _engine_runner(self, worker: WorkerSupervisor, model: ModelConfig, replicas: ReplicasConfig) -> SampleRunner:
        config, folder = self._config, Path(worker.config.state)
        runner = EngineRunner(
            worker,
            replicas,
            self._metrics,
            self._adapters,
            on_sampled=self._on_sampled,
            on_streamed=self._sampling.on_streamed,
        )
        for number in range(replicas.count):
            name = f"{folder.name}-replica-{number}"
            own = replica_config(config, model, number, address_in(config.state, name), folder / f"replica-{number}")
            own, remote = _placed(own, model, self._cluster)
            runner.add_own(
                own,
                config.state / "logs" / f"{name}.log",
                patience=_patience(config),
                write_wait_s=config.write_wait_s,
                remote=remote,
            )
        return runner

    def _on_sampled(self, message: Sampled) -> None:
        self._sampling.on_sampled(message, encode_message(message))


def _folder_name(state: Path, names: list[str]) -> str:
    """Returns the name of a model's folder. It is found by name, not by number, because another model that is served
    from the same state must not find its snapshots. Any of its names will do, so that their order may change."""
    folders = ["worker-" + re.sub(r"[^A-Za-z0-9._-]", "_", name) for name in names]
    return next((f for f in folders if (state / f).is_dir()), folders[0])
