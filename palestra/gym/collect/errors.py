"""What ends a collection. A row that fails does not: it is a record.

Owns: the error. Never touches: rows, files.
"""

from __future__ import annotations

from palestra.gym.errors import GymError


class CollectError(GymError):
    """The collection cannot begin or go on. The message says what to do."""
