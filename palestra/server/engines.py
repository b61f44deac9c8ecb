"""Engines of the served models: a worker for each, and its sampler.

Owns: making them from the config. Never touches: starting them, their requests.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path

from palestra.config.serve import ModelConfig, ServeConfig, replica_config, worker_config
from palestra.server.core.core import Core
from palestra.server.core.sample_runners import SampleRunner, WorkerRunner
from palestra.server.core.watchdog import WatchdogTimeouts
from palestra.server.core.worker_link import address_in
from palestra.server.core.worker_messages import WorkerMessages
from palestra.server.core.workers import WorkerError, WorkerHandle, WorkerProcess
from palestra.server.replicas.engine_runner import EngineRunner
from palestra.server.replicas.replica_port import ReplicaPort
from palestra.types.engine import Sampled, WorkerConfig, encode_message


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """How a worker is started."""

    config: WorkerConfig
    log_file: Path

    @classmethod
    def of(cls, config: ServeConfig, model: ModelConfig) -> WorkerPlace:
        name = _folder_name(config.state, model.name)
        settings = worker_config(config, model, address_in(config.state, name), config.state / name)
        return cls(settings, config.state / "logs" / f"{name}.log")


class PreloadedWorkers:
    """Processes that have loaded the models of a standby, and wait until it takes over."""

    def __init__(self) -> None:
        self._processes: dict[str, WorkerProcess] = {}
        """Processes by their state folders."""

    def start(self, config: ServeConfig) -> None:
        for model in config.models:
            place = WorkerPlace.of(config, model)
            Path(place.config.state).mkdir(parents=True, exist_ok=True)
            self._processes[place.config.state] = WorkerProcess.start(place.config, place.log_file, preload=True)

    def take(self, state: str) -> WorkerProcess | None:
        return self._processes.pop(state, None)

    def end(self) -> None:
        """Ends those that nobody has taken."""
        for process in self._processes.values():
            process.child.kill()
            process.child.wait()
        self._processes.clear()


def add_engines(core: Core, preloaded: PreloadedWorkers) -> None:
    config, messages, patience = core.config, WorkerMessages(core), _patience(core.config)
    for model in config.models:
        place = WorkerPlace.of(config, model)
        state = place.config.state
        if any(worker.config.state == state for worker in core.all_workers):
            name = Path(state).name
            raise WorkerError(f"two models would share the state folder {name}; give one of them another name")
        worker = WorkerHandle(
            model.name[0],
            place.config,
            messages,
            log_file=place.log_file,
            patience=patience,
            write_wait_s=config.write_wait_s,
        )
        worker.preloaded = preloaded.take(state)
        core.workers.update(dict.fromkeys(model.name, worker))
        core.sampling.runners[worker] = _runner(core, worker, model, patience)


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


async def start_engine(core: Core, worker: WorkerHandle) -> None:
    runner = core.sampling.runners[worker]
    if isinstance(runner, EngineRunner):  # both load the same model, and neither needs the other for it
        await asyncio.gather(worker.start(), runner.start())
    else:
        await worker.start()
        await runner.start()


def _runner(core: Core, worker: WorkerHandle, model: ModelConfig, patience: WatchdogTimeouts) -> SampleRunner:
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
        runner.add_local(
            replica_config(config, model, number, address_in(config.state, name), folder / f"replica-{number}"),
            config.state / "logs" / f"{name}.log",
            patience=patience,
            write_wait_s=config.write_wait_s,
        )
    return runner


def _folder_name(state: Path, names: list[str]) -> str:
    """Returns the name of a model's folder. It is found by name, not by number, because another model that is served
    from the same state must not find its snapshots. Any of its names will do, so that their order may change."""
    folders = ["worker-" + re.sub(r"[^A-Za-z0-9._-]", "_", name) for name in names]
    return next((f for f in folders if (state / f).is_dir()), folders[0])
