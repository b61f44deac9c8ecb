"""Fleet's runner of one instance: resources, queries, diffs, resets, verifiers.

Owns: `/i/{id}/api/v1/env`. Never touches: who may come here.
"""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from typing import Any

from palestra.environments.platform.errors import PlatformError
from palestra.environments.platform.faces.http import Refusal, object_of
from palestra.environments.platform.faces.queries import Copies, describe, read, structured_diff, write
from palestra.environments.platform.faces.verifying import Verifying
from palestra.environments.platform.pool import Pool

RESOURCES = [
    {"name": "seed", "type": "sqlite", "mode": "ro", "label": "as it was"},
    {"name": "current", "type": "sqlite", "mode": "rw", "label": "as it is"},
]


class Runner:
    def __init__(self, pool: Pool, verifying: Verifying) -> None:
        self.pool, self._verifying = pool, verifying
        self._copies = Copies()

    async def answer(self, instance_id: str, method: str, path: str, body: bytes) -> Any:
        """`path`: below `/api/v1/env/`."""
        match method, path.split("/"):
            case "GET", ["resources"]:
                return RESOURCES
            case "GET", ["health"]:
                return _health()
            case "POST", ["reset"]:
                return self._reset(instance_id, object_of(body))
            case "GET", ["resources", "sqlite", ("seed" | "current") as name, "describe"]:
                with self.pool.use(instance_id) as instance:
                    return _described(name, self._copies.of(instance_id, name, instance))
            case "POST", ["resources", "sqlite", ("seed" | "current") as name, "query"]:
                return self._query(instance_id, name, object_of(body))
            case "POST", ["diff", "structured"]:
                ignore = _ignored(object_of(body))
                with self.pool.use(instance_id) as instance:
                    return _diff(structured_diff(instance, ignore))
            case "POST", ["execute_verifier_function"]:
                return await self._verifying.execute_function(instance_id, body)
            case _:
                raise Refusal(400, f"the runner here has no {method} {path[:100]!r}")

    def part_answer(self, instance_id: str, app: str, method: str, path: str, body: bytes) -> Any:
        """Of one app in a world of several, by its own names of tables. It is for reading: what changes a world belongs
        to all of it."""
        with self.pool.use(instance_id) as instance:
            known = [one.key for one in instance.app.parts] or [instance.app.key]
            if app not in (one.key for one in instance.app.parts):
                raise Refusal(400, f"there is no app {app[:100]!r} in this instance; there is {', '.join(known)}")
            match method, path.split("/"):
                case "GET", ["resources"]:
                    return [{**one, "mode": "ro"} for one in RESOURCES]
                case "GET", ["health"]:
                    return _health()
                case "GET", ["resources", "sqlite", ("seed" | "current") as name, "describe"]:
                    return _described(name, self._copies.of(instance_id, name, instance, app))
                case "POST", ["resources", "sqlite", ("seed" | "current") as name, "query"]:
                    asked = object_of(body)
                    if asked.get("read_only") is False:
                        raise Refusal(400, "write to the whole world: env.db('current'), where tables are app_table")
                    return read(self._copies.of(instance_id, name, instance, app), _sql(asked), asked.get("args"))
                case "POST", ["diff", "structured"]:
                    return _diff(structured_diff(instance, _ignored(object_of(body)), app))
                case _:
                    raise Refusal(400, f"an app of a world has no {method} {path[:100]!r}: ask its instance")

    def _query(self, instance_id: str, name: str, asked: dict[str, Any]) -> Any:
        query, args = _sql(asked), asked.get("args")
        with self.pool.use(instance_id) as instance:
            if asked.get("read_only") is not False:
                return read(self._copies.of(instance_id, name, instance), query, args)
            if name != "current":
                raise Refusal(400, "the seed cannot be written: use current")
            return write(instance, query, args)

    def _reset(self, instance_id: str, asked: dict[str, Any]) -> Any:
        """To the seed, or to another of the same size by its number."""
        if asked.get("timestamp") is not None:
            raise Refusal(400, "timestamp is not offered here: the world's clock belongs to its data")
        with self.pool.use(instance_id) as instance:
            number, seed = asked.get("seed"), instance.seed
            if number is None or number == seed.number:
                instance.reset()
                return {"success": True, "message": f"reset to {seed.key}"}
        try:
            self.pool.replace(instance_id, f"{seed.size}-{number}")
        except PlatformError as e:
            raise Refusal(400, str(e)) from None
        return {"success": True, "message": f"reset to {seed.size}-{number}"}


def _health() -> dict[str, Any]:
    return {"status": "healthy", "timestamp": datetime.now(UTC).isoformat(), "service": "palestra-platform"}


def _described(name: str, copy: sqlite3.Connection) -> dict[str, Any]:
    tables = describe(copy)
    return {"success": True, "resource_name": name, "tables": tables, "message": f"{len(tables)} tables"}


def _diff(found: dict[str, Any]) -> dict[str, Any]:
    return {"success": True, "diff": found, "message": "since the seed"}


def _sql(asked: dict[str, Any]) -> str:
    query = asked.get("query")
    if not isinstance(query, str):
        raise Refusal(400, "query: SQL as text is needed")
    return query


def _ignored(asked: dict[str, Any]) -> dict[str, Any]:
    found = asked.get("ignore_config") or {}
    lists = [found.get("tables") or [], found.get("fields") or []] if isinstance(found, dict) else [None]
    by_table = (found.get("table_fields") or {}) if isinstance(found, dict) else None
    lists += list(by_table.values()) if isinstance(by_table, dict) else [None]
    if not all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in lists):
        raise Refusal(400, "ignore_config has tables and fields (lists of names) and table_fields (lists by table)")
    return found
