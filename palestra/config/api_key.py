"""The key with which a run calls its server."""

from __future__ import annotations

import os

LOCAL_KEY = "tml-local"
"""The key for a server on loopback, where any key is accepted. Elsewhere the user sets TINKER_API_KEY."""


def api_key() -> str:
    return os.environ.get("TINKER_API_KEY", LOCAL_KEY)
