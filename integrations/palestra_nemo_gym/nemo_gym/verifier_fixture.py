"""Test cases of a resources server's verifier. NeMo Gym's `gym env test` runs them; we do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class VerifierFixture:
    server_factory: Callable[[], object]
    request_model: type[BaseModel]
    cases_path: str | Path
    invoke: Callable[[Any, Any], Any] | None = None
    reseed: Callable[[Any, Any], Any] | None = None
