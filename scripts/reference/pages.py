"""Pages made from code, and what the code does not explain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from inspect import cleandoc

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File

from scripts.reference.tiers import MARK, is_experimental


@dataclass
class Reference:
    pages: dict[str, str] = field(default_factory=dict)
    """Markdown by the page's path below `docs`."""
    problems: list[str] = field(default_factory=list)
    """What has no sentence of its own: each of them fails the build."""

    names: dict[str, dict[str, str]] = field(default_factory=dict)
    """Every public name by its kind, with what it means: its type and default, its usage, its signature."""

    def public(self, kind: str, name: str, meaning: str, text: str) -> str:
        """Notes a public name, and returns its text with the mark of the experimental ones."""
        self.names.setdefault(kind, {})[name] = meaning
        return f"{MARK}{text}" if is_experimental(kind, name) else text

    def explained(self, text: str | None, what: str, where: str) -> str:
        """The text as it is; without one, a problem that says what is missing and where to write it."""
        if text and text.strip():
            return cleandoc(text)
        self.problems.append(f"{what} has no description; write a sentence in {where}")
        return ""


def generated(config: MkDocsConfig, uri: str, text: str) -> File:
    return File.generated(config, uri, content=text)


def page(title: str, intro: str, parts: Iterable[str]) -> str:
    """Its text; `docs/NAME.md`, as docstrings name pages, becomes a link."""
    text = "\n\n".join([f"# {title}", intro, *parts]) + "\n"
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](../\1.md)", text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def cell(text: str) -> str:
    """In one line, with bars that do not end the cell."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def code(text: str) -> str:
    return f"`{text}`" if text else ""
