"""What a `model` means: a base name, a checkpoint, a sampling session; and the tokenizer that goes with it.

Owns: finding it, by owner. Never touches: sampling.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from palestra.chat import ChatError, ChatTokenizer
from palestra.server.auth import Caller
from palestra.server.errors import Refusal
from palestra.server.hub import Hub
from palestra.server.openai.errors import ApiError, invalid, no_model
from palestra.server.sampling import Sampler
from palestra.server.tinker.errors import WireError
from palestra.server.tinker.paths import SCHEME, TinkerPath
from palestra.server.workers import Worker
from palestra.types.engine import KeptSampler, ModelCard, SavedAdapter


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    """As the client calls it."""
    worker: Worker
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None

    @property
    def card(self) -> ModelCard:
        if self.worker.card is None:
            raise ApiError(503, "the engine is starting; come back in a moment", retry_after_s=2.0)
        return self.worker.card


class Models:
    def __init__(self, hub: Hub):
        self._hub = hub
        self._tokenizers: dict[str, asyncio.Task[ChatTokenizer]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._hub.workers)

    async def find(self, caller: Caller, name: str) -> Target:
        if name.startswith(SCHEME):
            try:
                checkpoint = await self._hub.checkpoints.find(TinkerPath.parse(name), caller.owner)
            except (WireError, Refusal):
                raise no_model(name, self.names) from None
            worker = self._hub.base(checkpoint.base_model)
            target = Target(name, worker, model_path=name) if worker is not None else None
        elif (sampler := self._hub.sampling.samplers.get(name)) is not None and sampler.owner == caller.owner:
            target = Target(name, sampler.worker, sampling_session_id=name)
        else:
            worker = self._hub.base(name)
            target = Target(name, worker, base_model=name) if worker is not None else None
        if target is None:
            raise no_model(name, self.names)
        return target

    async def find_or_only(self, caller: Caller, name: str | None) -> Target:
        """Without a name, the one model there is."""
        if name is None and len(self._hub.all_workers) != 1:
            raise invalid("model", f"model: name one of {', '.join(self.names)}")
        return await self.find(caller, self.names[0] if name is None else name)

    async def tokenizer(self, target: Target) -> ChatTokenizer:
        """Read once, beside the loop."""
        name = target.worker.name
        if name not in self._tokenizers:
            reading = asyncio.to_thread(ChatTokenizer.load, Path(target.worker.config.model))
            self._tokenizers[name] = asyncio.create_task(reading, name=f"tokenizer of {name}")
        try:
            return await asyncio.shield(self._tokenizers[name])
        except ChatError as error:
            reason = str(error).partition("\n")[0].replace(str(target.worker.config.model), name)
            raise invalid("model", f"model: {reason}", code="unsupported") from None


def weights_name(sampler: Sampler) -> str:
    """Which weights exactly. A checkpoint's folder is its own for every save, so its last part tells saves apart."""
    match sampler.weights:
        case KeptSampler(model_id=model_id, seq_id=seq_id):
            return f"{model_id}@{seq_id}"
        case SavedAdapter(folder=folder):
            return "/".join(Path(folder).parts[-3:])
        case _:
            return sampler.worker.name
