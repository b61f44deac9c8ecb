"""The page of owners: what each may use, has now, and has used; admins see all and set limits, others see
themselves."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse
from msgspec import Struct

from palestra.server.core.errors import Refusal
from palestra.server.core.owners.callers import Caller
from palestra.server.core.owners.owner_states import OwnerStates
from palestra.server.core.owners.quotas import OwnerQuotas
from palestra.server.core.owners.usage import UsageAccount
from palestra.server.http.json_records import read_record
from palestra.server.http.openapi import JSON_BODY
from palestra.server.pages.access import AdminNow, LookerNow
from palestra.server.pages.server_state import sees_all
from palestra.store.queries.usage import UsageGrouping, UsageTotal
from palestra.store.records import ALL_OWNERS, LIMITS, Rights
from palestra.util.amounts import parse_amount
from palestra.util.suggest import did_you_mean
from palestra.view.api import json_response
from palestra.view.pages import Form
from palestra.view.rendering import render

api = APIRouter(prefix="/api/v1/owners", tags=["owners"])
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

MAX_OWNER = 100
MAX_ROWS = 500
DAYS = (1, 7, 30, 365)
NONE = "none"


class QuotaRequest(Struct, frozen=True, kw_only=True):
    owner: str
    """`*`: every owner that has no limit of its own."""
    limits: dict[str, int | None]
    """By name: models, pending_samples, pending_bytes, tokens_per_day, checkpoint_bytes,
    picture_bytes. None removes a limit."""


async def _owners(request: Request) -> OwnerStates:
    return request.app.state.owners


async def _quotas(request: Request) -> OwnerQuotas:
    return request.app.state.quotas


OwnersNow = Annotated[OwnerStates, Depends(_owners)]
QuotasNow = Annotated[OwnerQuotas, Depends(_quotas)]


@api.get("")
async def show_owners(owners: OwnersNow, caller: LookerNow) -> Response:
    """Owners with their limits and what they have of each now; a trainer sees its own owner."""
    return json_response(await owners.read(_whose(caller)))


@api.post("", openapi_extra=JSON_BODY)
async def set_owner_quota(request: Request, owners: OwnersNow, quotas: QuotasNow, caller: AdminNow) -> Response:
    """Set limits of an owner, for keys with the right `admin`."""
    wanted = await read_record(request, QuotaRequest)
    await _set(quotas, wanted)
    return json_response(await owners.read(wanted.owner))


@pages.get("/owners")
async def owners_page(
    request: Request,
    caller: LookerNow,
    by: UsageGrouping = UsageGrouping.OWNER,
    days: Annotated[int, Query(ge=1, le=36500)] = 30,
) -> HTMLResponse:
    return await _page(request, caller, by=by, days=days)


@pages.post("/owners")
async def set_quota_on_page(request: Request, quotas: QuotasNow, caller: AdminNow, form: Form) -> HTMLResponse:
    owner, name, amount = (form.get(field, "").strip() for field in ("owner", "limit", "amount"))
    try:
        limit = None if amount == NONE else parse_amount(amount)
        await _set(quotas, QuotaRequest(owner=owner, limits={name: limit}))
    except (Refusal, ValueError) as error:
        return await _page(request, caller, complaint=str(error), status=400)
    return await _page(request, caller)


async def _page(
    request: Request,
    caller: Caller,
    *,
    by: UsageGrouping = UsageGrouping.OWNER,
    days: int = 30,
    complaint: str = "",
    status: int = 200,
) -> HTMLResponse:
    owners: OwnerStates = request.app.state.owners
    quotas: OwnerQuotas = request.app.state.quotas
    rows = await _usage(request.app.state.usage, _whose(caller), by, days)
    return render(
        request,
        "owners.html",
        status,
        owners=await owners.read(_whose(caller)),
        common=quotas.of(ALL_OWNERS),
        usage=rows[:MAX_ROWS],
        usage_total=len(rows),
        by=by,
        days=days,
        groupings=[one.value for one in UsageGrouping],
        all_days=DAYS,
        limits=LIMITS,
        is_admin=caller.right is Rights.ADMIN,
        complaint=complaint,
    )


async def _usage(usage: UsageAccount, owner: str | None, by: UsageGrouping, days: int) -> list[UsageTotal]:
    """The newest day first, or who has used the most tokens."""
    since = (datetime.fromtimestamp(time.time(), UTC) - timedelta(days=days - 1)).date().isoformat()
    found = await usage.totals((by,), owner=owner, since=since)
    return sorted(found, key=lambda one: one.day if by is UsageGrouping.DAY else one.tokens, reverse=True)


def _whose(caller: Caller) -> str | None:
    return None if sees_all(caller) else caller.owner


async def _set(quotas: OwnerQuotas, wanted: QuotaRequest) -> None:
    if not 0 < len(wanted.owner) <= MAX_OWNER or not wanted.owner.isprintable():
        raise Refusal(400, f"owner: name one, of at most {MAX_OWNER} characters")
    for name in wanted.limits:
        if name not in LIMITS:
            raise Refusal(400, f"limits: {name[:50]!r} is unknown; {did_you_mean(name, list(LIMITS))}")
    try:
        await quotas.set(wanted.owner, wanted.limits)
    except ValueError as error:
        raise Refusal(400, str(error)) from None
