"""Engines of the served models: a worker for each, and its sampler.

Owns: making them from the config. Never touches: starting them, their requests.
"""

from __future__ import annotations

import re
from pathlib import Path

from palestra.config.serve import ModelConfig, worker_config
from palestra.server.core.core import Core
from palestra.server.core.sample_runners import SampleRunner, WorkerRunner
from palestra.server.core.watchdog import WatchdogTimeouts
from palestra.server.core.worker_link import address_in
from palestra.server.core.worker_messages import WorkerMessages
from palestra.server.core.workers import WorkerError, WorkerHandle
from palestra.types.engine import KeptSampler, encode_message

LOOK_AGAIN_S = 60.0


def add_engines(core: Core) -> None:
    config, messages = core.config, WorkerMessages(core)
    patience = WatchdogTimeouts(
        start_s=config.worker_start_s,
        silence_s=config.worker_silence_s,
        stall_s=config.worker_stall_s,
    )
    for model in config.models:
        name = _folder_name(config.state, model.name)
        state = config.state / name
        if any(worker.config.state == str(state) for worker in core.all_workers):
            raise WorkerError(f"two models would share the state folder {name}; give one of them another name")
        worker = WorkerHandle(
            model.name[0],
            worker_config(config, model, address_in(config.state, name), state),
            messages,
            log_file=config.state / "logs" / f"{name}.log",
            patience=patience,
            write_wait_s=config.write_wait_s,
        )
        core.workers.update(dict.fromkeys(model.name, worker))
        core.sampling.runners[worker] = _runner(core, worker, model)


async def start_engine(core: Core, worker: WorkerHandle) -> None:
    await worker.start()
    await core.sampling.runners[worker].start()


def _runner(core: Core, worker: WorkerHandle, model: ModelConfig) -> SampleRunner:
    if model.sampler == "torch":
        return WorkerRunner(worker, lambda worker: core.training.dispatcher(worker).is_quarantined)
    from palestra.server.vllm.runner import VllmRunner

    async def until_saved(kept: KeptSampler) -> None:
        """Waits until the weights are saved, or until it is certain that they never will be."""
        model = core.training.models.get(kept.model_id)
        future = model.futures.get(kept.seq_id) if model is not None else None
        while future is not None and not future.is_done and not core.is_stopping:
            await future.wait(LOOK_AGAIN_S)

    return VllmRunner(
        worker,
        model,
        core.metrics,
        core.config.state,
        is_live=lambda sampler_id: sampler_id in core.sampling.samplers,
        until_saved=until_saved,
        on_sampled=lambda message: core.sampling.on_sampled(message, encode_message(message)),
        on_streamed=core.sampling.on_streamed,
    )


def _folder_name(state: Path, names: list[str]) -> str:
    """Returns the name of a model's folder. It is found by name, not by number, because another model that is served
    from the same state must not find its snapshots. Any of its names will do, so that their order may change."""
    folders = ["worker-" + re.sub(r"[^A-Za-z0-9._-]", "_", name) for name in names]
    return next((f for f in folders if (state / f).is_dir()), folders[0])
