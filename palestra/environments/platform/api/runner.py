"""Fleet's runner of one instance: resources, queries, diffs, resets, verifiers."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeGuard

from palestra.environments.platform.api.auth import PlatformRefusal
from palestra.environments.platform.api.http import object_of
from palestra.environments.platform.api.queries import (
    DatabaseCopies,
    IgnoreLists,
    describe,
    read,
    structured_diff,
    write,
)
from palestra.environments.platform.api.verification import VerifierService
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.pool import InstancePool
from palestra.util.json_types import JsonObject

RESOURCES = [
    {"name": "seed", "type": "sqlite", "mode": "ro", "label": "as it was"},
    {"name": "current", "type": "sqlite", "mode": "rw", "label": "as it is"},
]


@dataclass(frozen=True, slots=True)
class RunnerRequest:
    instance_id: str
    part: str
    """One app in a world of several, with its own names of tables; empty: all of it. It is read-only: changes belong to
    the whole world."""
    resource: str
    body: bytes


class InstanceRunner:
    def __init__(self, pool: InstancePool, verifying: VerifierService) -> None:
        self.pool, self._verifying = pool, verifying
        self._copies = DatabaseCopies()

    def resources(self, request: RunnerRequest) -> object:
        with self._used(request):
            return [{**one, "mode": "ro"} for one in RESOURCES] if request.part else RESOURCES

    def health(self, request: RunnerRequest) -> object:
        with self._used(request):
            now = datetime.now(UTC).isoformat()
            return {"status": "healthy", "timestamp": now, "service": "palestra-platform"}

    def describe(self, request: RunnerRequest) -> object:
        with self._used(request) as instance:
            tables = describe(self._copy(request, instance))
        return {
            "success": True,
            "resource_name": request.resource,
            "tables": tables,
            "message": f"{len(tables)} tables",
        }

    def query(self, request: RunnerRequest) -> object:
        given = object_of(request.body)
        query, args = given.get("query"), given.get("args")
        if not isinstance(query, str):
            raise PlatformRefusal(400, "query: SQL as text is needed")
        with self._used(request) as instance:
            if given.get("read_only") is not False:
                return read(self._copy(request, instance), query, args)
            if request.part:
                raise PlatformRefusal(
                    400,
                    "write to the database of the whole world, env.db('current'), where tables are called app_table",
                )
            if request.resource != "current":
                raise PlatformRefusal(400, "the seed database is read-only; write to current")
            return write(instance, query, args)

    def diff(self, request: RunnerRequest) -> object:
        ignore = _ignored(object_of(request.body))
        with self._used(request) as instance:
            found = structured_diff(instance, ignore, request.part)
        return {"success": True, "diff": found, "message": "since the seed"}

    def reset(self, request: RunnerRequest) -> object:
        """Resets to the seed, or to another one of the same size by its number."""
        _check_whole(request)
        given = object_of(request.body)
        if given.get("timestamp") is not None:
            raise PlatformRefusal(400, "timestamp is not supported; the world's clock is part of its data")
        with self._used(request) as instance:
            number, seed = given.get("seed"), instance.seed
            if number is None or number == seed.number:
                instance.reset()
                return {"success": True, "message": f"reset to {seed.key}"}
        self.pool.replace(request.instance_id, f"{seed.size}-{number}")
        return {"success": True, "message": f"reset to {seed.size}-{number}"}

    async def execute_verifier(self, request: RunnerRequest) -> object:
        _check_whole(request)
        return await self._verifying.execute_function(request.instance_id, request.body)

    @contextmanager
    def _used(self, request: RunnerRequest) -> Iterator[Instance]:
        with self.pool.use(request.instance_id) as instance:
            known = [one.key for one in instance.app.parts]
            if request.part and request.part not in known:
                names = ", ".join(known or [instance.app.key])
                raise PlatformRefusal(400, f"there is no app {request.part[:100]!r} in this instance; there is {names}")
            yield instance

    def _copy(self, request: RunnerRequest, instance: Instance) -> sqlite3.Connection:
        if request.resource not in ("seed", "current"):
            raise PlatformRefusal(400, f"there is no database {request.resource[:100]!r}; there are seed and current")
        return self._copies.of(request.instance_id, request.resource, instance, request.part)


def _check_whole(request: RunnerRequest) -> None:
    if request.part:
        raise PlatformRefusal(
            400, f"this request is for the whole world, not for its app {request.part[:100]!r}; send it to the instance"
        )


def _ignored(request: JsonObject) -> IgnoreLists:
    found = request.get("ignore_config") or {}
    if not _are_ignore_lists(found):
        raise PlatformRefusal(
            400, "ignore_config must have tables and fields (lists of names) and table_fields (lists by table)"
        )
    return found


def _are_ignore_lists(found: object) -> TypeGuard[IgnoreLists]:
    if not isinstance(found, dict):
        return False
    by_table = found.get("table_fields") or {}
    if not isinstance(by_table, dict):
        return False
    lists = [found.get("tables") or [], found.get("fields") or [], *by_table.values()]
    return all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in lists)
