"""Types for JSON that was parsed or is to be written."""

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object. Who reads a field must check its value."""
JsonMapping: TypeAlias = Mapping[str, Any]
"""A JSON object that is only read."""
JsonPayload: TypeAlias = Mapping[str, object]
"""A JSON object that is only written or passed on: what is in it cannot be used before its type was checked."""
