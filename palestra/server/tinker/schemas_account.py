"""JSON bodies about keys, usage and events. Nothing is billed here, so usage is empty.

Owns: fields. Never touches: meaning.
"""

from __future__ import annotations

from palestra.server.tinker.schemas import WireModel
from palestra.util.json_types import JsonObject


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
    entries: list[JsonObject]


class UsageResponse(WireModel):
    data: list[JsonObject]
    sessions: JsonObject


class StorageResponse(WireModel):
    data: list[JsonObject]
