"""Types for parsed JSON: what came in with a request, a file or a row, and what is to be written."""

from collections.abc import Mapping
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""Whoever reads a field of it checks what is there."""
JsonMapping: TypeAlias = Mapping[str, Any]
"""The same, to be read only."""
