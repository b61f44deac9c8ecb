"""Samplers: the weights that a sampling session samples from."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import Connection, select, update

from palestra.store.records import SamplerRow, SamplerStatus
from palestra.store.rows import fetch_all, fetch_one, insert_once
from palestra.store.tables import samplers as t


def insert_sampler(conn: Connection, sampler: SamplerRow) -> SamplerRow:
    """Stores a sampler and returns the stored row: this one, or an earlier one with the same id, or of the same
    request."""
    if sampler.seq_id is not None:
        query = select(t).where(t.c.session_id == sampler.session_id, t.c.model_id == sampler.model_id)
        stored = fetch_one(conn, SamplerRow, query.where(t.c.seq_id == sampler.seq_id))
        if stored is not None:
            return stored
    if insert_once(conn, t, msgspec.to_builtins(sampler)):
        return sampler
    stored = get_sampler(conn, sampler.sampler_id)
    assert stored is not None
    return stored


def get_sampler(conn: Connection, sampler_id: str) -> SamplerRow | None:
    return fetch_one(conn, SamplerRow, select(t).where(t.c.sampler_id == sampler_id))


def samplers_of_session(conn: Connection, session_id: str) -> list[SamplerRow]:
    """Returns the samplers of a session in order of creation, including those that were dropped."""
    query = select(t).where(t.c.session_id == session_id).order_by(t.c.created_at, t.c.sampler_id)
    return fetch_all(conn, SamplerRow, query)


def live_samplers(conn: Connection) -> list[SamplerRow]:
    query = select(t).where(t.c.status == SamplerStatus.LIVE).order_by(t.c.created_at, t.c.sampler_id)
    return fetch_all(conn, SamplerRow, query)


def drop_samplers(conn: Connection, sampler_ids: Collection[str]) -> None:
    """Marks samplers as dropped; their rows stay."""
    conn.execute(update(t).where(t.c.sampler_id.in_(sampler_ids)).values(status=SamplerStatus.GONE))
