"""Routes for usage, which is what owners and runs have sampled, trained and saved, and for quotas."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec import Struct

from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import TRAINERS, Caller
from palestra.server.core.owners.owner_states import OwnerState, OwnerStates
from palestra.server.core.owners.usage import UsageAccount
from palestra.server.http.auth import Authenticator
from palestra.server.http.json_records import json_response
from palestra.server.http.openapi import answer_of
from palestra.store.queries.usage import UsageGrouping, UsageTotal
from palestra.store.records import Rights

router = APIRouter(prefix="/api/v1", tags=["usage"])

SEE_ALL = (Rights.ADMIN, Rights.METRICS)
Day = Annotated[str | None, Query(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class UsageAnswer(Struct, frozen=True, kw_only=True):
    usage: list[UsageTotal]


class QuotasAnswer(Struct, frozen=True, kw_only=True):
    owners: list[OwnerState]


async def _viewer(request: Request) -> Caller:
    authenticator: Authenticator = request.app.state.authenticator
    return await authenticator.admit(request, rights=(*TRAINERS, Rights.METRICS))


Viewer = Annotated[Caller, Depends(_viewer)]


@router.get("/quotas", response_class=Response, responses=answer_of(QuotasAnswer))
async def show_quotas(request: Request, caller: Viewer) -> Response:
    """The limits of owners, and what they have of each now. A key sees its own owner; with the right `admin` or
    `metrics` it sees all of them."""
    owner = None if caller.right in SEE_ALL else caller.owner
    owners: OwnerStates = request.app.state.owners
    return json_response(QuotasAnswer(owners=await owners.read(owner)))


@router.get("/usage", response_class=Response, responses=answer_of(UsageAnswer))
async def show_usage(
    request: Request,
    caller: Viewer,
    by: Annotated[tuple[UsageGrouping, ...], Query(min_length=1, max_length=3)] = (UsageGrouping.OWNER,),
    since: Day = None,
    until: Day = None,
    owner: str | None = None,
) -> Response:
    """Tokens, checkpoint bytes and engine seconds, added up by `owner`, `run` or `day` (or several of them), from one
    day to another by UTC. A key sees its own owner; with the right `admin` or `metrics` it sees all of them, or one."""
    usage: UsageAccount = request.app.state.usage
    if caller.right not in SEE_ALL:
        if owner not in (None, caller.owner):
            raise Refusal(403, f"this key has the right '{caller.right}'; the usage of others needs admin")
        owner = caller.owner
    return json_response(UsageAnswer(usage=await usage.totals(by, owner=owner, since=since, until=until)))
