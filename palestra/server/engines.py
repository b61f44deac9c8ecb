"""Engines of the served models: a worker for each, and its sampler.

Owns: making them from the config. Never touches: starting them, their requests.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from palestra.config.serve import ModelConfig, ServeConfig, replica_config, worker_config
from palestra.server.core.core import Core
from palestra.server.core.samples.runners import SampleRunner, WorkerRunner
from palestra.server.core.workers.link import address_in
from palestra.server.core.workers.messages import WorkerMessages
from palestra.server.core.workers.places import LocalPlace
from palestra.server.core.workers.supervisor import RemoteWorker, WorkerError, WorkerSupervisor
from palestra.server.core.workers.watchdog import WatchdogTimeouts
from palestra.server.replicas.engine_runner import EngineRunner
from palestra.server.replicas.replica_port import ReplicaPort
from palestra.types.engine import Sampled, WorkerConfig, encode_message


class PreloadedWorkers:
    """Processes that have loaded the models of a standby, and wait until it takes over."""

    def __init__(self) -> None:
        self._places: dict[str, LocalPlace] = {}
        """Where they are to be started, by their state folders."""

    def start(self, config: ServeConfig) -> None:
        for model in config.models:
            own, log_file = _settings_of(config, model)
            if own.devices:
                continue  # ranks of a group meet in the state folder, which may be the active server's
            Path(own.state).mkdir(parents=True, exist_ok=True)
            place = self._places[own.state] = LocalPlace()
            place.preload(own, log_file)

    def place(self, state: str) -> LocalPlace | None:
        return self._places.get(state)

    def end(self) -> None:
        """Ends those that nobody has gone on with."""
        for place in self._places.values():
            place.drop_preloaded()


class WorkerCluster(Protocol):
    """Machines on which workers run."""

    def place(self, config: WorkerConfig, model: ModelConfig) -> tuple[WorkerConfig, RemoteWorker]:
        """Returns the configuration of a worker there, and what the server needs for it."""
        ...


async def open_cluster(core: Core, stack: AsyncExitStack) -> WorkerCluster | None:
    """Joins the Ray cluster on which workers are to run, if there is one. Raises WorkerError."""
    if core.config.ray is None:
        return None
    try:
        from palestra.server.core.workers.ray_workers import RayWorkers
    except ModuleNotFoundError as e:
        raise WorkerError(f"ray needs {e.name}; to install it: pip install 'palestra[ray]'") from None
    return await RayWorkers.open(core.config, core.config.ray, core.secret, stack)


def add_engines(core: Core, preloaded: PreloadedWorkers, cluster: WorkerCluster | None = None) -> None:
    config, messages, patience = core.config, WorkerMessages(core), _patience(core.config)
    for model in config.models:
        own, log_file = _settings_of(config, model)
        state = own.state
        if any(worker.config.state == state for worker in core.all_workers):
            name = Path(state).name
            raise WorkerError(f"two models would share the state folder {name}; give one of them another name")
        own, remote = _placed(own, model, cluster)
        worker = WorkerSupervisor(
            model.name[0],
            own,
            messages,
            log_file=log_file,
            patience=patience,
            write_wait_s=config.write_wait_s,
            remote=remote,
            place=preloaded.place(state),
        )
        core.workers.update(dict.fromkeys(model.name, worker))
        core.sampling.runners[worker] = _runner(core, worker, model, patience, cluster)


def _settings_of(config: ServeConfig, model: ModelConfig) -> tuple[WorkerConfig, Path]:
    """Returns the settings of a model's worker, and its log file."""
    name = _folder_name(config.state, model.name)
    settings = worker_config(config, model, address_in(config.state, name), config.state / name)
    return settings, config.state / "logs" / f"{name}.log"


def _placed(
    config: WorkerConfig, model: ModelConfig, cluster: WorkerCluster | None
) -> tuple[WorkerConfig, RemoteWorker | None]:
    return (config, None) if cluster is None else cluster.place(config, model)


def open_replica_port(core: Core) -> ReplicaPort | None:
    """Opens the port at which replicas elsewhere join, if there is to be one. Raises WorkerError if it is taken."""
    config = core.config
    if config.replica_port is None:
        return None

    def find(base_model: str) -> EngineRunner | None:
        worker = core.workers.get(base_model)
        runner = core.sampling.runners.get(worker) if worker is not None else None
        return runner if isinstance(runner, EngineRunner) else None

    host = config.replica_host or config.host
    port = ReplicaPort(core.secret, find, _patience(config), core.keys.is_valid)
    core.keys.on_end.append(port.end_keys)
    try:
        port.open(host, config.replica_port)
    except OSError as e:
        raise WorkerError(f"cannot listen on {host}:{config.replica_port} ({e}); choose another replica_port") from None
    return port


def _patience(config: ServeConfig) -> WatchdogTimeouts:
    return WatchdogTimeouts(
        start_s=config.worker_start_s, silence_s=config.worker_silence_s, stall_s=config.worker_stall_s
    )


async def start_engine(core: Core, worker: WorkerSupervisor) -> None:
    runner = core.sampling.runners[worker]
    if isinstance(runner, EngineRunner):  # both load the same model, and neither needs the other for it
        await asyncio.gather(worker.start(), runner.start())
    else:
        await worker.start()
        await runner.start()


def _runner(
    core: Core, worker: WorkerSupervisor, model: ModelConfig, patience: WatchdogTimeouts, cluster: WorkerCluster | None
) -> SampleRunner:
    if model.sampler == "torch" and model.replicas is None:
        return WorkerRunner(worker, lambda worker: core.training.dispatcher(worker).is_quarantined)

    def on_sampled(message: Sampled) -> None:
        core.sampling.on_sampled(message, encode_message(message))

    ends = {"on_sampled": on_sampled, "on_streamed": core.sampling.on_streamed}
    if model.sampler == "vllm":
        from palestra.server.vllm.process import AdapterSource
        from palestra.server.vllm.runner import VllmRunner

        def source() -> AdapterSource:
            return AdapterSource(core.own_url, core.replica_key)

        return VllmRunner(worker, model, core.metrics, core.adapters, source, core.config.state, **ends)
    assert model.replicas is not None
    runner, config = EngineRunner(worker, model.replicas, core.metrics, core.adapters, **ends), core.config
    folder = Path(worker.config.state)
    for number in range(model.replicas.count):
        name = f"{folder.name}-replica-{number}"
        own = replica_config(config, model, number, address_in(config.state, name), folder / f"replica-{number}")
        own, remote = _placed(own, model, cluster)
        runner.add_own(
            own,
            config.state / "logs" / f"{name}.log",
            patience=patience,
            write_wait_s=config.write_wait_s,
            remote=remote,
        )
    return runner


def _folder_name(state: Path, names: list[str]) -> str:
    """Returns the name of a model's folder. It is found by name, not by number, because another model that is served
    from the same state must not find its snapshots. Any of its names will do, so that their order may change."""
    folders = ["worker-" + re.sub(r"[^A-Za-z0-9._-]", "_", name) for name in names]
    return next((f for f in folders if (state / f).is_dir()), folders[0])
