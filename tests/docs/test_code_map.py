"""What documents name is there: every package on the map in AGENTS.md, the tests in SECURITY.md."""

from __future__ import annotations

import re
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


def test_each_wall_names_tests_that_are_there():
    rows = [line for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if "| `tests/" in line]
    assert len(rows) > 15
    for row in rows:
        folder = ROOT
        for name in re.findall(r"`(tests/[\w./]+|test_\w+\.py)`", row.rpartition(" | ")[2]):
            place = ROOT / name if name.startswith("tests/") else folder / name
            assert place.exists(), row
            folder = place.parent
