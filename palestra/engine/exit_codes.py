"""Exit codes of a worker and of its ranks."""

from __future__ import annotations

BROKEN = 1
CANNOT_START = 2
"""What its output has behind `error:` says why."""
