"""Marks of tests that need a sandbox of this machine."""

from __future__ import annotations

import pytest

from palestra.sandbox import backend

_PROBLEM = backend("local").problem()

needs_local = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))
