"""API keys: 256 random bits each, of which only the SHA-256 is stored."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

import msgspec
from sqlalchemy import Connection, bindparam, func, insert, select, text, update

from palestra.store.errors import KeyExists
from palestra.store.records import Key, NewKey, Rights
from palestra.store.rows import fetch_all, fetch_one
from palestra.store.tables import keys as t

PREFIX = "tml-"  # the SDK insists on it


def create_key(conn: Connection, *, name: str, owner: str, rights: Rights, now: float) -> NewKey:
    if conn.dialect.name == "postgresql":  # two transactions may count at the same time; SQLite has one writer anyway
        conn.execute(text("LOCK TABLE keys IN SHARE ROW EXCLUSIVE MODE"))
    taken = fetch_one(conn, Key, select(t).where(t.c.name == name, t.c.revoked_at.is_(None)))
    if taken is not None:
        raise KeyExists(f"key {taken.key_id} already has the name {name!r}; revoke it or choose another name")
    key_id = conn.execute(select(func.coalesce(func.max(t.c.key_id), 0) + 1)).scalar_one()
    key_text = PREFIX + secrets.token_urlsafe(32)
    key = Key(key_hash=hash_key(key_text), key_id=key_id, name=name, owner=owner, rights=rights, created_at=now)
    conn.execute(insert(t).values(**msgspec.to_builtins(key)))
    return NewKey(text=key_text, key=key)


def find_key(conn: Connection, key_text: str) -> Key | None:
    """Returns the key with this text, unless it is revoked."""
    return fetch_one(conn, Key, select(t).where(t.c.key_hash == hash_key(key_text), t.c.revoked_at.is_(None)))


def get_key(conn: Connection, key_id: int) -> Key | None:
    """Returns the key with this number, unless it is revoked."""
    return fetch_one(conn, Key, select(t).where(t.c.key_id == key_id, t.c.revoked_at.is_(None)))


def list_keys(conn: Connection, *, revoked: bool = False) -> list[Key]:
    """Returns the keys in use, or with `revoked` all keys."""
    query = select(t).order_by(t.c.key_id)
    return fetch_all(conn, Key, query if revoked else query.where(t.c.revoked_at.is_(None)))


def revoke_key(conn: Connection, which: int | str, *, now: float) -> Key | None:
    """Revokes a key by number or by name. Returns None if no such key is in use."""
    meant = t.c.key_id == which if isinstance(which, int) else t.c.name == which
    key = fetch_one(conn, Key, select(t).where(meant, t.c.revoked_at.is_(None)))
    if key is None:
        return None
    conn.execute(update(t).where(t.c.key_hash == key.key_hash).values(revoked_at=now))
    return msgspec.structs.replace(key, revoked_at=now)


def touch_keys(conn: Connection, uses: Mapping[int, float]) -> None:
    """Stores, by number, when each key was used last. Times never decrease."""
    if not uses:
        return
    at = bindparam("at", type_=t.c.last_used_at.type)
    change = update(t).where(t.c.key_id == bindparam("id"), func.coalesce(t.c.last_used_at, 0.0) < at)
    conn.execute(change.values(last_used_at=at), [{"id": key_id, "at": time} for key_id, time in uses.items()])


def hash_key(key_text: str) -> str:
    return hashlib.sha256(key_text.encode()).hexdigest()
