"""Aliases: an owner's own names for models. A run moves one to its newest weights, so that agents need not know their
names.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Literal

from pydantic import BaseModel, Field

from palestra.server.core.errors import ApiError
from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid
from palestra.store import Store
from palestra.store.queries import aliases as rows
from palestra.store.records import Alias

MAX_ALIASES = 256  # of one owner: /v1/models resolves each of them
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class AliasRequest(BaseModel):
    model: str = Field(min_length=1)
    """A base model, a checkpoint's path or a sampling session."""


class AliasObject(BaseModel):
    id: str
    object: Literal["alias"] = "alias"
    model: str
    version: int
    updated_at: float

    @classmethod
    def of(cls, alias: Alias) -> AliasObject:
        return cls(id=alias.name, model=alias.model, version=alias.version, updated_at=alias.updated_at)


class AliasList(BaseModel):
    object: Literal["list"] = "list"
    data: list[AliasObject]


class AliasDeleted(BaseModel):
    id: str
    object: Literal["alias"] = "alias"
    deleted: Literal[True] = True


class Aliases:
    """The only writer of its table, so the memory always equals what is stored."""

    def __init__(self, store: Store):
        self._store = store
        self._by_owner: dict[str, dict[str, Alias]] | None = None
        """By owner and name; None: not read yet."""
        self._changing = asyncio.Lock()
        """Allows one change at a time, so that memory follows the order of the database."""

    async def of(self, owner: str) -> list[Alias]:
        return sorted((await self._all()).get(owner, {}).values(), key=lambda alias: alias.name)

    async def find(self, owner: str, name: str) -> Alias | None:
        return (await self._all()).get(owner, {}).get(name)

    async def get(self, owner: str, name: str) -> Alias:
        alias = await self.find(owner, name)
        if alias is None:
            raise _no_alias(name)
        return alias

    async def put(self, owner: str, name: str, model: str) -> Alias:
        aliases = await self._all()
        async with self._changing:
            if len(mine := aliases.setdefault(owner, {})) >= MAX_ALIASES and name not in mine:
                raise invalid("name", f"you already have {MAX_ALIASES} aliases; delete one, or move one")
            now = time.time()
            alias = await self._store.write(lambda c: rows.put_alias(c, owner=owner, name=name, model=model, now=now))
            mine[name] = alias
        return alias

    async def drop(self, owner: str, name: str) -> None:
        aliases = await self._all()
        async with self._changing:
            if name not in aliases.get(owner, {}):
                raise _no_alias(name)
            await self._store.write(lambda c: rows.drop_alias(c, owner=owner, name=name))
            del aliases[owner][name]

    async def _all(self) -> dict[str, dict[str, Alias]]:
        if self._by_owner is None:
            async with self._changing:
                if self._by_owner is None:
                    aliases: dict[str, dict[str, Alias]] = {}
                    for alias in await self._store.read(rows.list_aliases):
                        aliases.setdefault(alias.owner, {})[alias.name] = alias
                    self._by_owner = aliases
        return self._by_owner


def check_name(name: str, base_models: list[str]) -> None:
    if not NAME.fullmatch(name) or name in (".", ".."):
        raise invalid("name", f"alias {shown(name)}: 1 to 64 of A-Z a-z 0-9 . _ - are allowed")
    if name in base_models:
        raise invalid("name", f"{shown(name)} is a base model that is served here; choose another name")


def target_missing(model: str, base_models: list[str]) -> ApiError:
    detail = (
        f"the alias stays as it was: {shown(model)} does not exist or you do not have access to it. It can point at a "
        f"base model ({', '.join(base_models)}), a tinker://…/sampler_weights/… path or an open sampling "
        "session, not at another alias"
    )
    return ApiError(404, detail, param="model", code="model_not_found")


def target_gone(alias: Alias) -> ApiError:
    detail = (
        f"the alias {shown(alias.name)} points at {shown(alias.model)}, which no longer exists: its session "
        f"ended or the checkpoint was deleted. Resume the run that moves it, or move it: PUT /v1/aliases/{alias.name}"
    )
    return ApiError(404, detail, param="model", code="model_not_found")


def _no_alias(name: str) -> ApiError:
    detail = f"you have no alias {shown(name)}; GET /v1/aliases lists yours, PUT /v1/aliases/NAME makes one"
    return ApiError(404, detail, param="name", code="alias_not_found")
