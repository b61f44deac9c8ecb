"""Which public names are stable, and that a stable one changes with a word to those who use it.

A stable name of the release that is gone or means something else must stand in the changelog, in backticks, above
that release; otherwise the docs do not build. `make release` writes the file anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELEASED = Path(__file__).with_name("released_names.json")
CHANGELOG = ROOT / "CHANGELOG.md"
MARK = "*Experimental.* "

EXPERIMENTAL: Mapping[str, tuple[str, ...]] = {
    "command": (
        "palestra sweep",
        "palestra run fork",
        "palestra run replay",
        "palestra env audit",
        "palestra judge",
        "palestra model puppet",
    ),
    "key": (
        "train grpo: algorithm.turns",
        "sweep: ",
    ),
    "python": (
        "palestra.audit",
        "palestra.model.",
        "palestra.gym.nemo_rl",
        "palestra.environments.fleet.",
        "palestra.training.custom_functions",
    ),
    "route": ("dashboard: ",),
}
"""Beginnings of the names of each kind that may change in any release."""


def is_experimental(kind: str, name: str) -> bool:
    return name.startswith(EXPERIMENTAL[kind])


def changes(now: Mapping[str, Mapping[str, str]], changelog: str | None = None) -> Iterator[str]:
    """Says which stable names of the newest release are gone or different without a word in the changelog. `now` has
    the names of each kind with what they mean."""
    released = json.loads(RELEASED.read_text(encoding="utf-8"))
    text = CHANGELOG.read_text(encoding="utf-8") if changelog is None else changelog
    news = text.partition(f"## [{released['version']}]")[0]
    for kind, names in released["names"].items():
        for name, meaning in names.items():
            found = now.get(kind, {}).get(name)
            if found is not None and _holds(kind, meaning, found):
                continue
            if is_experimental(kind, name) or f"`{name.partition(': ')[2] or name}`" in news:
                continue
            what = "is gone" if found is None else f"was {meaning!r} and is {found!r}"
            yield (
                f"the stable {kind} `{name}` of {released['version']} {what}: say in CHANGELOG.md what users must do, "
                "with the name in backticks"
            )


def _holds(kind: str, meaning: str, found: str) -> bool:
    """Whether a name still means what it did. Python names may have gained members, and parameters with a default."""
    if kind != "python" or meaning == found:
        return meaning == found
    (before, members), (now, more) = _parts(meaning), _parts(found)
    added = now[len(before) :]
    return now[: len(before)] == before and all(one.endswith("=") for one in added) and set(members) <= set(more)


def _parts(signature: str) -> tuple[list[str], list[str]]:
    """The parameters of a class or function, and its members with what it is."""
    kind, _, rest = signature.partition("(")
    parameters, _, members = rest.partition(")")
    return [one for one in parameters.split(", ") if one], [kind, *members.split()]


def write(names: Mapping[str, Mapping[str, str]], version: str) -> None:
    """Keeps the stable names as those of a release."""
    stable = {
        kind: {name: meaning for name, meaning in sorted(found.items()) if not is_experimental(kind, name)}
        for kind, found in sorted(names.items())
    }
    RELEASED.write_text(json.dumps({"version": version, "names": stable}, indent=0, ensure_ascii=False) + "\n")
