"""Differences between two databases, and whether they were allowed.

`expect_only…` asserts that nothing else changed, and compares every row for it: also in tables and rows that the list
does not name, which the SDK's own does not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from palestra.environments.platform.verifiers.runtime.memory import MemoryDatabase, Row
from palestra.util.json_types import JsonMapping, JsonObject

Spec = JsonMapping
ROWID = "rowid"
ADDED, REMOVED = "__added__", "__removed__"
KINDS = ("insert", "modify", "delete")
MAX_TOLD = 10  # changes in a message


class IgnoreConfig:
    def __init__(
        self,
        tables: Set[str] | None = None,
        fields: Set[str] | None = None,
        table_fields: Mapping[str, Set[str]] | None = None,
    ) -> None:
        self.tables, self.fields, self.table_fields = tables or set(), fields or set(), table_fields or {}

    def should_ignore_table(self, table: str) -> bool:
        return table in self.tables

    def should_ignore_field(self, table: str, field: str) -> bool:
        return field == ROWID or field in self.fields or field in self.table_fields.get(table, ())


class RowChange:
    def __init__(self, table: str, pk: Any, before: Row | None, after: Row | None, fields: list[str]) -> None:
        self.table, self.pk, self.before, self.after = table, pk, before, after
        self.fields = fields
        """The columns that differ in a modified row, without ignored ones."""
        self.kind = "insert" if before is None else "delete" if after is None else "modify"

    def __str__(self) -> str:
        return f"{self.kind} in table '{self.table}', row {self.pk!r}"


class SnapshotDiff:
    def __init__(
        self, before: MemoryDatabase, after: MemoryDatabase, ignore_config: IgnoreConfig | None = None
    ) -> None:
        self.before, self.after = before, after
        self.ignore_config = ignore_config or IgnoreConfig()
        self._changes: list[RowChange] | None = None

    @property
    def changes(self) -> list[RowChange]:
        if self._changes is None:
            tables = sorted({*self.before.tables(), *self.after.tables()} - set(self.ignore_config.tables))
            self._changes = [change for table in tables for change in self._table_changes(table)]
        return self._changes

    def expect_only(self, allowed_changes: Sequence[Spec]) -> SnapshotDiff:
        """Takes entries `{table, pk, field, after}`; a whole row has `after` "__added__" or "__removed__"."""
        return self.expect_only_v2(allowed_changes)

    def expect_only_v2(self, allowed_changes: Sequence[Spec]) -> SnapshotDiff:
        return self._described(
            [problem for change in self.changes if (problem := self._problem(change, allowed_changes))]
        )

    def expect_exactly(self, expected_changes: Sequence[Spec]) -> SnapshotDiff:
        """The same, and each of them did happen."""
        for spec in expected_changes:
            if missing := [key for key in ("type", "table", "pk") if key not in spec]:
                raise ValueError(f"expect_exactly needs {missing[0]!r} in {dict(spec)}")
            if spec["type"] not in KINDS:
                raise ValueError(f"'type' is one of {', '.join(KINDS)}, not {spec['type']!r}")
        problems = [problem for change in self.changes if (problem := self._problem(change, expected_changes, True))]
        happened = {(change.table, _name(change.pk), change.kind) for change in self.changes}
        problems += [
            f"Expected {spec['type']} in table '{spec['table']}', row {spec['pk']!r} did not happen"
            for spec in expected_changes
            if (spec["table"], _name(spec["pk"]), spec["type"]) not in happened
        ]
        return self._described(problems)

    def _described(self, problems: list[str]) -> SnapshotDiff:
        if problems:
            more = f"\n… and {len(problems) - MAX_TOLD} more" if len(problems) > MAX_TOLD else ""
            raise AssertionError("Unexpected database changes:\n" + "\n".join(problems[:MAX_TOLD]) + more)
        return self

    def _problem(self, change: RowChange, specs: Sequence[Spec], is_exact: bool = False) -> str | None:
        own = [s for s in specs if s.get("table") == change.table and _name(s.get("pk")) == _name(change.pk)]
        typed = next((spec for spec in own if spec.get("type") == change.kind), None)
        if typed is None:
            return None if not is_exact and self._is_allowed_by_field(change, own) else f"Unexpected {change}"
        wrong = self._wrong_field(change, typed, is_exact)
        return f"Unexpected {change}: {wrong}" if wrong else None

    def _is_allowed_by_field(self, change: RowChange, specs: Sequence[Spec]) -> bool:
        """Handles entries of the older kind, without a type."""
        if change.before is None or change.after is None:
            mark = ADDED if change.before is None else REMOVED
            return any(spec.get("field") is None and spec.get("after") == mark for spec in specs)
        after = change.after
        return all(
            any(spec.get("field") == field and _are_equal(spec.get("after"), after[field]) for spec in specs)
            for field in change.fields
        )

    def _wrong_field(self, change: RowChange, spec: Spec, is_exact: bool) -> str | None:
        """Returns why this entry does not allow the change."""
        if change.kind == "modify":
            return _wrong_modification(change, spec, is_exact)
        listed = spec.get("fields")
        if listed is None:
            return None
        expected, row = _fields(listed), change.after if change.before is None else change.before
        assert row is not None
        shown = {name: v for name, v in row.items() if not self.ignore_config.should_ignore_field(change.table, name)}
        if change.kind == "delete":
            shown = {name: value for name, value in shown.items() if name in expected}
        return _wrong_value(expected, shown)

    def _table_changes(self, table: str) -> list[RowChange]:
        key = self._key_of(table)
        was, now = self._rows(self.before, table, key), self._rows(self.after, table, key)
        found: list[RowChange] = []
        for pk in sorted({*was, *now}, key=str):
            before, after = was.get(pk), now.get(pk)
            fields = [] if before is None or after is None else self._differing(table, before, after)
            if before is None or after is None or fields:
                found.append(RowChange(table, pk, before, after, fields))
        return found

    def _differing(self, table: str, before: Row, after: Row) -> list[str]:
        names = [name for name in {**before, **after} if not self.ignore_config.should_ignore_field(table, name)]
        return [name for name in names if not _are_equal(before.get(name), after.get(name))]

    def _key_of(self, table: str) -> list[str]:
        where = self.after if table in self.after.tables() else self.before
        columns = where.rows(f'PRAGMA table_info("{table}")')
        key = [column["name"] for column in sorted(columns, key=lambda c: c["pk"]) if column["pk"]]
        return key or (["id"] if any(column["name"] == "id" for column in columns) else [ROWID])

    def _rows(self, snapshot: MemoryDatabase, table: str, key: list[str]) -> dict[Any, Row]:
        if table not in snapshot.tables():
            return {}
        columns = f"{ROWID}, *" if key == [ROWID] else "*"
        rows = snapshot.rows(f'SELECT {columns} FROM "{table}"')
        return {row[key[0]] if len(key) == 1 else tuple(row[name] for name in key): row for row in rows}


def _wrong_modification(change: RowChange, spec: Spec, is_exact: bool) -> str | None:
    listed = spec.get("resulting_fields")
    if listed is None:
        return None
    only = spec.get("no_other_changes")
    if not isinstance(only, bool):
        raise ValueError(f"'resulting_fields' needs 'no_other_changes', True or False: {dict(spec)}")
    assert change.after is not None
    expected = _fields(listed)
    looked_at = [*change.fields, *(name for name in expected if is_exact and name not in change.fields)]
    shown = {name: change.after.get(name) for name in looked_at if only or name in expected}
    return _wrong_value(expected, shown)


def _wrong_value(expected: JsonMapping, row: JsonMapping) -> str | None:
    for name, value in row.items():
        if name not in expected:
            return f"field '{name}' is not listed"
        if expected[name] is not ... and not _are_equal(expected[name], value):
            return f"field '{name}' is {value!r}, expected {expected[name]!r}"
    return None


def _fields(listed: Sequence[Any]) -> JsonObject:
    for item in listed:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ValueError(f"a field is a pair (name, value), found {item!r}")
    return dict(listed)


def _name(pk: Any) -> str:
    """Returns a key as text: numbers may come as text, and keys of several columns as lists."""
    return str(tuple(pk)) if isinstance(pk, list) else str(pk)


def _are_equal(one: Any, other: Any) -> bool:
    """Compares values; two texts that are both JSON are compared by their content."""
    if one == other:
        return True
    if not (_looks_like_json(one) and _looks_like_json(other)):
        return False
    try:
        return json.loads(one) == json.loads(other)
    except (ValueError, RecursionError):
        return False


def _looks_like_json(value: Any) -> bool:
    text = value.strip() if isinstance(value, str) else ""
    return text[:1] + text[-1:] in ("{}", "[]")
