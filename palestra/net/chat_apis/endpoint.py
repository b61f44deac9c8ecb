"""The endpoint at which a model answers chat calls."""

from __future__ import annotations

from msgspec import Struct

from palestra.net.chat_apis.answers import ChatApi


class ModelEndpoint(Struct, frozen=True, kw_only=True):
    base_url: str
    model: str
    api_key: str
    api: ChatApi
