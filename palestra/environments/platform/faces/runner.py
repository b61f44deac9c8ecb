"""Fleet's runner of one instance: resources, queries, diffs, resets, verifiers.

Owns: `/i/{id}/api/v1/env`. Never touches: who may come here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from palestra.environments.platform.faces.door import Refusal
from palestra.environments.platform.faces.http import object_of
from palestra.environments.platform.faces.queries import Copies, describe, read, structured_diff, write
from palestra.environments.platform.faces.verifying import Verifying
from palestra.environments.platform.instance import Instance
from palestra.environments.platform.pool import Pool
from palestra.util.json_types import JsonObject

RESOURCES = [
    {"name": "seed", "type": "sqlite", "mode": "ro", "label": "as it was"},
    {"name": "current", "type": "sqlite", "mode": "rw", "label": "as it is"},
]


@dataclass(frozen=True, slots=True)
class RunnerRequest:
    instance_id: str
    part: str
    """One app in a world of several, by its own names of tables; empty: all of it. It is for reading: what changes a
    world belongs to all of it."""
    resource: str
    body: bytes


class Runner:
    def __init__(self, pool: Pool, verifying: Verifying) -> None:
        self.pool, self._verifying = pool, verifying
        self._copies = Copies()

    def resources(self, asked: RunnerRequest) -> object:
        with self._used(asked):
            return [{**one, "mode": "ro"} for one in RESOURCES] if asked.part else RESOURCES

    def health(self, asked: RunnerRequest) -> object:
        with self._used(asked):
            now = datetime.now(UTC).isoformat()
            return {"status": "healthy", "timestamp": now, "service": "palestra-platform"}

    def describe(self, asked: RunnerRequest) -> object:
        with self._used(asked) as instance:
            tables = describe(self._copy(asked, instance))
        return {"success": True, "resource_name": asked.resource, "tables": tables, "message": f"{len(tables)} tables"}

    def query(self, asked: RunnerRequest) -> object:
        given = object_of(asked.body)
        query, args = given.get("query"), given.get("args")
        if not isinstance(query, str):
            raise Refusal(400, "query: SQL as text is needed")
        with self._used(asked) as instance:
            if given.get("read_only") is not False:
                return read(self._copy(asked, instance), query, args)
            if asked.part:
                raise Refusal(400, "write to the whole world: env.db('current'), where tables are app_table")
            if asked.resource != "current":
                raise Refusal(400, "the seed cannot be written: use current")
            return write(instance, query, args)

    def diff(self, asked: RunnerRequest) -> object:
        ignore = _ignored(object_of(asked.body))
        with self._used(asked) as instance:
            found = structured_diff(instance, ignore, asked.part)
        return {"success": True, "diff": found, "message": "since the seed"}

    def reset(self, asked: RunnerRequest) -> object:
        """To the seed, or to another of the same size by its number."""
        _check_whole(asked)
        given = object_of(asked.body)
        if given.get("timestamp") is not None:
            raise Refusal(400, "timestamp is not offered here: the world's clock belongs to its data")
        with self._used(asked) as instance:
            number, seed = given.get("seed"), instance.seed
            if number is None or number == seed.number:
                instance.reset()
                return {"success": True, "message": f"reset to {seed.key}"}
        self.pool.replace(asked.instance_id, f"{seed.size}-{number}")
        return {"success": True, "message": f"reset to {seed.size}-{number}"}

    async def execute_verifier(self, asked: RunnerRequest) -> object:
        _check_whole(asked)
        return await self._verifying.execute_function(asked.instance_id, asked.body)

    @contextmanager
    def _used(self, asked: RunnerRequest) -> Iterator[Instance]:
        with self.pool.use(asked.instance_id) as instance:
            known = [one.key for one in instance.app.parts]
            if asked.part and asked.part not in known:
                names = ", ".join(known or [instance.app.key])
                raise Refusal(400, f"there is no app {asked.part[:100]!r} in this instance; there is {names}")
            yield instance

    def _copy(self, asked: RunnerRequest, instance: Instance) -> sqlite3.Connection:
        if asked.resource not in ("seed", "current"):
            raise Refusal(400, f"there is no database {asked.resource[:100]!r}: seed and current")
        return self._copies.of(asked.instance_id, asked.resource, instance, asked.part)


def _check_whole(asked: RunnerRequest) -> None:
    if asked.part:
        raise Refusal(400, f"this is not for {asked.part[:100]!r}, one app of a world: ask its instance")


def _ignored(asked: JsonObject) -> JsonObject:
    found = asked.get("ignore_config") or {}
    lists = [found.get("tables") or [], found.get("fields") or []] if isinstance(found, dict) else [None]
    by_table = (found.get("table_fields") or {}) if isinstance(found, dict) else None
    lists += list(by_table.values()) if isinstance(by_table, dict) else [None]
    if not all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in lists):
        raise Refusal(400, "ignore_config has tables and fields (lists of names) and table_fields (lists by table)")
    return found
