"""JSON as it is decoded: what is inside is checked where it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]
JsonMapping = Mapping[str, Any]
"""One that is only read."""
