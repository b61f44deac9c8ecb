"""The two databases that a verifier reads, with the methods of Fleet's SDK."""

from __future__ import annotations

from collections.abc import Iterable

from palestra.environments.platform.verifiers.runtime.diffs import IgnoreConfig, SnapshotDiff
from palestra.environments.platform.verifiers.runtime.memory import MemoryDatabase, part_of
from palestra.environments.platform.verifiers.runtime.queries import QueryBuilder
from palestra.util.json_types import JsonMapping


class DatabaseSnapshot(MemoryDatabase):
    def table(self, table: str) -> QueryBuilder:
        return QueryBuilder(self, table)

    def part(self, app: str) -> DatabaseSnapshot:
        """Returns the database as one app of a world of several knows it. Raises KeyError."""
        return DatabaseSnapshot(part_of(self._connection.serialize(), app), self.name)

    def diff(self, other: DatabaseSnapshot, ignore_config: IgnoreConfig | None = None) -> SnapshotDiff:
        return SnapshotDiff(self, other, ignore_config)

    def expect_row(self, table: str, where: JsonMapping, expect: JsonMapping) -> DatabaseSnapshot:
        found = self.table(table).where(where).assert_exists()
        for column, value in expect.items():
            found.assert_eq(column, value)
        return self

    def expect_rows(
        self,
        table: str,
        where: JsonMapping,
        *,
        count: int | None = None,
        contains: Iterable[JsonMapping] = (),
    ) -> DatabaseSnapshot:
        found = self.table(table).where(where)
        if count is not None:
            found.count().assert_eq(count)
        for expected in contains or ():
            if not any(all(row.get(k) == v for k, v in expected.items()) for row in found.all()):
                raise AssertionError(f"Expected a row matching {dict(expected)} in {table}")
        return self

    def expect_absent_row(self, table: str, where: JsonMapping) -> DatabaseSnapshot:
        self.table(table).where(where).assert_none()
        return self

    def __repr__(self) -> str:
        return f"<DatabaseSnapshot {self.name}>"
