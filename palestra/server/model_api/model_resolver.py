"""Resolves the name in `model`: a base model, a checkpoint, a sampling session or an alias; and finds its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.tool_parsers import tool_format
from palestra.config.serve import ModelConfig
from palestra.server.broker.model_calls import EpisodeCalls
from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.errors import ApiError, Refusal
from palestra.server.core.owners.callers import Caller
from palestra.server.core.paths import SCHEME, TinkerPath
from palestra.server.core.samples.requests import SamplingRequests, SamplingSession
from palestra.server.core.wire_errors import WireError
from palestra.server.core.workers.served_models import ServedModels
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.server.model_api.aliases import Aliases, check_name, target_gone, target_missing
from palestra.server.model_api.errors import invalid, no_model
from palestra.store import Store
from palestra.store.records import Alias
from palestra.types.engine import KeptSampler, ModelCard, SavedAdapter
from palestra.types.episodes import SamplingBounds
from palestra.util.json_types import JsonObject

GONE_RETRY_S = 2.0  # a trainer that resumes takes seconds to tens of seconds


@dataclass(frozen=True, slots=True)
class SamplingTarget:
    name: str
    """The name as the client gave it."""
    worker: WorkerSupervisor
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    alias: Alias | None = None
    """The alias under which it was found, as it was then: a call continues with these weights when the alias moves."""
    version: int | None = None
    """Version of the weights of an episode's run when the call was admitted."""
    bounds: SamplingBounds | None = None
    """The sampling bounds of an episode's run."""

    @property
    def card(self) -> ModelCard:
        if self.worker.card is None:
            raise ApiError(503, "the engine is starting; try again in a moment", retry_after_s=2.0)
        return self.worker.card


class ModelResolver:
    def __init__(
        self,
        models: Sequence[ModelConfig],
        store: Store,
        served: ServedModels,
        sampling: SamplingRequests,
        checkpoints: CheckpointFiles,
        calls: EpisodeCalls,
    ):
        self._served, self._sampling, self._checkpoints, self._calls = served, sampling, checkpoints, calls
        self.aliases = Aliases(store)
        self._tokenizers: dict[str, asyncio.Task[ChatTokenizer]] = {}
        self._tool_formats = {model.name[0]: tool_format(model.tool_format) for model in models if model.tool_format}
        """Formats that the config sets."""

    @property
    def names(self) -> list[str]:
        return self._served.names

    async def find(self, caller: Caller, name: str) -> SamplingTarget:
        """Resolves a name. With an episode's key it is the model of its run, whatever the name."""
        if caller.attempt is not None:
            name = self._played(self._calls.model_of(caller.attempt), name)
        return await self._named(caller, name)

    @asynccontextmanager
    async def calling(self, caller: Caller, name: str) -> AsyncIterator[SamplingTarget]:
        """Surrounds a call that is sampled, including its answer."""
        if caller.attempt is None:
            yield await self.find(caller, name)
            return
        async with self._calls.calling(caller.attempt, caller.traceparent) as call:
            target = await self._of_run(caller, call.model, name)
            self._calls.played_by(caller.attempt, call.run, target.worker.name)
            yield replace(target, version=call.version, bounds=call.bounds)

    async def _of_run(self, caller: Caller, model: str | None, name: str) -> SamplingTarget:
        """Returns the model of an episode's run. Weights that are missing come back with the trainer, so players are
        asked to retry."""
        try:
            return await self._named(caller, self._played(model, name))
        except ApiError as error:
            if model is None or error.status != 404:
                raise
            detail = f"the weights of this run ({model}) do not exist: its trainer has stopped, or not published yet"
            raise ApiError(503, detail, code="weights_gone", retry_after_s=GONE_RETRY_S) from error

    def _played(self, model: str | None, name: str) -> str:
        """Returns the model of a run that has none: the only served one, or what the player names."""
        return model or (self.names[0] if len(self._served.workers) == 1 else name)

    async def _named(self, caller: Caller, name: str) -> SamplingTarget:
        target = await self._find(caller, name)
        if target is not None:
            return target
        alias = await self.aliases.find(caller.owner, name)
        if alias is None:
            raise no_model(name, self.names)
        target = await self._behind(caller, alias)
        if target is None:
            raise target_gone(alias)
        return target

    async def _find(self, caller: Caller, name: str) -> SamplingTarget | None:
        """Finds a model that has this name itself."""
        if name.startswith(SCHEME):
            try:
                checkpoint = await self._checkpoints.find(TinkerPath.parse(name), caller.owner)
            except (WireError, Refusal):
                return None
            worker = self._served.find(checkpoint.base_model)
            return SamplingTarget(name, worker, model_path=name) if worker is not None else None
        if (sampler := self._sampling.samplers.get(name)) is not None and sampler.owner == caller.owner:
            return SamplingTarget(name, sampler.worker, sampling_session_id=name)
        worker = self._served.find(name)
        return SamplingTarget(name, worker, base_model=name) if worker is not None else None

    async def _behind(self, caller: Caller, alias: Alias) -> SamplingTarget | None:
        target = await self._find(caller, alias.model)
        return None if target is None else replace(target, name=alias.name, alias=alias)

    async def point(self, caller: Caller, name: str, model: str) -> Alias:
        """Makes or moves an alias."""
        check_name(name, self.names)
        if await self._find(caller, model) is None:
            raise target_missing(model, self.names)
        return await self.aliases.put(caller.owner, name, model)

    async def listed(self, caller: Caller) -> list[SamplingTarget]:
        """Returns the base models, and the aliases that work. For an episode, the model of its run."""
        if caller.attempt is not None:
            return [await self.find(caller, self.names[0])]
        bases = [SamplingTarget(name, worker, base_model=name) for name, worker in self._served.by_name.items()]
        mine = [alias for alias in await self.aliases.of(caller.owner) if alias.name not in self.names]
        found = [await self._behind(caller, alias) for alias in mine]
        return bases + [target for target in found if target is not None]

    async def find_or_only(self, caller: Caller, name: str | None) -> SamplingTarget:
        """Without a name, returns the only served model."""
        if name is None and caller.attempt is None and len(self._served.workers) != 1:
            raise invalid("model", f"model: name one of {', '.join(self.names)}")
        return await self.find(caller, self.names[0] if name is None else name)

    async def tokenizer(self, target: SamplingTarget) -> ChatTokenizer:
        """Returns the tokenizer, which is read once, in a thread."""
        name = target.worker.name
        if name not in self._tokenizers:
            reading = asyncio.to_thread(self._load, name, Path(target.worker.config.model))
            self._tokenizers[name] = asyncio.create_task(reading, name=f"tokenizer of {name}")
        try:
            return await asyncio.shield(self._tokenizers[name])
        except ChatError as error:
            reason = str(error).partition("\n")[0].replace(str(target.worker.config.model), name)
            raise invalid("model", f"model: {reason}", code="unsupported") from None

    def _load(self, name: str, folder: Path) -> ChatTokenizer:
        tokenizer = ChatTokenizer.load(folder)
        if name in self._tool_formats:
            tokenizer.tool_format, tokenizer.unknown_format = self._tool_formats[name], ""
        return tokenizer


def about(target: SamplingTarget) -> JsonObject:
    """Returns the entry in /v1/models."""
    alias, card = target.alias, target.worker.card
    return {
        "id": target.name,
        "object": "model",
        "created": 0 if alias is None else int(alias.created_at),
        "owned_by": "palestra",
        "root": target.worker.name if alias is None else alias.model,
        "max_model_len": None if card is None else card.max_positions,
    }


def weights_name(sampler: SamplingSession) -> str:
    """Returns the exact name of the weights. Every save of a checkpoint has its own folder, so the last part of its
    path distinguishes saves."""
    match sampler.weights:
        case KeptSampler(model_id=model_id, seq_id=seq_id):
            return f"{model_id}@{seq_id}"
        case SavedAdapter(folder=folder):
            return "/".join(Path(folder).parts[-3:])
        case _:
            return sampler.worker.name
