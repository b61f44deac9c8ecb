"""API keys: 256 random bits each, of which only the SHA-256 is stored."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

import msgspec
from sqlalchemy import ColumnElement, Connection, bindparam, func, insert, select, text, update

from palestra.store.errors import KeyExists
from palestra.store.records import Key, NewKey, Rights
from palestra.store.rows import fetch_all, fetch_one
from palestra.store.tables import keys as t

PREFIX = "tml-"  # the SDK insists on it


def create_key(
    conn: Connection, *, name: str, owner: str, rights: Rights, now: float, expires_at: float | None = None
) -> NewKey:
    if conn.dialect.name == "postgresql":  # two transactions may count at the same time; SQLite has one writer anyway
        conn.execute(text("LOCK TABLE keys IN SHARE ROW EXCLUSIVE MODE"))
    taken = key_in_use(conn, name, now=now)
    if taken is not None:
        raise KeyExists(f"key {taken.key_id} already has the name {name!r}; revoke it or choose another name")
    key_id = conn.execute(select(func.coalesce(func.max(t.c.key_id), 0) + 1)).scalar_one()
    key_text = _new_text()
    key = Key(
        key_hash=hash_key(key_text),
        key_id=key_id,
        name=name,
        owner=owner,
        rights=rights,
        created_at=now,
        expires_at=expires_at,
    )
    conn.execute(insert(t).values(**msgspec.to_builtins(key)))
    return NewKey(text=key_text, key=key)


def find_key(conn: Connection, key_text: str, *, now: float) -> Key | None:
    """Returns the key with this text, unless it is revoked or has expired. A key that was rotated also has the text
    from before, for a while."""
    hashed = hash_key(key_text)
    is_old = (t.c.old_hash == hashed) & (t.c.old_until > now)
    return fetch_one(conn, Key, select(t).where((t.c.key_hash == hashed) | is_old, _is_valid(now)))


def get_key(conn: Connection, key_id: int, *, now: float) -> Key | None:
    """Returns the key with this number, unless it is revoked or has expired."""
    return fetch_one(conn, Key, select(t).where(t.c.key_id == key_id, _is_valid(now)))


def key_in_use(conn: Connection, which: int | str, *, now: float) -> Key | None:
    """Returns a key by number or by name, unless it is revoked or has expired."""
    meant = t.c.key_id == which if isinstance(which, int) else t.c.name == which
    return fetch_one(conn, Key, select(t).where(meant, _is_valid(now)))


def valid_key_ids(conn: Connection, now: float) -> set[int]:
    return set(conn.execute(select(t.c.key_id).where(_is_valid(now))).scalars())


def list_keys(conn: Connection, *, revoked: bool = False) -> list[Key]:
    """Returns the keys that were not revoked, or with `revoked` all keys."""
    query = select(t).order_by(t.c.key_id)
    return fetch_all(conn, Key, query if revoked else query.where(t.c.revoked_at.is_(None)))


def revoke_key(conn: Connection, which: int | str, *, now: float) -> Key | None:
    """Revokes a key by number or by name; if an expired key has the same name, the one in use. Returns None if all such
    keys are revoked."""
    meant = t.c.key_id == which if isinstance(which, int) else t.c.name == which
    expired = select(t).where(meant, t.c.revoked_at.is_(None))
    key = key_in_use(conn, which, now=now) or fetch_one(conn, Key, expired)
    if key is None:
        return None
    conn.execute(update(t).where(t.c.key_hash == key.key_hash).values(revoked_at=now))
    return msgspec.structs.replace(key, revoked_at=now)


def rotate_key(conn: Connection, which: int | str, *, now: float, grace_s: float) -> NewKey | None:
    """Gives a key another text. The present one is good for `grace_s`, too; one from before no longer. Returns None if
    no such key is in use."""
    key = key_in_use(conn, which, now=now)
    if key is None:
        return None
    key_text = _new_text()
    new = msgspec.structs.replace(key, key_hash=hash_key(key_text), old_hash=key.key_hash, old_until=now + grace_s)
    changed = {"key_hash": new.key_hash, "old_hash": new.old_hash, "old_until": new.old_until}
    conn.execute(update(t).where(t.c.key_hash == key.key_hash).values(**changed))
    return NewKey(text=key_text, key=new)


def touch_keys(conn: Connection, uses: Mapping[int, float]) -> None:
    """Stores, by number, when each key was used last. Times never decrease."""
    if not uses:
        return
    at = bindparam("at", type_=t.c.last_used_at.type)
    change = update(t).where(t.c.key_id == bindparam("id"), func.coalesce(t.c.last_used_at, 0.0) < at)
    conn.execute(change.values(last_used_at=at), [{"id": key_id, "at": time} for key_id, time in uses.items()])


def _is_valid(now: float) -> ColumnElement[bool]:
    return t.c.revoked_at.is_(None) & (t.c.expires_at.is_(None) | (t.c.expires_at > now))


def _new_text() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key_text: str) -> str:
    return hashlib.sha256(key_text.encode()).hexdigest()
