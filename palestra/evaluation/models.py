"""The model of an evaluation: at an endpoint that runs, or at a server that is started for it.

Owns: what the name of a model means. Never touches: calls.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import tinker

from palestra.checkpoints import SavedCheckpoint, find_checkpoint, split_name
from palestra.config.evaluate import EvaluationConfig
from palestra.config.train import TrainModel
from palestra.evaluation.endpoint import ModelEndpoint
from palestra.evaluation.errors import EvaluationError
from palestra.runs.reader import RunReader, RunStatus
from palestra.training.launch import check_model, model_folder
from palestra.training.own_server import own_server
from palestra.training.tinker_policy import TinkerSampler

NO_KEY = "tml-none"


def checkpoint_of(config: EvaluationConfig) -> SavedCheckpoint | None:
    """The checkpoint that `model` names; None if it names no run."""
    if config.server is not None:
        return None
    run, which = split_name(config.model)
    for path in (config.runs / run, Path(run)):
        if (path / "config.json").is_file() and (path / "checkpoints").is_dir():
            return find_checkpoint(RunReader(path), which)
    return None


def check_evaluated_model(config: EvaluationConfig) -> None:
    """Raises ValueError or CheckpointError if there is no such model."""
    if config.server is None and checkpoint_of(config) is None:
        check_model(model_folder(TrainModel(name=config.model)))


def endpoint_of(server: str) -> str:
    """The address of a server's model endpoint: where it names no path, it is at /v1, as everywhere."""
    server = server.rstrip("/")
    return server if urlsplit(server).path else f"{server}/v1"


@asynccontextmanager
async def open_model(
    config: EvaluationConfig, state: Path, log: Path, key: str | None, note: Callable[[str], None]
) -> AsyncIterator[ModelEndpoint]:
    """`state` and `log` are for a server that is started."""
    if config.server is not None:
        yield ModelEndpoint(endpoint_of(config.server), config.model, key or NO_KEY)
        return
    saved = checkpoint_of(config)
    if saved is None:
        folder = str(model_folder(TrainModel(name=config.model)))
        async with own_server(folder, config.model, state, log, note, device=config.device) as url:
            yield ModelEndpoint(endpoint_of(url), config.model, key or NO_KEY)
        return
    if saved.server is not None:
        async with _sampled(saved.server, saved.address, key) as endpoint:
            yield endpoint
        return
    run = RunReader(saved.run)
    if run.status() is RunStatus.RUNNING:
        raise EvaluationError(f"{run.name} is still going, and its server is its own; export {saved.name}, or wait")
    base = TrainModel.model_validate(run.read_about()["config"]["model"])
    server = own_server(
        *(str(model_folder(base)), base.name, saved.run / "engine", log, note),
        device=config.device,
        weights=base.weights,
    )
    async with server as url, _sampled(url, saved.address, key) as endpoint:
        yield endpoint


@asynccontextmanager
async def _sampled(server: str, address: str, key: str | None) -> AsyncIterator[ModelEndpoint]:
    """Makes the weights of a saved state ready to be sampled, as a model of the server's endpoint."""
    try:
        service = tinker.ServiceClient(base_url=server, api_key=key or NO_KEY)
        model = await service.create_training_client_from_state_async(address)
        sampler = TinkerSampler(await model.save_weights_and_get_sampling_client_async(), 0)
    except tinker.TinkerError as error:
        raise EvaluationError(f"{address} cannot be sampled at {server}: {error}") from None
    yield ModelEndpoint(endpoint_of(server), sampler.model, key or NO_KEY)
