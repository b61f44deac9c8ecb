"""Resolves the name of a model to an endpoint that has it.

What takes seconds to import (tinker, with torch) is imported where it is needed: a model at a server needs none of it.

A name is a model at a given server; or the checkpoint of a training run (RUN, RUN@STEP, RUN@best, RUN@last), a
`tinker://` address, a model folder, a Hugging Face id in the local cache, or the bundled model.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import quote

import httpx
from msgspec import Struct

from palestra.checkpoints import SavedCheckpoint, find_checkpoint, split_name
from palestra.config.train import TrainModel
from palestra.endpoints.model_folders import check_model, model_folder
from palestra.net.chat_apis import ApiName, ModelEndpoint, chat_api, endpoint_url
from palestra.net.chat_apis.errors import EndpointError, ModelNotFound
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.saved_checkpoints import ADDRESS

NO_KEY = "tml-none"
KEYS = {"anthropic": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY"}
TRAINED = "/weights/"
"""Part of the address of a state that can be trained; it is made ready to be sampled first."""
LOOK_S = 2.0


class ModelPlace(Struct, frozen=True, kw_only=True):
    """Places where models are looked for, and how a model is served that is in none of them."""

    server: str | None = None
    """Address of the server that has the models. None: one is started where need be."""
    api: ApiName = "auto"
    key: str | None = None
    runs: Path = Path("runs")
    device: str = "auto"
    may_run: str | None = None
    """Address of a server of ours that may be running; if it has the model, none is started."""


def checkpoint_of(name: str, place: ModelPlace) -> SavedCheckpoint | None:
    """The checkpoint that a name means; None if it names no run."""
    if place.server is not None or name.startswith(ADDRESS):
        return None
    run, which = split_name(name)
    for path in (place.runs / run, Path(run)):
        if (path / "config.json").is_file() and (path / "checkpoints").is_dir():
            return find_checkpoint(RunReader(path), which)
    return None


def check_name(name: str, place: ModelPlace) -> None:
    """Raises ValueError or CheckpointError if there is no such model here; a server's are not looked at."""
    if place.server is None and not name.startswith(ADDRESS) and checkpoint_of(name, place) is None:
        check_model(model_folder(TrainModel(name=name)))


def endpoint_at(server: str, model: str, place: ModelPlace) -> ModelEndpoint:
    url = endpoint_url(server)
    api = chat_api(place.api, url)
    key = place.key or (os.environ.get(KEYS[api.name]) if place.server else None)
    return ModelEndpoint(base_url=url, model=model, api_key=key or NO_KEY, api=api)


@asynccontextmanager
async def open_models(
    names: Sequence[str], place: ModelPlace, state: Path, log: Path, note: Callable[[str], None]
) -> AsyncIterator[list[ModelEndpoint]]:
    """Opens models, in the order of their names; `state` and `log` are for servers that are started. Raises
    EndpointError, CheckpointError and PolicyError."""
    async with AsyncExitStack() as stack:
        opener = _Opener(place, state, log, note, stack)
        # Runs first: what serves a run's checkpoint also has the model that it was trained on.
        order = sorted(range(len(names)), key=lambda index: checkpoint_of(names[index], place) is None)
        found = {index: await opener.open(names[index]) for index in order}
        yield [found[index] for index in range(len(names))]


class _Opener:
    def __init__(
        self, place: ModelPlace, state: Path, log: Path, note: Callable[[str], None], stack: AsyncExitStack
    ) -> None:
        self._place, self._state, self._log, self._note, self._stack = place, state, log, note, stack
        self._servers: dict[Path, _Server] = {}
        """Servers that were started, by their state."""

    async def open(self, name: str) -> ModelEndpoint:
        place = self._place
        if place.server is not None:
            return await self._at(place.server, name)
        if name.startswith(ADDRESS):
            if place.may_run is None:
                raise EndpointError(f"{name} is at a server; give its address with --server")
            return await self._at(place.may_run, name)
        if (saved := checkpoint_of(name, place)) is not None:
            if not name.endswith(f"@{saved.step}"):
                self._note(f"{name} is {saved.name}")
            return await self._checkpoint(saved)
        if place.may_run is not None and await _has_model(place.may_run, name, place.key):
            self._note(f"{name} is at {place.may_run}")
            return endpoint_at(place.may_run, name, place)
        return await self._base_model(name)

    async def _base_model(self, name: str) -> ModelEndpoint:
        model = TrainModel(name=name)
        try:
            folder = model_folder(model)
            check_model(folder)
        except ValueError as error:
            where = f"it is not at {self._place.may_run}, and " if self._place.may_run else ""
            raise ModelNotFound(f"no model {name!r}: {where}{error}") from None
        server = next((one for one in self._servers.values() if one.folder == folder), None)
        server = server or await self._start(model, self._state / f"server-{len(self._servers)}")
        return endpoint_at(server.url, server.name, self._place)

    async def _checkpoint(self, saved: SavedCheckpoint) -> ModelEndpoint:
        if saved.server is not None:
            return await self._at(saved.server, saved.address)
        run, state = RunReader(saved.run), saved.run.absolute() / "engine"
        if run.status() is RunStatus.RUNNING:
            raise EndpointError(f"{run.name} is still going, and its server is its own; export {saved.name}, or wait")
        base = TrainModel.model_validate(run.read_about()["config"]["model"])
        server = self._servers.get(state) or await self._start(base, state)
        return await self._at(server.url, saved.address)

    async def _start(self, model: TrainModel, state: Path) -> _Server:
        from palestra.endpoints.own_server import own_server

        folder = model_folder(model)
        url = await self._stack.enter_async_context(
            own_server(
                *(str(folder), model.name, state, self._log, self._note),
                device=self._place.device,
                weights=model.weights,
            )
        )
        self._servers[state] = _Server(url, model.name, folder if model.weights is None else None)
        return self._servers[state]

    async def _at(self, server: str, name: str) -> ModelEndpoint:
        if not (name.startswith(ADDRESS) and TRAINED in name):
            return endpoint_at(server, name, self._place)
        import tinker

        from palestra.rollouts.reachability import check_server
        from palestra.rollouts.tinker_sampler import TinkerSampler

        try:
            await asyncio.to_thread(check_server, server)  # the SDK would try for ever
            service = tinker.ServiceClient(base_url=server, api_key=self._place.key or NO_KEY)
            model = await service.create_training_client_from_state_async(name)
            sampler = TinkerSampler(await model.save_weights_and_get_sampling_client_async(), 0)
        except tinker.NotFoundError as error:
            raise ModelNotFound(f"{name} is not at {server}: {error}") from None
        except tinker.TinkerError as error:
            raise EndpointError(f"{name} cannot be sampled at {server}: {error}") from None
        return endpoint_at(server, sampler.model, self._place)


class _Server(Struct, frozen=True):
    url: str
    name: str
    """Name of its base model."""
    folder: Path | None
    """Folder of its base model; None if its weights are not served as stored."""


async def _has_model(server: str, name: str, key: str | None) -> bool:
    """Whether a server of ours runs there and has a model of this name."""
    url = f"{endpoint_url(server)}/models/{quote(name, safe='')}"
    headers = {"Authorization": f"Bearer {key or NO_KEY}"}
    try:
        async with httpx.AsyncClient(timeout=LOOK_S) as client:
            return (await client.get(url, headers=headers)).status_code == 200
    except httpx.TransportError:
        return False
