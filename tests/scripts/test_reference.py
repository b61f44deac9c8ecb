"""The documentation's generator: what is not described is a problem, and links hold inside the site."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("mkdocs", reason="needs the extra docs")


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def links() -> object:
    from scripts.reference.links import RepositoryLinks

    found = RepositoryLinks()
    found._uris = {"README.md": "index.md", "examples/grpo.py": "source/examples/grpo.py"}
    return found


@pytest.mark.parametrize(
    ("uri", "written", "expected"),
    [
        ("index.md", "[a](docs/serving.md#x)", "[a](serving.md#x)"),
        ("design/engine.md", "[a](../gym.md)", "[a](../gym.md)"),
        ("design/engine.md", "[a](../../examples/grpo.py)", "[a](../source/examples/grpo.py)"),
        ("training.md", "[a](../README.md)", "[a](index.md)"),
        ("training.md", "[a](../examples/nothing.py)", "[a](../examples/nothing.py)"),
        ("training.md", "[the data](../examples/data)", "the data"),
        ("training.md", "[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("training.md", "```\n[a](../README.md)\n```", "```\n[a](../README.md)\n```"),
    ],
)
def test_links_of_a_checkout_become_links_of_the_site(links, uri, written, expected):
    assert links.resolve(written, uri) == expected


def test_what_has_no_description_is_a_problem():
    from scripts.reference.pages import Reference

    reference = Reference()
    assert reference.explained("  Says\n  it.", "a", "b") == "Says\nit."
    assert not reference.problems
    reference.explained(None, "the option `--x`", "its `help`")
    assert reference.problems == ["the option `--x` has no description; write a sentence in its `help`"]


def test_a_route_without_a_sentence_and_a_sentence_without_a_route_are_problems():
    from scripts.reference.pages import Reference
    from scripts.reference.routes import _listed

    reference = Reference()
    _listed(["GET /a", "GET /b"], {"GET /a": "Says a.", "GET /c": "Says c."}, "server", reference)
    assert [problem.split(";")[0] for problem in reference.problems] == [
        "the server's `GET /b` has no description",
        "the server has no `GET /c`",
    ]


def test_names_of_training_metrics_are_found_in_the_code():
    from scripts.reference.metrics import _reported

    names = {name for name, _ in _reported()}
    assert {"reward/mean", "dpo/margin", "stop/*", "time/*_s", "episodes/groups"} <= names


def test_a_stable_name_changes_with_a_word_in_the_changelog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from scripts.reference import tiers

    monkeypatch.setattr(tiers, "RELEASED", tmp_path / "names.json")
    before = {
        "command": {"palestra run --a": "TEXT", "palestra run --b": "", "palestra sweep --x": ""},
        "key": {"train: steps": "integer = 1"},
        "python": {"palestra.runs.Run": "class(a, b=) close open", "palestra.runs.find": "(name)"},
    }
    tiers.write(before, "0.9.0")
    assert list(tiers.changes({**before, "route": {"GET /new": ""}}, "")) == []
    more = {"palestra.runs.Run": "class(a, b=, c=) close name open", "palestra.runs.find": "(name, near=)"}
    assert list(tiers.changes({**before, "python": more}, "")) == []
    less = {"palestra.runs.Run": "class(a, b=) open", "palestra.runs.find": "(name, near)"}
    assert len(list(tiers.changes({**before, "python": less}, ""))) == 2
    now = {"python": before["python"], "command": {"palestra run --a": "NUMBER"}, "key": {}}
    told = "# Changelog\n## [Unreleased]\n- `palestra run --a` takes numbers.\n## [0.9.0]\n- `steps` is there.\n"
    gone, steps = tiers.changes(now, told)
    assert "`palestra run --b` of 0.9.0 is gone" in gone
    assert "`train: steps`" in steps
    assert list(tiers.changes(now, told.replace("numbers.", "numbers; `palestra run --b` and `steps` are gone."))) == []


def test_a_package_without_a_listed_licence_or_with_a_refused_one_is_a_problem(tmp_path: Path) -> None:
    from importlib.metadata import Distribution

    from scripts.reference import licences

    def installed(name: str, lines: str) -> Distribution:
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{lines}\n")
        return Distribution.at(folder)

    packages = [
        installed("fine", "License-Expression: MIT"),
        installed("library", "Classifier: License :: OSI Approved :: GNU Lesser General Public License v3 (LGPLv3)"),
        installed("viral", "Classifier: License :: OSI Approved :: GNU Affero General Public License v3"),
    ]
    found = list(licences.problems({"fine": [], "new": []}, {"fine": "MIT", "old": "MIT"}, iter(packages)))
    assert [one.partition(" is ")[0] for one in found] == ["the licence of new", "old", "viral, which"]
