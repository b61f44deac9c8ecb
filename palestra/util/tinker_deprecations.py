"""Deprecations of the `tinker` SDK that our own calls set off: 0.38 prefers names that 0.36 does not have."""

from __future__ import annotations

import warnings

TEXTS = ("DEPRECATED: ", r"Using the future as the \w+ is deprecated", "Reading .* from the future returned")


def ignore_deprecations() -> None:
    """Keeps them out of what a run prints. A user's own calls still warn."""
    for text in TEXTS:
        warnings.filterwarnings("ignore", text, FutureWarning, r"palestra\.")
