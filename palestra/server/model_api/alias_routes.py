"""Aliases over HTTP."""

from __future__ import annotations

from fastapi import APIRouter, Request

from palestra.server.http.access import CallerNow
from palestra.server.http.body import decoded, read_body
from palestra.server.http.openapi import refusals
from palestra.server.model_api.aliases import AliasDeleted, AliasList, AliasObject, AliasRequest
from palestra.server.model_api.errors import OpenAIErrorEnvelope, OpenAIRoute, parse_body
from palestra.server.model_api.openai_chat.routes import ServiceNow

_SCHEMA = AliasRequest.model_json_schema()
_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": _SCHEMA}}}}

router = APIRouter(route_class=OpenAIRoute, responses=refusals(OpenAIErrorEnvelope), tags=["model endpoint"])


@router.get("/aliases")
async def list_aliases(service: ServiceNow, caller: CallerNow) -> AliasList:
    """The caller's aliases."""
    return AliasList(data=[AliasObject.of(alias) for alias in await service.models.aliases.of(caller.owner)])


@router.get("/aliases/{name:path}")
async def get_alias(name: str, service: ServiceNow, caller: CallerNow) -> AliasObject:
    """One alias, and the model it points at."""
    return AliasObject.of(await service.models.aliases.get(caller.owner, name))


@router.put("/aliases/{name:path}", openapi_extra=_BODY)
async def put_alias(name: str, request: Request, service: ServiceNow, caller: CallerNow) -> AliasObject:
    """Make an alias or move it. Calls under way continue with the weights they began with."""
    call = await decoded(lambda body: parse_body(AliasRequest, body), await read_body(request))
    return AliasObject.of(await service.models.point(caller, name, call.model))


@router.delete("/aliases/{name:path}")
async def delete_alias(name: str, service: ServiceNow, caller: CallerNow) -> AliasDeleted:
    """Delete an alias; the model it points at stays."""
    await service.models.aliases.drop(caller.owner, name)
    return AliasDeleted(id=name)
