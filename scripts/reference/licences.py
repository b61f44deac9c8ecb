"""The page of licences: packages that Palestra needs, and what comes with it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.reference.pages import Reference, code, page, table

ROOT = Path(__file__).parents[2]
LISTED = Path(__file__).with_name("licences.toml")
REFUSED = re.compile(
    r"\bAGPL|\bGPL|GNU (Affero )?General Public|SSPL|BUSL|Business Source|Non-?Commercial|\bCC-BY-NC", re.IGNORECASE
)
INTRO = """Palestra is under Apache-2.0 (`LICENSE`). Nothing else is installed with `pip install palestra` than
the packages of the first table, and what they need; an extra adds its own. `make check` fails if a package is not
listed here, or if an installed one is under a licence that asks for the source of what uses it or forbids uses."""


def pages(reference: Reference) -> None:
    listed = tomllib.loads(LISTED.read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = _needed(project)
    reference.problems += problems(needed, listed["packages"], distributions())
    reference.problems += [
        f"scripts/reference/licences.toml lists {one['path']}, which is not there"
        for one in listed["shipped"]
        if not (ROOT / "palestra" / one["path"]).exists()
    ]
    rows = [[code(name), listed["packages"].get(name, ""), ", ".join(of)] for name, of in sorted(needed.items())]
    shipped = [[code(one["path"]), one["what"], one["licence"], one["by"]] for one in listed["shipped"]]
    parts = [
        "## Packages",
        table(["package", "licence", "needed by"], rows),
        "## What comes with it",
        table(["below `palestra/`", "what", "licence", "made by"], shipped),
        "Graders and files of benchmarks are not shipped; [their licences](../evaluation.md#benchmarks-by-name).",
    ]
    reference.pages["reference/licences.md"] = page("Licences", INTRO, parts)


def _needed(project: dict) -> dict[str, list[str]]:
    """Names of packages, each with the extras that need it."""
    groups = {
        "everything": project["project"]["dependencies"],
        "the build": project["build-system"]["requires"],
        **project["project"]["optional-dependencies"],
    }
    found: dict[str, list[str]] = {}
    for group, requirements in groups.items():
        for requirement in requirements:
            name = canonicalize_name(Requirement(requirement).name)
            if name != "palestra":
                found.setdefault(name, []).append(group)
    return found


def problems(needed: dict[str, list[str]], listed: dict[str, str], installed: Iterable[Distribution]) -> Iterator[str]:
    where = "scripts/reference/licences.toml"
    for name in sorted(needed.keys() - listed.keys()):
        yield f"the licence of {name} is not listed; add it to {where}"
    for name in sorted(listed.keys() - needed.keys()):
        yield f"{name} is no longer in pyproject.toml; take it out of {where}"
    for one in installed:
        if found := REFUSED.search(licence_text(one)):
            yield f"{one.name}, which is installed, is under {found[0]}: do without it"


def licence_text(package: Distribution) -> str:
    """What a package says of its licence in its metadata, in one line; the longest texts of licences cut."""
    about = package.metadata
    stated = about.get_all("License-Expression") or [text[:80] for text in about.get_all("License") or []]
    kinds = [one for one in about.get_all("Classifier") or [] if one.startswith("License")]
    text = " ".join([*stated, *kinds])
    return re.sub(
        r"\bLGPL|GNU (Lesser|Library) General Public|GPL.{0,40}with.{0,40}exception", "", text, flags=re.IGNORECASE
    )
