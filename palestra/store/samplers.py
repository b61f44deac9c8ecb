"""Samplers: what a sampling session samples from."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import Connection, select, update

from palestra.store.records import Sampler, SamplerStatus
from palestra.store.rows import fetch_all, fetch_one, insert_once
from palestra.store.tables import samplers as t


def insert_sampler(conn: Connection, sampler: Sampler) -> Sampler:
    """What is stored then: this one, or the first of that id."""
    if insert_once(conn, t, msgspec.to_builtins(sampler)):
        return sampler
    stored = get_sampler(conn, sampler.sampler_id)
    assert stored is not None
    return stored


def get_sampler(conn: Connection, sampler_id: str) -> Sampler | None:
    return fetch_one(conn, Sampler, select(t).where(t.c.sampler_id == sampler_id))


def samplers_of_session(conn: Connection, session_id: str) -> list[Sampler]:
    """In order of creation, also those that are gone."""
    query = select(t).where(t.c.session_id == session_id).order_by(t.c.created_at, t.c.sampler_id)
    return fetch_all(conn, Sampler, query)


def live_samplers(conn: Connection) -> list[Sampler]:
    query = select(t).where(t.c.status == SamplerStatus.LIVE).order_by(t.c.created_at, t.c.sampler_id)
    return fetch_all(conn, Sampler, query)


def drop_samplers(conn: Connection, sampler_ids: Collection[str]) -> None:
    """They are gone; their records stay."""
    conn.execute(update(t).where(t.c.sampler_id.in_(sampler_ids)).values(status=SamplerStatus.GONE))
