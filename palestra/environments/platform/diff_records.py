"""Changes of an instance as Fleet's runner returns them: by table, rows that were added, removed and modified."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from palestra.environments.platform.changes import Row


class RowDiff(TypedDict):
    row_id: object
    data: Row
    changes: NotRequired[dict[str, dict[str, object]]]


class TableDiff(TypedDict):
    """Changes of a table."""

    table_name: str
    primary_key: list[str]
    added_rows: list[RowDiff]
    removed_rows: list[RowDiff]
    modified_rows: list[RowDiff]
    unchanged_count: int
    total_changes: int
