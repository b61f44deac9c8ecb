"""Marks of tests that need a sandbox of this machine."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from palestra.sandbox import backend

_PROBLEM = backend("local").problem()

PACKAGES = sysconfig.get_paths()["purelib"]

needs_local = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))
needs_packages = pytest.mark.skipif(
    Path(PACKAGES).is_relative_to("/tmp"), reason="packages below /tmp: a sandbox has a /tmp of its own"
)
