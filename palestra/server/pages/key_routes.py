"""The page of keys, for admins: who has one, when it was used last; new ones are shown once."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse
from msgspec import Struct

from palestra.server.core.errors import Refusal, not_found
from palestra.server.http.json_records import read_record
from palestra.server.http.openapi import JSON_BODY
from palestra.server.pages.access import AdminNow
from palestra.store import Store
from palestra.store.errors import KeyExists
from palestra.store.queries.keys import create_key, list_keys, revoke_key
from palestra.store.records import Key, NewKey, Rights
from palestra.view.api import json_response
from palestra.view.pages import Form
from palestra.view.rendering import render

MAX_NAME = 100
RIGHTS = (Rights.TRAINER, Rights.ADMIN, Rights.WORKER, Rights.METRICS, Rights.REPLICA)
"""Those that a person may give; a claim gives the right `episode`."""

api = APIRouter(prefix="/api/v1/keys", tags=["keys"])
pages = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


class ShownKey(Struct, frozen=True, kw_only=True):
    id: int
    name: str
    owner: str
    right: Rights
    created_at: float
    revoked_at: float | None
    last_used_at: float | None
    """None: never. Within two seconds, and within 15 of a crash."""
    expires_at: float | None
    """When it ends by itself; None: never."""


class KeyRequest(Struct, frozen=True, kw_only=True):
    name: str
    owner: str = ""
    """Empty: the key's name."""
    right: Rights = Rights.TRAINER


class CreatedKey(Struct, frozen=True, kw_only=True):
    key: str
    """The text of the key, which is not stored and cannot be shown again."""
    about: ShownKey


class KeyStore:
    """The keys of a server and their uses."""

    def __init__(self, store: Store, uses: dict[int, float]):
        self._store, self._uses = store, uses

    async def list(self) -> list[ShownKey]:
        return [self._shown(one) for one in await self._store.read(lambda conn: list_keys(conn, revoked=True))]

    async def create(self, request: KeyRequest) -> CreatedKey:
        name, owner = request.name.strip(), request.owner.strip() or request.name.strip()
        if not 0 < len(name) <= MAX_NAME or len(owner) > MAX_NAME or not (name + owner).isprintable():
            raise Refusal(400, f"name: a key needs one, of at most {MAX_NAME} characters, and so does its owner")
        if request.right not in RIGHTS:
            raise Refusal(400, f"right: choose one of {', '.join(RIGHTS)}")
        try:
            made: NewKey = await self._store.write(
                lambda conn: create_key(conn, name=name, owner=owner, rights=request.right, now=time.time())
            )
        except KeyExists as error:
            raise Refusal(409, str(error)) from None
        return CreatedKey(key=made.text, about=self._shown(made.key))

    async def revoke(self, key_id: int) -> ShownKey:
        gone = await self._store.write(lambda conn: revoke_key(conn, key_id, now=time.time()))
        if gone is None:
            raise not_found("key in use", str(key_id))
        return self._shown(gone)

    def _shown(self, key: Key) -> ShownKey:
        return ShownKey(
            id=key.key_id,
            name=key.name,
            owner=key.owner,
            right=key.rights,
            created_at=key.created_at,
            revoked_at=key.revoked_at,
            last_used_at=self._uses.get(key.key_id, key.last_used_at),
            expires_at=key.expires_at,
        )


async def _keys(request: Request) -> KeyStore:
    return KeyStore(request.app.state.store, request.app.state.key_uses)


KeysNow = Annotated[KeyStore, Depends(_keys)]


@api.get("")
async def show_keys(keys: KeysNow, caller: AdminNow) -> Response:
    """All keys, revoked ones too, for keys with the right `admin`."""
    return json_response(await keys.list())


@api.post("", openapi_extra=JSON_BODY)
async def make_key(request: Request, keys: KeysNow, caller: AdminNow) -> Response:
    """Make a key: `name`, `owner` (or the name), `right` (or `trainer`). Its text is in this answer alone."""
    response = json_response(await keys.create(await read_record(request, KeyRequest)))
    response.headers["Cache-Control"] = "no-store"
    return response


@api.post("/{key_id}/revoke")
async def end_key(keys: KeysNow, caller: AdminNow, key_id: int) -> Response:
    """Revoke a key for ever; it works for two seconds at most."""
    return json_response(await keys.revoke(key_id))


@pages.get("/keys")
async def keys_page(request: Request, keys: KeysNow, caller: AdminNow) -> HTMLResponse:
    return render(request, "keys.html", keys=await keys.list(), caller=caller, made=None, complaint="", rights=RIGHTS)


@pages.post("/keys")
async def make_key_on_page(request: Request, keys: KeysNow, caller: AdminNow, form: Form) -> HTMLResponse:
    made, complaint = None, ""
    try:
        made = await keys.create(msgspec.convert(form, KeyRequest))
    except (Refusal, msgspec.ValidationError) as error:
        complaint = str(error)
    known = await keys.list()
    status = 400 if complaint else 200
    page = render(
        request, "keys.html", status, keys=known, caller=caller, made=made, complaint=complaint, rights=RIGHTS
    )
    page.headers["Cache-Control"] = "no-store"  # no browser keeps the text of a key
    return page


@pages.post("/keys/{key_id}/revoke")
async def end_key_on_page(request: Request, keys: KeysNow, caller: AdminNow, key_id: int) -> HTMLResponse:
    return render(request, "key_row.html", one=await keys.revoke(key_id), caller=caller)
