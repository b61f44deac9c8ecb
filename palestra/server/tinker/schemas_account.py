"""JSON bodies about keys, usage and events. There is nothing to bill here: usage is empty.

Owns: shapes. Never touches: meaning.
"""

from __future__ import annotations

from typing import Any

from palestra.server.tinker.schemas import WireModel


class OrgDetails(WireModel):
    name: str


class UserDetails(WireModel):
    email: str


class KeyDetails(WireModel):
    org_details: OrgDetails
    user_details: UserDetails


class KeyResponse(WireModel):
    key_id: int
    name: str
    note: str
    details: KeyDetails


class AuditResponse(WireModel):
    entries: list[dict[str, Any]]


class UsageResponse(WireModel):
    data: list[dict[str, Any]]
    sessions: dict[str, Any]


class StorageResponse(WireModel):
    data: list[dict[str, Any]]
