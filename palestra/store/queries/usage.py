"""Usage: what was sampled, trained and saved, by day, owner and run. Rows only grow."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

import msgspec
from sqlalchemy import Connection, bindparam, cast, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from palestra.store.records import COUNTS, UsageCounts, UsageKey
from palestra.store.rows import fetch_all
from palestra.store.tables import models
from palestra.store.tables import usage as t


class UsageGrouping(StrEnum):
    OWNER = "owner"
    RUN = "run"
    DAY = "day"


class UsageTotal(UsageCounts, kw_only=True):
    """What was used, added up. The names it is not grouped by are empty."""

    day: str = ""
    owner: str = ""
    run: str = ""


def add_usage(conn: Connection, counts: Mapping[UsageKey, UsageCounts]) -> None:
    if not counts:
        return
    insert = postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert
    added = insert(t)
    more = {name: t.c[name] + added.excluded[name] for name in COUNTS}
    rows = [msgspec.to_builtins(key) | msgspec.to_builtins(one) for key, one in sorted(counts.items(), key=_place)]
    conn.execute(added.on_conflict_do_update(index_elements=["day", "owner", "run"], set_=more), rows)


def _place(item: tuple[UsageKey, UsageCounts]) -> tuple[str, str, str]:
    key, _ = item
    return key.day, key.owner, key.run


def advance_usage(conn: Connection, seqs: Mapping[str, int]) -> None:
    """Notes up to which request the usage of each model is counted. Numbers never decrease."""
    if seqs:
        seq = bindparam("seq", type_=models.c.usage_seq.type)
        change = update(models).where(models.c.model_id == bindparam("id"), models.c.usage_seq < seq)
        conn.execute(change.values(usage_seq=seq), [{"id": name, "seq": n} for name, n in seqs.items()])


def usage_seqs(conn: Connection, model_ids: Collection[str]) -> dict[str, int]:
    """Returns up to which request the usage of these models is counted."""
    found = conn.execute(select(models.c.model_id, models.c.usage_seq).where(models.c.model_id.in_(model_ids)))
    return {row.model_id: row.usage_seq for row in found}


def read_usage(
    conn: Connection,
    by: Sequence[UsageGrouping] = tuple(UsageGrouping),
    *,
    owner: str | None = None,
    since: str | None = None,
    until: str | None = None,
) -> list[UsageTotal]:
    """Returns usage added up by these names, in their order; of one owner, and of the days from `since` to `until`."""
    groups = [t.c[name.value] for name in by]
    sums = (cast(func.sum(t.c[name]), t.c[name].type).label(name) for name in COUNTS)
    query = select(*groups, *sums).group_by(*groups).order_by(*groups)
    if owner is not None:
        query = query.where(t.c.owner == owner)
    if since is not None:
        query = query.where(t.c.day >= since)
    if until is not None:
        query = query.where(t.c.day <= until)
    return fetch_all(conn, UsageTotal, query)


def tokens_of_day(conn: Connection, day: str) -> dict[str, int]:
    """Returns the tokens that each owner has used on a day."""
    return {one.owner: one.tokens for one in read_usage(conn, (UsageGrouping.OWNER,), since=day, until=day)}
