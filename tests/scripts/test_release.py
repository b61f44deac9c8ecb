"""`make release`: what a release must have before its files are built."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n- It is there.\n", 0),
        ("## [Unreleased]\n- New.\n## [0.2.0] - 2026-12-01\n", 1),
        ("## [Unreleased]\n- New.\n## [0.2.0]\n", 2),
        ("## [0.2.00] - 2026-12-01\n", 1),
    ],
)
def test_the_changelog_has_the_version_with_its_date_and_nothing_that_is_left_over(text: str, problems: int) -> None:
    from scripts import release

    assert len(release.changelog_problems(text, "0.2.0")) == problems


def test_the_stable_names_are_those_of_the_version() -> None:
    from scripts import release

    assert release.names_problems("0.2.0", "0.2.0") == []
    assert "released_names.py 0.2.0" in release.names_problems("0.1.0", "0.2.0")[0]


def test_the_version_is_read_from_the_package() -> None:
    from palestra import __version__
    from scripts import release

    assert release.version_of((ROOT / "palestra" / "__init__.py").read_text()) == __version__
    with pytest.raises(release.NotReady):
        release.version_of("version = 1")
