"""Routes for samplers elsewhere: vLLM servers fetch adapters.

Owns: these routes, who may call them. Never touches: samples, which do not come this way.
"""

from __future__ import annotations

import hmac
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import FileResponse

from palestra.server.core.core import Core
from palestra.server.core.errors import Refusal
from palestra.server.http.auth import Authenticator
from palestra.store.records import Rights

router = APIRouter(prefix="/engine", tags=["replicas"])

REPLICAS = (Rights.ADMIN, Rights.REPLICA)


async def _admit(request: Request) -> None:
    """Also accepts the key of samplers that the server has started itself."""
    core: Core = request.app.state.core
    if not hmac.compare_digest(request.headers.get("x-api-key", "").encode(), core.replica_key.encode()):
        authenticator: Authenticator = request.app.state.authenticator
        await authenticator.admit(request, rights=REPLICAS)


@router.get("/adapters/{digest}", response_class=Response)
async def adapter(request: Request, digest: str, _: Annotated[None, Depends(_admit)]) -> Response:
    """The file of an adapter, by its SHA-256, also in ranges. It is there while a sampler is told to load it."""
    core: Core = request.app.state.core
    with core.adapters.reading(digest) as file:
        if file is None:
            raise Refusal(404, f"there is no adapter {digest[:12]!r} here now")
        return FileResponse(file, media_type="application/octet-stream")
