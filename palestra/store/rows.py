"""Converts between rows and records, in one place for both databases."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, Row, Select, Table, func, select
from sqlalchemy.dialects import postgresql, sqlite

from palestra.store.records import Page
from palestra.util.json_types import JsonMapping

R = TypeVar("R", bound=msgspec.Struct)


def to_record(kind: type[R], row: Row[Any]) -> R:
    return msgspec.convert({str(name): value for name, value in row._mapping.items()}, kind)


def fetch_one(conn: Connection, kind: type[R], query: Select[Any]) -> R | None:
    row = conn.execute(query).first()
    return None if row is None else to_record(kind, row)


def fetch_all(conn: Connection, kind: type[R], query: Select[Any]) -> list[R]:
    found = conn.execute(query)
    names = list(map(str, found.keys()))  # names are a subclass of str when quoted, which msgspec does not accept
    return [msgspec.convert(dict(zip(names, row, strict=True)), kind) for row in found]


def fetch_page(conn: Connection, kind: type[R], query: Select[Any], *, limit: int | None, offset: int) -> Page[R]:
    """Returns one page of a query, with the total count. The query includes its order."""
    total = conn.execute(select(func.count()).select_from(query.order_by(None).subquery())).scalar_one()
    return Page(items=fetch_all(conn, kind, query.limit(limit).offset(offset)), total=total)


def insert_once(conn: Connection, table: Table, values: JsonMapping) -> bool:
    """Inserts a row. Returns False if the primary key exists already: a client has repeated its request, and the first
    row stays."""
    insert = postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert
    return conn.execute(insert(table).values(**values).on_conflict_do_nothing()).rowcount > 0
