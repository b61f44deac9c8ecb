"""Routes for samplers elsewhere: replicas of our own engine join, vLLM servers fetch adapters."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel

from palestra import __version__
from palestra.config.serve import ModelConfig, ServeConfig
from palestra.server.core.checkpoints.adapter_transfers import AdapterTransfers
from palestra.server.core.errors import Refusal
from palestra.server.core.samples.runners import SampleRunner
from palestra.server.core.workers.served_models import ServedModels
from palestra.server.core.workers.supervisor import WorkerSupervisor
from palestra.server.http.auth import Authenticator
from palestra.server.replicas.engine_runner import EngineRunner
from palestra.server.replicas.replica_port import ReplicaPort
from palestra.store.records import Rights
from palestra.util.model_fingerprint import model_fingerprint

router = APIRouter(prefix="/engine", tags=["replicas"])

REPLICAS = (Rights.ADMIN, Rights.REPLICA)
SHARED_SETTINGS = ("weights", "numerics", "max_rank", "micro_batch_tokens", "sampler_memory_bytes", "beat_every_s")
"""Settings of the model's worker that its replicas must have, too."""


class JoinRequest(BaseModel):
    """What a replica has."""

    base_model: str | None = None
    """Name of the served model. None: the only one."""
    fingerprint: str
    """Digest of its base model, as `palestra.util.model_fingerprint` makes it."""
    version: str
    """Version of Palestra."""


class JoinAnswer(BaseModel):
    """What a replica needs to join."""

    base_model: str
    port: int
    """The port of the link, at the address where the server was called."""
    server_key: str
    """The server's public CURVE key."""
    replica_id: str
    signature: str
    """Signs the replica's id, the name of the model and the number of the key."""
    key_id: int
    """Number of the key that it joined with; 0: there was none."""
    settings: dict[str, Any]
    """Settings of its engine."""


@dataclass(frozen=True, slots=True)
class EngineApi:
    """What these routes need of the server."""

    config: ServeConfig
    served: ServedModels
    runners: Mapping[WorkerSupervisor, SampleRunner]
    adapters: AdapterTransfers
    port: ReplicaPort | None
    own_key: str
    """Key of the samplers that the server starts itself."""


async def _engine_api(request: Request) -> EngineApi:
    return request.app.state.engine_api


EngineApiNow = Annotated[EngineApi, Depends(_engine_api)]


async def _admit(request: Request, api: EngineApiNow) -> int:
    """Returns the number of the caller's key. Also accepts the key of samplers that the server has started itself,
    which has the number 0."""
    if hmac.compare_digest(request.headers.get("x-api-key", "").encode(), api.own_key.encode()):
        return 0
    authenticator: Authenticator = request.app.state.authenticator
    caller = await authenticator.admit(request, rights=REPLICAS)
    return 0 if caller.key is None else caller.key.key_id


@router.post("/replicas")
async def join(api: EngineApiNow, body: JoinRequest, key_id: Annotated[int, Depends(_admit)]) -> JoinAnswer:
    """Admit a sampler replica, if its base model and version are the server's."""
    port = api.port
    if port is None or api.config.replica_port is None:
        raise Refusal(400, "no replica can join this server; start it with replica_port=PORT")
    if body.version != __version__:
        raise Refusal(400, f"this replica is Palestra {body.version}, the server is {__version__}; install the same")
    model = _model(api.config, body.base_model)
    worker = api.served.by_name[model.name[0]]
    if not isinstance(api.runners[worker], EngineRunner):
        raise Refusal(
            400, f"{worker.name} is not sampled by replicas; serve it with models.N.replicas=0, or a number to start"
        )
    if worker.card is None:
        raise Refusal(503, "the server is starting; try again in a moment", retry_after_s=1.0)
    if body.fingerprint != await asyncio.to_thread(_fingerprint, model.path):
        raise Refusal(400, f"the replica's base model is another than {worker.name}: its config or its weights differ")
    ticket = port.ticket(worker.name, key_id)
    settings = {name: getattr(worker.config, name) for name in SHARED_SETTINGS}
    return JoinAnswer(
        base_model=worker.name,
        port=api.config.replica_port,
        server_key=port.public_key,
        replica_id=ticket.replica_id,
        signature=ticket.signature,
        key_id=key_id,
        settings=settings | {"dtype": worker.card.dtype},
    )


def _model(config: ServeConfig, name: str | None) -> ModelConfig:
    if name is None and len(config.models) == 1:
        return config.models[0]
    served = {known: model for model in config.models for known in model.name}
    if name not in served:
        names = ", ".join(served)
        raise Refusal(400 if name is None else 404, f"choose one of the served models (--name): {names}")
    return served[name]


@lru_cache(maxsize=64)
def _fingerprint(folder: Path) -> str:
    return model_fingerprint(folder)


@router.get("/adapters/{digest}", response_class=Response)
async def adapter(api: EngineApiNow, digest: str, _: Annotated[int, Depends(_admit)]) -> Response:
    """The file of an adapter, by its SHA-256, also in ranges. It is there while a sampler is told to load it."""
    with api.adapters.reading(digest) as file:
        if file is None:
            raise Refusal(404, f"there is no adapter {digest[:12]!r} here now")
        return FileResponse(file, media_type="application/octet-stream")
