"""The map in AGENTS.md: every package is on it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "AGENTS.md").read_text(encoding="utf-8").partition("## Commands")[0]
PACKAGES = sorted(file.parent.relative_to(ROOT).as_posix() for file in (ROOT / "palestra").glob("*/__init__.py"))
FOLDERS = ("benchmarks", "cookbook", "deploy", "docs", "examples", "integrations", "recipes/ephebe", "scripts", "tests")


@pytest.mark.parametrize("folder", [*PACKAGES, *FOLDERS])
def test_every_package_is_on_the_map(folder):
    assert f"| `{folder}/`" in MAP


@pytest.mark.parametrize("package", ["server", "training", "environments"])
def test_the_parts_of_large_packages_are_named(package):
    (row,) = (line for line in MAP.splitlines() if line.startswith(f"| `palestra/{package}/`"))
    parts = {file.parent.name for file in (ROOT / "palestra" / package).glob("*/__init__.py")}
    assert [part for part in sorted(parts) if f"`{part}/`" not in row] == []
